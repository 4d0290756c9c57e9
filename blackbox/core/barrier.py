"""The barrier that a new owner writes, and the check of the receipt before it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

from blackbox.core.plan import Bounds
from blackbox.core.ports import Journal, Writer
from blackbox.core.receipt_history import other_group
from blackbox.records.errors import RecoveryRequired
from blackbox.records.receipt import DOUBTFUL, NEXT, Claim, Receipt
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.core.recovery")

FIRST_STRETCH = 100
# A void reaches back over DOUBTFUL receipts, so recovery must not leave more of them in doubt.
ATTEMPTS = DOUBTFUL - 2
# Places that cannot be read in this time are checked while the shard is open.
PATIENCE_S = 2.0


def commit_barrier(
    shard: Shard,
    journal: Journal,
    writer: Writer,
    barrier: Receipt,
    since: int,
    groups_checked_below: int,
) -> tuple[int, int]:
    """Commit a new owner's barrier; return the position after it and how many messages were missing.

    The owner has opened its writer. Its index knows the receipts before `since`. The group of
    receipts below `groups_checked_below` has been checked already. Raises RecoveryRequired when other
    owners keep writing receipts, OtherGroup when another group opened the shard at the same moment.
    """
    missing_count = 0
    for attempt in range(ATTEMPTS):
        bounds = journal.receipt_bounds()
        end = bounds.end
        unknown = Bounds(max(since, bounds.start), end)
        # Later attempts read all that came between the look and the barrier: another group may
        # have opened the shard.
        tail = _tail(journal, unknown) if attempt == 0 else list(journal.receipts(*unknown))
        # An owner commits one receipt after the other, so only its last one may be torn. There may
        # have been several owners since the look.
        newest = tail[-1:] if attempt == 0 else tail[-DOUBTFUL:]
        claims = [claim for _, r in newest if not r.barrier for claim in r.claims()]
        missing, unread = journal.check(claims, PATIENCE_S)
        gone = {claim.offset for claim in missing}
        # A recurring request whose next one is missing is void even if its message is there: otherwise it
        # would not recur any more. A next request that cannot be read counts as there.
        unread = {c: why for c, why in unread.items() if c.outcome != NEXT and c.offset not in gone}
        _warn(shard, gone, unread)
        missing_count += len(gone)
        others = [
            r.group
            for at, r in tail
            if at >= groups_checked_below and r.group not in ("", barrier.group)
        ]
        group = others[-1] if others else barrier.group  # the first owner keeps the shard
        writer.begin()
        # void even if unread: the request is pending, and `doubtful` keeps it from being delivered
        void = sorted((*gone, *(claim.offset for claim in unread)))
        position = writer.commit(
            replace(barrier, barrier=True, void=void, doubtful=list(unread), group=group)
        )
        if others:
            raise other_group(shard, group, barrier.group)
        since = end
        # else there is another receipt in between, which must be checked first
        if [at for at, _ in journal.receipts(end, position)] == [position - 1]:
            return position, missing_count
    raise RecoveryRequired(f"{shard}: other owners kept writing receipts; starting over")


def _tail(journal: Journal, bounds: Bounds) -> list[tuple[int, Receipt]]:
    """The last receipts."""
    # aborted ones leave only gaps, so the search may have to go further back
    for stretch in bounds.from_the_end(FIRST_STRETCH):
        if tail := list(journal.receipts(*stretch)):
            return tail
    return []


def _warn(shard: Shard, missing: Collection[int], unread: Mapping[Claim, str]) -> None:
    if missing:
        logger.warning(
            "%s: messages or next requests of %d requests, named by the last receipt, do not "
            "exist; these requests stay pending",
            shard, len(missing),
        )  # fmt: skip
    if unread:
        logger.warning(
            "%s: cannot read whether %d messages of the last receipt exist; their requests "
            "wait, all others continue: %s", shard, len(unread), next(iter(unread.values())),
        )  # fmt: skip
