"""What time it is, so that one wrong clock makes nothing early."""

from __future__ import annotations

import time
from threading import Lock

MAX_SKEW_MS = 1000
"""Redis' clock and this host's may be apart by this much without a warning."""


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
