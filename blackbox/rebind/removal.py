"""Removal of leftovers, once they are written again, from an index that is kept."""

from __future__ import annotations

from blackbox.core.settling import CHUNK, apply_outcomes
from blackbox.index.shard_index import ShardIndex


def take_off(index: ShardIndex, first: int) -> None:
    """Remove the leftovers, those from the offset `first` on, from an index that is kept."""
    # Until nothing is found: another run may do the same, and move ranks.
    while there := _pending_from(index, first):
        apply_outcomes(index, there, index.positions.receipts)


def _pending_from(index: ShardIndex, first: int) -> list[int]:
    there: list[int] = []
    rank = 0
    while found := index.pending(rank, CHUNK):
        rank += len(found)
        there += [offset for offset in found if offset >= first]
    return there
