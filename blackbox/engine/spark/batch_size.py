"""How much of each partition is read in one batch; all partitions wait for the end of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blackbox.journal.readable_bounds import Offsets, Partition

# If about as much waits in each partition: its fixed cost of 130 to 250 ms is then a small share.
LONG_S = 5.0
# Otherwise the partitions in which little or nothing waits would wait for the others.
SHORT_S = 1.0
# The ratio up to which two partitions count as having about as much.
EVEN = 4

# Seconds per offset, until they were measured: those of a machine for records of 100 kB.
FIRST_COST_S = 1 / 2_000

Costs = Mapping[Partition, float]
"""The cost of an offset of each partition, in seconds: large records cost many times as much as small ones."""


def batch_ends(start: Offsets, end: Offsets, most: int, costs: Costs, tasks: int) -> Offsets:
    """The ends of a batch that `tasks` tasks read in some seconds; at most `most` offsets in all."""
    cost_s = {at: costs.get(at, FIRST_COST_S) for at in end}
    waiting_s = {at: (end[at] - start[at]) * cost_s[at] for at in end}
    is_even = max(waiting_s.values(), default=0) <= EVEN * min(waiting_s.values(), default=0)
    longest_s = LONG_S if is_even else SHORT_S
    # One task reads a partition, so a partition cannot take more.
    taken_s = sorted(min(seconds, longest_s) for seconds in waiting_s.values())
    share_s = _share(taken_s, longest_s * tasks)
    # Rounded, not cut: otherwise the last offset of a backlog that fits could wait for the next batch.
    counts = {at: max(1, round(share_s / cost_s[at])) for at in end}
    ends = {at: start[at] + min(end[at] - start[at], counts[at]) for at in end}
    return shared(start, ends, most)


def shared(start: Offsets, end: Offsets, most: int) -> Offsets:
    """Ends of at most `most` offsets in all: all of it where little waits, else equal shares of at least one."""
    counts = {at: end[at] - start[at] for at in end}
    share = max(1, int(_share(sorted(counts.values()), most)))
    return {at: start[at] + min(count, share) for at, count in counts.items()}


def _share(amounts: Sequence[float], most: float) -> float:
    """The most that each partition gets; the amounts that wait are in ascending order."""
    left = most
    for place, amount in enumerate(amounts):
        share = left / (len(amounts) - place)
        if amount > share:
            return share
        left -= amount
    return max(amounts, default=0)
