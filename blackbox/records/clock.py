"""What time it is, so that one wrong clock makes nothing early."""

from __future__ import annotations

import time
from threading import Lock

MAX_SKEW_MS = 1000
"""Clocks may be apart by this much without a warning."""

OUTDATED_S, LONGEST_S = 5.0, 600.0
"""After which Kafka's clock is read anew while it holds deliveries back: the monotonic clock stands still in a suspend.

Twice as long each time that it is still behind.
"""


class Clock:
    """This host's clock and Redis', which `observe` keeps at hand between two looks.

    A Redis reading ages with the monotonic clock, so that a step of this host's wall clock does
    not move it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._observed: tuple[int, float] | None = None

    def observe(self, redis_ms: int) -> None:
        """Take a reading of Redis' `TIME`, just received."""
        with self._lock:
            self._observed = redis_ms, time.monotonic()

    def earliest_ms(self) -> int:
        """The earlier clock: what is due by it is due by both."""
        return min(self._readings())

    def latest_ms(self) -> int:
        """The later clock: a record's timestamp beyond it is wrong by both."""
        return max(self._readings())

    def skew_ms(self) -> int:
        """How far Redis' clock is ahead of this host's; negative when it is behind."""
        host_ms, redis_ms = self._readings()
        return redis_ms - host_ms

    def _readings(self) -> tuple[int, int]:
        host_ms = time.time_ns() // 1_000_000
        with self._lock:
            if self._observed is None:
                return host_ms, host_ms
            redis_ms, at = self._observed
        return host_ms, redis_ms + int((time.monotonic() - at) * 1000)


class ShardClock:
    """A process' clock and Kafka's: the earliest of all decides what is due.

    A countdown begins at a time that Kafka's clock set. Receipts bound that clock, as their broker timestamps them:
    it is at most the timestamp plus the time since the receipt was sent.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._kafka_ms = 0.0
        """Kafka's clock at the monotonic clock's zero: the lowest upper bound that was found."""
        self._observed_s: float | None = None
        self._patience_s = OUTDATED_S

    def observe_kafka(self, stamped_ms: int | None, sent_s: float) -> None:
        """A receipt that was sent at this monotonic time was stamped so, and acknowledged just now.

        None: brokers do not stamp receipts any more, and nothing is known of their clock.
        """
        if stamped_ms is None:
            with self._lock:
                self._observed_s = None
            return
        now_s = time.monotonic()
        least = stamped_ms - now_s * 1000
        most = stamped_ms + 1 - sent_s * 1000  # timestamps are in whole milliseconds
        with self._lock:
            was_set_forward = self._observed_s is None or least > self._kafka_ms
            self._kafka_ms = most if was_set_forward else min(self._kafka_ms, most)
            self._observed_s = now_s
        is_behind = self.behind_ms() > MAX_SKEW_MS
        self._patience_s = min(2 * self._patience_s, LONGEST_S) if is_behind else OUTDATED_S

    def earliest_ms(self) -> int:
        """The earliest clock: what is due by it is due by all."""
        now_ms = self._clock.earliest_ms()
        return now_ms - max(0, self._behind_ms(now_ms))

    def behind_ms(self) -> int:
        """How far Kafka's clock is behind the earlier of the others; negative when it is ahead, 0 when it is not known."""
        return self._behind_ms(self._clock.earliest_ms())

    def is_outdated(self) -> bool:
        """Whether Kafka's clock holds everything back, as it was known some time ago: this host may have slept since."""
        with self._lock:
            at_s = self._observed_s
        is_old = at_s is not None and time.monotonic() - at_s > self._patience_s
        return is_old and self.behind_ms() > MAX_SKEW_MS

    def _behind_ms(self, now_ms: int) -> int:
        with self._lock:
            if self._observed_s is None:
                return 0
            return now_ms - int(self._kafka_ms + time.monotonic() * 1000)
