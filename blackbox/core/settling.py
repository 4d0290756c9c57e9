"""Remove from an index what has ended according to receipts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from blackbox.core.ports import Index

CHUNK = 5000


def settle(index: Index, ended: Iterable[int], position: int) -> None:
    """Remove from an index what has ended; the position `receipts` is set last."""
    left = iter(ended)
    while found := list(islice(left, CHUNK)):
        # Under a longer horizon they were delivered by their first records, after this index was copied.
        removed = [*found, *index.moved(found).values()]
        known = index.caller_ids(removed)
        removals = {offset: known.get(offset) for offset in removed}
        index.settle(removals, index.positions.receipts)
    index.settle({}, position)
