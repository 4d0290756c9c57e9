"""The first step of intake: what the records of a batch ask for.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from blackbox.core import interpret
from blackbox.core.plan import (
    UNKNOWN_EPOCH,
    Batch,
    Carried,
    Change,
    Cold,
    Replacement,
    Tail,
    Touched,
)
from blackbox.core.ports import Rulings
from blackbox.formats import Format
from blackbox.formats.format import start_ms
from blackbox.records.request import Cancel, Request


class Parsed(NamedTuple):
    """A parsed batch: what each record of the offsets `start` to `end` - 1 asks for.

    `rulings` are those of the callers' rules about its requests. `epoch` is the leader epoch of the
    first record, `tail` is the last readable one. `kafka_ahead_ms` is how much later than `latest_ms` the
    broker timestamped it, 0 if it is earlier.
    """

    start: int
    end: int
    changes: Sequence[tuple[int, Change]]
    rulings: Rulings | None = None
    tail: Tail | None = None
    epoch: int = UNKNOWN_EPOCH
    kafka_ahead_ms: int | None = None

    @property
    def epochs(self) -> tuple[int, int]:
        """The leader epochs of the first and the last record."""
        return self.epoch, UNKNOWN_EPOCH if self.tail is None else self.tail.epoch


def parse_batch(
    format: Format,
    batch: Batch,
    latest_ms: int,
    horizon_ms: int | None,
    rulings: Rulings | None = None,
) -> Parsed:
    """Parse what a batch's records ask for. Without `rulings` all is allowed."""
    changes: list[tuple[int, Change]] = []
    for record in batch.records:
        change, request = interpret.interpret_record(format, record, latest_ms, horizon_ms)
        if change is None:
            continue
        if rulings is not None and request is not None:
            rulings.see(len(changes), record, request, change, start_ms(record, latest_ms))
        changes.append((record.offset, change))
    # One without content could not be recognised if another client can read it later.
    readable = (record for record in reversed(batch.records) if record.unreadable is None)
    last = next(readable, None)
    epoch, last_epoch = batch.epochs
    tail = None if last is None else Tail.of(last, last_epoch)
    kafka_ahead_ms = (
        max(0, last.timestamp_ms - latest_ms) if last and last.has_broker_time else None
    )
    return Parsed(batch.start, batch.end, changes, rulings, tail, epoch, kafka_ahead_ms)


def touched_by(changes: Sequence[tuple[int, Change]]) -> Touched:
    """The parts of the index that must be read before these changes can be planned."""
    # the usual request touches nothing else
    changes = [
        one for one in changes if type(one[1]) is not Request or one[1].caller_id is not None
    ]
    caller_ids = {change.caller_id for _, change in changes if change.caller_id is not None}
    cold = [(offset, change) for offset, change in changes if _may_be_cold(change)]
    previous = [change.previous for _, change in cold if isinstance(change, Carried)]
    cancelled = {c.id for _, c in changes if type(c) is Cancel and c.id is not None}
    replaced = {c.id for _, c in changes if type(c) is Replacement}
    return Touched(
        sorted(caller_ids),
        [*previous, *(offset for offset, _ in cold)],
        sorted(cancelled | replaced),
        sorted(replaced),
        [offset for offset, change in changes if type(change) in (Carried, Replacement)],
        [change.origin for _, change in changes if type(change) is Carried],
        [offset for offset, change in changes if change.caller_id is not None],
    )


def _may_be_cold(change: Change) -> bool:
    content = change.content if type(change) is Replacement else change
    return type(content) in (Cold, Carried)
