"""Remove from an index what has ended, or is ended by records that stay in Kafka for now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from blackbox.core.offset_set import OffsetSet
from blackbox.core.ports import RecoveryIndex, SettlingIndex
from blackbox.core.settlement import Settlement
from blackbox.core.upcoming import Upcoming

# Requests per step: Redis serves no other client while it applies one.
CHUNK = 5000


def apply_outcomes(index: SettlingIndex, ended: Iterable[int], position: int) -> None:
    """Remove from an index what has ended, according to the receipts before a position."""
    left = iter(ended)
    while found := list(islice(left, CHUNK)):
        # Delivered by their first records under a longer horizon, after this index was copied.
        _remove(index, [*found, *index.moved(found).values()])
    # the position last: after a crash, the next owner reads these receipts again
    index.settle(Settlement({}, position))


def remove_ended(index: RecoveryIndex, ended: OffsetSet) -> None:
    """Remove what has ended when a rebuild continues."""
    # If Redis went back to before the end of a rebuild, that rebuild was complete once, and some
    # of these requests were delivered after it.
    rank = 0
    while pending := index.pending(rank, CHUNK):
        found = [offset for offset in pending if offset in ended]
        if found:
            _remove(index, found)
        rank += len(pending) - len(found)  # the removed entries have left the ranks


def _remove(index: SettlingIndex, offsets: Sequence[int]) -> None:
    known = index.caller_ids(offsets)
    removals = {offset: known.get(offset) for offset in offsets}
    index.settle(Settlement(removals, index.positions.receipts))


def end_by_upcoming(index: RecoveryIndex, upcoming: Upcoming, ended: OffsetSet) -> None:
    """Remove the pending requests that these records end, which stay in Kafka for now."""
    holders = index.holders(upcoming.touched.caller_ids)
    removed = index.caller_ids(list(holders.values()))  # without those of the cold tier
    by_id = index.named(upcoming.touched.ids).values()
    removed |= {one.offset: one.caller_id for one in by_id if one.is_pending}
    # Under a shorter horizon than now these were cold, carried on and then delivered.
    delivered = {o for at, *before in upcoming.carried if at in ended for o in before}
    known = [offset for offset in delivered if offset < index.positions.requests]
    removed |= dict.fromkeys(known) | index.caller_ids(known)
    # they may have been delivered: they end only once it is known that they were not
    if in_doubt := removed.keys() & index.doubtful.keys():
        index.end_if_undelivered(in_doubt)
    removed = {o: c for o, c in removed.items() if o not in in_doubt}
    if removed:
        index.settle(Settlement(removed, index.positions.receipts))
    if upcoming.replacement is not None:
        _replace_early(index, *upcoming.replacement)


def _replace_early(index: RecoveryIndex, offset: int, id: str, caller_id: str | None) -> None:
    """Remove what a replacement ends, also under its caller id; remember that it counts."""
    # It may have been delivered before Redis was lost. If the request that it replaces were
    # delivered now, both would be.
    named = index.named([id]).get(id)
    if named is not None and named.is_pending and named.offset not in index.doubtful:
        own = [] if caller_id is None else [caller_id]
        removed = index.caller_ids(list(index.holders(own).values()))
        removed[named.offset] = named.caller_id
        index.settle(Settlement(removed, index.positions.receipts, early=[offset]))
