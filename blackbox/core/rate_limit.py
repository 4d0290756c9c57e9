"""Rate limits of targets: what exceeds one is deferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from blackbox.core.due_batch import DueBatch
from blackbox.core.ports import DispatchIndex, Rates
from blackbox.records.errors import IndexFull, IndexLost, RecoveryRequired


def defer_over_rate(
    batch: DueBatch, pace: Rates, index: DispatchIndex, now_ms: int
) -> dict[str, int]:
    """Defer what exceeds its target's rate limit; return how many, by target."""
    limited = pace.limited()
    waiting: dict[str, list[int]] = {}
    for offset, entry in batch.ready.items() if limited else ():
        if entry.target in limited:
            waiting.setdefault(entry.target, []).append(offset)
    later: dict[str, int] = {}
    for target, offsets in waiting.items():
        # released and retried entries are not in the order of due times
        offsets.sort(key=lambda offset: batch.ready[offset].due_ms)
        have_waited = partial(_have_waited, batch, index, offsets)
        try:
            times = pace.times(target, len(offsets), now_ms, have_waited)
        except (IndexFull, IndexLost):  # no rate limit then: deliveries make room
            continue
        for offset, at_ms in zip(offsets, times, strict=True):
            if at_ms > now_ms:
                del batch.ready[offset]
                batch.deferred[offset] = at_ms, None
                later[target] = later.get(target, 0) + 1
    return later


def _have_waited(batch: DueBatch, index: DispatchIndex, offsets: Sequence[int]) -> list[bool]:
    times = index.times(offsets)
    return [times.get(offset, 0) > batch.ready[offset].due_ms for offset in offsets]


def give_back(pace: Rates, later: Mapping[str, int]) -> None:
    """Give back the times that were reserved for messages that are read again now."""
    for target, count in later.items():
        with suppress(RecoveryRequired, IndexFull):
            pace.give_back(target, count)
