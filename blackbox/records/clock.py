"""The time that decides what is due, such that one wrong clock makes nothing early."""

from __future__ import annotations

import time
from threading import Lock

# Clocks may be apart by this much without a warning.
MAX_SKEW_MS = 1000
# How far apart the clocks of two hosts may be at most, where a mistake would lose or double a message.
CLOCKS_APART_MS = 60_000

# How long after a reading Kafka's clock is read again if it holds deliveries back, at first and at
# most. Each reading costs a receipt.
OUTDATED_S, LONGEST_S = 5.0, 600.0


class Clock:
    """This host's clock and Redis', whose last reading `observe` stores."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._observed: tuple[int, float] | None = None

    def observe(self, redis_ms: int) -> None:
        """Store a reading of Redis' `TIME` that was just received."""
        with self._lock:
            self._observed = redis_ms, time.monotonic()

    def earliest_ms(self) -> int:
        """The earlier of the two clocks: what is due by it is due by both."""
        return min(self._readings())

    def latest_ms(self) -> int:
        """The later of the two clocks: a record's timestamp beyond it is wrong by both."""
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
        # by the monotonic clock: a step of this host's clock does not move Redis' reading
        return host_ms, redis_ms + int((time.monotonic() - at) * 1000)


class ShardClock:
    """A process' clocks and Kafka's: the earliest of all decides what is due.

    Kafka's clock, at which countdowns begin, is at most the broker's timestamp of a receipt plus
    the time since that receipt was sent.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        # Kafka's clock at the monotonic clock's zero: the lowest upper bound that was found. Lower
        # bounds would delay every message by the time that a receipt takes.
        self._kafka_ms = 0.0
        self._observed_s: float | None = None
        self._patience_s = OUTDATED_S

    def observe_kafka(self, broker_ms: int | None, sent_s: float) -> None:
        """Store the broker's timestamp of a receipt, sent at this monotonic time and just acknowledged.

        None: brokers do not timestamp receipts any more, and nothing is known of their clock.
        """
        if broker_ms is None:
            with self._lock:
                self._observed_s = None
            return
        now_s = time.monotonic()
        least = broker_ms - now_s * 1000
        most = broker_ms + 1 - sent_s * 1000  # timestamps are in whole milliseconds
        with self._lock:
            # A receipt later than the bound: Kafka's clock was set forward, or the monotonic clock
            # stood still while this host was suspended.
            was_set_forward = self._observed_s is None or least > self._kafka_ms
            self._kafka_ms = most if was_set_forward else min(self._kafka_ms, most)
            self._observed_s = now_s
        is_behind = self.behind_ms() > MAX_SKEW_MS
        self._patience_s = min(2 * self._patience_s, LONGEST_S) if is_behind else OUTDATED_S

    def earliest_ms(self) -> int:
        """The earliest of the three clocks: what is due by it is due by all."""
        now_ms = self._clock.earliest_ms()
        return now_ms - max(0, self._behind_ms(now_ms))

    def behind_ms(self) -> int:
        """How far Kafka's clock is behind the earlier of the others; negative: ahead, 0: not known."""
        return self._behind_ms(self._clock.earliest_ms())

    def is_outdated(self) -> bool:
        """Whether an old reading of Kafka's clock holds deliveries back."""
        with self._lock:
            at_s = self._observed_s
        is_old = at_s is not None and time.monotonic() - at_s > self._patience_s
        return is_old and self.behind_ms() > MAX_SKEW_MS

    def _behind_ms(self, now_ms: int) -> int:
        with self._lock:
            if self._observed_s is None:
                return 0
            return now_ms - int(self._kafka_ms + time.monotonic() * 1000)
