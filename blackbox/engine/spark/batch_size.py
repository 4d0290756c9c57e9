"""How much of which partition is read in one batch, which all partitions wait for the end of."""

from __future__ import annotations

import time
from collections.abc import Sequence

from blackbox.journal.ranges import Offsets

LONG_S = 5.0
"""Of a batch while as much waits in each partition: the fixed cost of one is small beside that."""
SHORT_S = 1.0
"""While little waits in some and much in others: the former would wait for the latter."""
EVEN = 4
"""Times as much in one partition as in another is still as much."""

FIRST_PER_S = 2_000
"""Offsets, before any batch has told better; of records of 100 kB a machine takes in about as many."""
LEAST_PER_S = 50
GROWTH = 4


class BatchSize:
    """So many offsets as take some seconds by what the last batches took, whatever the records' size."""

    def __init__(self) -> None:
        self._per_s: float = FIRST_PER_S
        self._planned = 0
        self._limit = 0
        self._began_s = 0.0

    def plan(self, start: Offsets, end: Offsets, most: int) -> Offsets:
        """Ends at most `most` offsets away, to be worked on at once."""
        waiting = [count for at in end if (count := end[at] - start[at]) > 0]
        is_even = max(waiting, default=0) <= EVEN * min(waiting, default=0)
        self._limit = min(most, int(self._per_s * (LONG_S if is_even else SHORT_S)))
        ends = shared(start, end, self._limit)
        self._planned = sum(ends[at] - start[at] for at in ends)
        self._began_s = time.monotonic()
        return ends

    def is_done(self) -> None:
        """What was planned last has been worked on."""
        took_s = max(0.001, time.monotonic() - self._began_s)
        is_full = self._planned >= self._limit
        if self._planned and (is_full or took_s > LONG_S):
            per_s = min(GROWTH * self._per_s, self._planned / took_s)
            self._per_s = max(LEAST_PER_S, per_s)
        self._planned = 0


def shared(start: Offsets, end: Offsets, most: int) -> Offsets:
    """Ends at most so many offsets away in all: where little waits, all of it; elsewhere equal shares.

    One offset at least of each partition that has any.
    """
    counts = {at: end[at] - start[at] for at in end}
    share = _share(sorted(counts.values()), most)
    return {at: start[at] + min(count, share) for at, count in counts.items()}


def _share(counts: Sequence[int], most: int) -> int:
    """What those get at most that have more, of ascending counts."""
    left = most
    for place, count in enumerate(counts):
        share = left // (len(counts) - place)
        if count > share:
            return max(1, share)
        left -= count
    return max(counts, default=0)
