"""How much of each partition is read in one batch; all partitions wait for the end of a batch."""

from __future__ import annotations

import time
from collections.abc import Sequence

from blackbox.journal.ends import Offsets

# If about as much waits in each partition: its fixed cost of 130 to 250 ms is then a small share.
LONG_S = 5.0
# If little waits in some and much in others: the former would wait for the latter.
SHORT_S = 1.0
# The ratio up to which two partitions count as having about as much.
EVEN = 4

# Offsets per second, until a batch was measured: the rate of a machine for records of 100 kB.
FIRST_PER_S = 2_000
LEAST_PER_S = 50
GROWTH = 4


class BatchSize:
    """Plans batches that take some seconds, by what the last ones took, whatever the records' size."""

    def __init__(self) -> None:
        self._per_s: float = FIRST_PER_S
        self._planned = 0
        self._limit = 0
        self._began_s = 0.0

    def plan(self, start: Offsets, end: Offsets, most: int) -> Offsets:
        """The ends of the next batch, at most `most` offsets in all; it is to be worked on at once."""
        waiting = [count for at in end if (count := end[at] - start[at]) > 0]
        is_even = max(waiting, default=0) <= EVEN * min(waiting, default=0)
        self._limit = min(most, int(self._per_s * (LONG_S if is_even else SHORT_S)))
        ends = shared(start, end, self._limit)
        self._planned = sum(ends[at] - start[at] for at in ends)
        self._began_s = time.monotonic()
        return ends

    def batch_done(self) -> None:
        """Note that the batch planned last has been worked on."""
        took_s = max(0.001, time.monotonic() - self._began_s)
        is_full = self._planned >= self._limit
        # Fixed costs dominate a small batch: its rate counts only if it took too long.
        if self._planned and (is_full or took_s > LONG_S):
            per_s = min(GROWTH * self._per_s, self._planned / took_s)
            self._per_s = max(LEAST_PER_S, per_s)
        self._planned = 0


def shared(start: Offsets, end: Offsets, most: int) -> Offsets:
    """Ends of at most `most` offsets in all: all of it where little waits, else equal shares of at least one."""
    counts = {at: end[at] - start[at] for at in end}
    share = _share(sorted(counts.values()), most)
    return {at: start[at] + min(count, share) for at, count in counts.items()}


def _share(counts: Sequence[int], most: int) -> int:
    """The most that each partition gets; `counts` are in ascending order."""
    left = most
    for place, count in enumerate(counts):
        share = left // (len(counts) - place)
        if count > share:
            return max(1, share)
        left -= count
    return max(counts, default=0)
