"""How long a shard gathers due messages for its next transaction."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

SHORTEST_S = 0.012
SAMPLE_S = 0.25
MEMORY_S = 2.0
"""How long processor time counts, about."""
BUSY_SHARE = 0.06
"""The share of a core from which on the pause has its full length."""


class Linger:
    """The pause between two transactions of a shard that were not full; all shards of a process share one.

    However small, a transaction costs about 3 ms of processor here and 3 ms in the broker. The pause
    therefore grows with the processor time of this process, up to `longest_s`. A process that does
    little hardly waits; and a message that comes alone never does, because the pause begins with the
    transaction before it.
    """

    def __init__(
        self,
        longest_s: float,
        *,
        now: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.process_time,
    ) -> None:
        self._longest_s = longest_s
        self._now = now
        self._processor = processor
        self._lock = Lock()
        self._at_s, self._used_s = now(), processor()
        self._share = 0.0

    def pause_s(self) -> float:
        """The time from the start of one transaction of a shard to the next."""
        by_load_s = self._longest_s * self._busy_share() / BUSY_SHARE
        return min(self._longest_s, max(SHORTEST_S, by_load_s))

    def _busy_share(self) -> float:
        """The share of a core that this process used lately: a mean that forgets."""
        with self._lock:
            passed_s = self._now() - self._at_s
            if passed_s >= SAMPLE_S:
                used_s = self._processor()
                weight = min(1.0, passed_s / MEMORY_S)
                share = (used_s - self._used_s) / passed_s
                self._share += weight * (share - self._share)
                self._at_s, self._used_s = self._now(), used_s
            return self._share
