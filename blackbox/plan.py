"""What the verbs read and change: the values that pass between them, the index and the journals.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from blackbox.entry import Entry
from blackbox.request import Cancel, Record, Request


class Labels(NamedTuple):
    """The two journal positions that define an index: next offset of the requests, of the receipts."""

    requests: int
    receipts: int


class Batch(NamedTuple):
    """What one read of a request topic gave: the records of the offsets `start` to `end` - 1.

    Fewer records than offsets is normal: control records, aborted transactions and compaction
    leave gaps. `start` is the position that was read from, not the first record's offset.
    """

    start: int
    end: int
    records: Sequence[Record]


class Due(NamedTuple):
    """What an index says is due: (offset, stored entry, None if its payload is gone), oldest first.

    `is_full` means that more may be due now. `next_due_ms` is the first due time after now.
    `pending` counts all entries; `oldest_ms` is the due time of the first one.
    """

    entries: list[tuple[int, bytes | None]]
    is_full: bool
    next_due_ms: int | None
    oldest_ms: int | None
    pending: int


class View(NamedTuple):
    """What an index says while a batch is planned: its labels, early removals, holders of caller ids."""

    labels: Labels
    skipped: Container[int]
    holders: Mapping[str, int]


Change = Request | Entry | Cancel
"""A valid request, a request that can only become a dead letter, or a cancel."""


@dataclass(slots=True)
class Plan:
    """What a batch changes: entries to put by offset, pending ones to remove, who holds a caller id."""

    puts: dict[int, Request | Entry] = field(default_factory=dict)
    removals: list[int] = field(default_factory=list)
    holders: dict[str, int | None] = field(default_factory=dict)
    cancelled: int = 0
    replaced: int = 0


def resolve(changes: Sequence[tuple[int, Change]], view: View) -> Plan:
    """Decide what a batch of requests changes, given what the index says.

    A request that is skipped (its removal was read before it) is not put, yet still ends the
    request it replaced.
    """
    plan = Plan(holders=dict(view.holders))
    puts, first, skipped = plan.puts, view.labels.requests, view.skipped
    for offset, change in changes:
        if offset < first:
            continue
        caller_id = change.caller_id
        if caller_id is not None:
            _end_holder(plan, caller_id, is_cancel=isinstance(change, Cancel))
        if not isinstance(change, Cancel) and offset not in skipped:
            puts[offset] = change
            if caller_id is not None:
                plan.holders[caller_id] = offset
    return plan


def _end_holder(plan: Plan, caller_id: str, *, is_cancel: bool) -> None:
    holder = plan.holders.get(caller_id)
    plan.holders[caller_id] = None
    if holder is None:
        return
    if plan.puts.pop(holder, None) is None:
        plan.removals.append(holder)
    if is_cancel:
        plan.cancelled += 1
    else:
        plan.replaced += 1
