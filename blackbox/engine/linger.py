"""How long a shard gathers due messages for its next transaction."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock

# From one look at the index to the next: requests that are stored one by one wake their shard each time.
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
    little hardly waits.
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
        return max(SHORTEST_S, min(self._longest_s, by_load_s))

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


class Pace:
    """When a shard looks at its index again. Its own thread waits; other threads may hurry it."""

    def __init__(self, linger: Linger, *, now: Callable[[], float] = time.monotonic) -> None:
        self._linger = linger
        self._now = now
        self._hurried = Event()
        self._sent_s = float("-inf")

    def wait(self, began_s: float, *, has_sent: bool) -> None:
        """Wait after a look that began at `began_s`; `has_sent`: it made a transaction."""
        # From the last transaction, not from a look that found nothing: a message that comes alone
        # is sent when it is due.
        if has_sent:
            self._sent_s = began_s
        until_s = max(began_s + SHORTEST_S, self._sent_s + self._linger.pause_s())
        # Not until a wake-up: one for each message would make a transaction for each.
        self._hurried.wait(max(0.0, until_s - self._now()))

    def hurry(self) -> None:
        """End the wait, and those to come: a stop or a recovery must not wait."""
        self._hurried.set()

    def resume(self) -> None:
        self._hurried.clear()
