"""The barrier that a new owner writes, and the receipt before it that may not have come true."""

from __future__ import annotations

import logging
from dataclasses import replace

from blackbox.doubt import Doubt
from blackbox.marks import other_group
from blackbox.plan import Bounds
from blackbox.ports import Journal, Writer
from blackbox.receipt import DOUBTFUL, Receipt
from blackbox.request import Shard

logger = logging.getLogger("blackbox.recovery")

TAIL = 100
ROUNDS = DOUBTFUL - 2


def commit_barrier(
    shard: Shard, journal: Journal, writer: Writer, barrier: Receipt, since: int, checked: int
) -> tuple[int, int]:
    """The label that a new owner's barrier reaches, and how many outcomes it voids.

    The owner has opened its writer, and its index knows the receipts before `since`; of those below `checked` it has
    looked whose they are. Raises a Doubt when others keep writing receipts, OtherGroup when another group opened the
    shard in the same moment.
    """
    void = 0
    for attempt in range(ROUNDS):
        bounds = journal.receipt_bounds()
        end = bounds.end
        tail = _tail(journal, Bounds(max(since, bounds.start), end))
        newest = tail[-1:] if attempt == 0 else tail
        missing = journal.missing([r for _, r in newest if not r.barrier])
        if missing:
            logger.warning(
                "%s: the last receipt names %d messages that are not there; they stay pending",
                shard, len(missing),
            )  # fmt: skip
        void += len(missing)
        others = [r.group for at, r in tail if at >= checked and r.group not in ("", barrier.group)]
        group = others[-1] if others else barrier.group  # who was first keeps the shard
        writer.begin()
        label = writer.commit(replace(barrier, barrier=True, void=missing, group=group))
        if others:
            raise other_group(shard, group, barrier.group)
        since = end
        if [at for at, _ in journal.receipts(end, label)] == [label - 1]:
            return label, void
    raise Doubt(f"{shard}: other owners kept writing receipts; starting over")


def _tail(journal: Journal, bounds: Bounds) -> list[tuple[int, Receipt]]:
    """The last receipts; further back where there are none, as aborted ones leave only gaps."""
    for stretch in bounds.from_the_end(TAIL):
        if tail := list(journal.receipts(*stretch)):
            return tail
    return []
