"""The changes that a batch of requests makes in an index.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from blackbox.core.plan import Carried, Change, Cold, Plan, Replacement, View
from blackbox.records.entry import Entry
from blackbox.records.request import Cancel


def resolve(changes: Sequence[tuple[int, Change]], view: View) -> Plan:
    """Decide what a batch of requests changes, given a view of the index."""
    plan = Plan(holders=dict(view.holders))
    puts, first, skipped = plan.puts, view.positions.requests, view.skipped
    for offset, change in changes:
        if offset < first:
            continue
        if type(change) is Cancel and change.id is not None:
            if _end_named(plan, view, change.id):
                plan.cancelled += 1
            else:
                _cancel_when_read(plan, view, change.id, offset)
            continue
        if type(change) is Replacement:
            # One that was too late stays so, whatever is pending under another horizon.
            was_too_late = offset in view.ignored or offset in view.too_late
            is_in_time = not was_too_late and _end_named(plan, view, change.id, offset)
            plan.replaced += is_in_time
            if not is_in_time:
                plan.ignored.add(offset)
            # `too_late` has no caller id: it ends nothing
            change = change.content if is_in_time else change.too_late
        if type(change) is Carried:
            if not _takes_over(plan, view, offset, change):
                plan.ignored.add(offset)
                continue
            change = change.content
        elif change.caller_id is not None and not _was_refused(view, offset):
            _end_holder(plan, view, change.caller_id, is_cancel=type(change) is Cancel)
        # skipped: its removal was read before it; what it replaced has ended all the same
        if type(change) is Cancel or offset in skipped:
            continue
        if type(change) is Cold:
            plan.to_cold.add(offset)
        else:
            puts[offset] = change  # type: ignore[assignment]
        if change.caller_id is not None:
            plan.holders[change.caller_id] = offset
    return plan


def _was_refused(view: View, offset: int) -> bool:
    """Whether this record is an invalid one that has become a dead letter, and so ended nothing."""
    # By the settings of now, or by a later version, it may be valid.
    return offset in view.skipped and (offset in view.too_late or offset in view.ignored)


def _end_holder(plan: Plan, view: View, caller_id: str, *, is_cancel: bool) -> None:
    holder = plan.holders.get(caller_id)
    plan.holders[caller_id] = None
    if holder is None:
        return
    _end(plan, view, holder)
    if is_cancel:
        plan.cancelled += 1
    else:
        plan.replaced += 1


def _end_named(plan: Plan, view: View, id: str, by: int | None = None) -> bool:
    """End the request of this id, if it was pending; return whether it was. A dead letter is not ended.

    `by` is the offset of a replacement, None for a cancel.
    """
    if id not in view.named:
        return False
    offset, is_pending, caller_id, origin = view.named[id]
    # promotion may have brought it in earlier in this batch
    offset = plan.moved.get(offset if origin is None else origin, offset)
    if offset in view.doubtful:
        if by is None:
            plan.ended_in_doubt.add(offset)
        return False
    # the request that it replaces was removed when Redis had no room for this one
    if by is not None and by in view.early:
        return True
    # the index does not know the request: only receipts say whether this was in time
    if by is not None and not view.knows(offset):
        return view.counted(by, offset)
    new = plan.puts.get(offset)
    if new is not None:
        if isinstance(new, Entry) and new.reason is not None:
            return False
        caller_id = new.caller_id
        del plan.puts[offset]
    elif is_pending and offset not in plan.removals:
        plan.removals.append(offset)
    elif not _take_from_cold(plan, view, offset):
        return False
    if caller_id is not None and plan.holders.get(caller_id) == offset:
        plan.holders[caller_id] = None
    return True


def _cancel_when_read(plan: Plan, view: View, id: str, by: int) -> None:
    """End a cold request when it is next read: it may be written again, and only Kafka knows where."""
    if id in view.named and (view.has_cold or plan.to_cold):
        offset, _, _, origin = view.named[id]
        original = offset if origin is None else origin
        # The bit of one that was never renewed would have been found. Without this check, each cancel that
        # comes too late, as of a timeout that has fired, would be stored.
        renewed_below = max(view.renewed_below, plan.renewed_below)
        if original < by and (original < renewed_below or not view.knows(original)):
            plan.cancelled_cold[original] = by


def _takes_over(plan: Plan, view: View, offset: int, change: Carried) -> bool:
    """Whether a carried record is the one that counts from now on."""
    previous, origin, caller_id, _ = change
    # The bit is gone if the request was ended or carried on already, and was never set if the
    # horizon is longer now: the request is in the index itself. A delivery of the carried record
    # ends it there. For requests before the beginning of the index, receipts decide.
    is_cold = _take_from_cold(plan, view, previous)
    was_delivered = offset in view.skipped
    counted_by_receipts = not view.knows(previous) and view.counted(offset, previous)
    if not (is_cold or was_delivered or counted_by_receipts):
        return False
    if caller_id is not None and plan.holders.get(caller_id) in (previous, origin):
        plan.holders[caller_id] = None
    # cancelled by its first id while it was cold
    if origin in plan.cancelled_cold or view.cancelled_cold.get(origin, offset) < offset:
        plan.cancelled += 1
        return False
    if not is_cold:
        _end(plan, view, previous)
        _end(plan, view, origin)
    plan.carried.add(offset)
    if type(change.content) is Cold:
        plan.renewed_below = max(plan.renewed_below, origin + 1)
    elif not was_delivered:
        plan.moved[origin] = offset  # not of a cold one: a later batch would not find it either
    return True


def _end(plan: Plan, view: View, offset: int) -> None:
    if offset in view.doubtful:
        plan.ended_in_doubt.add(offset)
        return
    if plan.puts.pop(offset, None) is None and not _take_from_cold(plan, view, offset):
        plan.removals.append(offset)


def _take_from_cold(plan: Plan, view: View, offset: int) -> bool:
    """Take a request out of the cold tier; return False if it is not in it."""
    if offset in plan.to_cold:
        plan.to_cold.remove(offset)
        return True
    if offset in view.cold and offset not in plan.from_cold:
        plan.from_cold.add(offset)
        return True
    return False
