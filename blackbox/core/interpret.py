"""The interpretation of one record of a request topic, and the dead letters of refused records.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from blackbox.core.plan import Batch, Carried, Change, Cold, Replacement
from blackbox.formats import Format
from blackbox.records.cancel import as_request, cancel_of, cancels, replaces
from blackbox.records.carried import carried, carry_of, original_record
from blackbox.records.entry import Entry
from blackbox.records.outgoing import Refusal
from blackbox.records.recurrence import follows
from blackbox.records.request import OUTCOME_UNKNOWN, Cancel, Invalid, Reason, Record, Request

# Clients and topics take 1 MB by default; a carried record has one more header.
MOST_COLD_BYTES = 900_000

# A caller whose requests are refused must not fill Redis for the others.
MOST_REFUSED_BYTES = 1_000

TIMELINESS_LOST = (
    "Redis lost the payload, so it is unknown whether this replacement came in time; the replaced "
    "request may have been delivered. Check maxmemory-policy, and replay this one if the other was "
    "not delivered"
)


def interpret_record(
    format: Format, record: Record, latest_ms: int, horizon_ms: int | None
) -> tuple[Change | None, Request | None]:
    """The change that a record makes, or None; and its request, if callers' rules apply to it."""
    if carried(record.headers):
        # no request for the rules: they judged it when its own record was read
        return _read_carried(format, record, latest_ms), None
    parsed: Request | Cancel | Invalid | None
    replaced_id: str | None = None
    if record.unreadable is not None:
        parsed = Invalid(Reason.BAD_HEADERS, record.unreadable)
    elif cancels(record.headers):
        parsed = cancel_of(record)
    elif replaces(record.headers):
        parsed = named = cancel_of(record)
        if isinstance(named, Cancel):
            parsed, replaced_id = format.parse(as_request(record), latest_ms), named.id
    else:
        parsed = format.parse(record, latest_ms)
    if isinstance(parsed, Invalid):
        # due at once, also if its writer set a timestamp in the future
        return refused_entry(record, parsed, min(record.timestamp_ms, latest_ms)), None
    if not isinstance(parsed, Request):
        return parsed, None
    is_cold = _is_cold(record, parsed, horizon_ms)
    change: Request | Cold = Cold(parsed.caller_id) if is_cold else parsed
    if replaced_id is not None:
        return _replacement(record, replaced_id, change, latest_ms), parsed
    return change, parsed


def reread(format: Format, record: Record) -> Entry:
    """The entry of a request whose stored form was lost."""
    # without a horizon: it was in the index, whatever the horizon is now
    change, _ = interpret_record(format, record, record.timestamp_ms, None)
    if isinstance(change, Replacement):
        # only the stored form showed whether it was in time
        letter = Invalid(Reason.PAYLOAD_LOST, TIMELINESS_LOST)
        lost = refused_entry(record, letter, record.timestamp_ms)
        return lost._replace(caller_id=change.caller_id)
    if isinstance(change, Carried):
        change = change.content
    if isinstance(change, Request):
        return Entry(*change)
    if isinstance(change, Entry):
        return change
    raise ValueError(f"the record at offset {record.offset} is not a request to deliver: {change}")


def _read_carried(format: Format, record: Record, latest_ms: int) -> Carried | Entry:
    due_ms = min(record.timestamp_ms, latest_ms)
    try:
        carry = carry_of(record)
    except ValueError as error:
        return refused_entry(record, Invalid(Reason.BAD_HEADERS, str(error)), due_ms)
    original = original_record(record)
    parsed = format.parse(original, latest_ms)
    if isinstance(parsed, Request):
        hot = Entry(*parsed, origin=carry.origin)
        cold = Cold(parsed.caller_id)
        return Carried(
            carry.previous, carry.origin, parsed.caller_id, cold if carry.is_cold else hot
        )
    if parsed is None or isinstance(parsed, Cancel):
        detail = "the carried record is not a request; only blackbox may write blackbox-carried"
        return refused_entry(record, Invalid(Reason.BAD_HEADERS, detail), due_ms)
    return Carried(carry.previous, carry.origin, None, refused_entry(original, parsed, due_ms))


def _replacement(record: Record, id: str, content: Request | Cold, latest_ms: int) -> Replacement:
    detail = (
        f"the request to replace, {id}, is not pending: it was delivered, has ended, or was "
        "renewed under another id by the cold tier; look it up"
    )
    letter = Invalid(Reason.TOO_LATE, detail)
    too_late = refused_entry(record, letter, min(record.timestamp_ms, latest_ms))
    return Replacement(id, content.caller_id, content, too_late)


def _is_cold(record: Record, request: Request, horizon_ms: int | None) -> bool:
    """Whether a request stays out of the index."""
    # by the record alone, not by the time of reading: a rebuild must come to the same result
    if horizon_ms is None or record.timestamp_ms < 0:
        return False
    is_far_ahead = request.due_ms - record.timestamp_ms > horizon_ms
    return is_far_ahead and len(record.value or b"") <= MOST_COLD_BYTES


def counts(change: Change, request: Request, record: Record) -> bool:
    """Whether a request counts against a quota; not one that replaces, or that blackbox wrote itself."""
    is_next = request.recurs is not None and follows(record.headers)
    return type(change) is not Replacement and not is_next


def refused_entry(record: Record, invalid: Invalid, due_ms: int) -> Entry:
    """The entry of a request that can only become a dead letter; with the record's content, if it is small."""
    entry = Entry("", None, due_ms, reason=invalid.reason, detail=invalid.detail)
    names_and_values = chain.from_iterable(record.headers)
    size = sum(
        len(part) for part in (record.key, record.value, *names_and_values) if part is not None
    )
    if size > MOST_REFUSED_BYTES:
        # the dead letter is built from the record in Kafka
        return entry._replace(left_bytes=size)
    return entry._replace(message=record.value, key=record.key, headers=record.headers)


def not_admitted(
    record: Record, request: Request, change: Change, refusal: Refusal, due_ms: int
) -> Change:
    """The dead letter of a request that is not admitted."""
    reason, detail = refusal
    letter = refused_entry(record, Invalid(Reason(reason), detail), due_ms)
    letter = letter._replace(caller=request.caller, caller_id=request.caller_id)
    # a refused request still replaces: its caller has declared the earlier one obsolete
    return change._replace(content=letter) if type(change) is Replacement else letter


def outcome_unknown(
    batch: Batch, changes: Sequence[tuple[int, Change]], before_ms: int
) -> list[tuple[int, Change]]:
    """Put dead letters in place of what may have been delivered, or may have been too late to replace."""
    records = {record.offset: record for record in batch.records}
    replaced: list[tuple[int, Change]] = []
    for offset, change in changes:
        record, letter = records[offset], Invalid(Reason.OUTCOME_UNKNOWN, OUTCOME_UNKNOWN)
        content = change.content if isinstance(change, Carried | Replacement) else change
        due_ms = content.due_ms if isinstance(content, Request | Entry) else None
        is_old_replacement = type(change) is Replacement and record.timestamp_ms <= before_ms
        is_valid = isinstance(content, Request) or (
            isinstance(content, Entry) and not content.reason
        )
        if (is_valid and due_ms is not None and due_ms <= before_ms) or is_old_replacement:
            if isinstance(content, Request | Entry) and content.recurs is not None:
                # the request's own fields, not the record: the next time is asked for from these
                unknown = Entry(*content)._replace(reason=letter.reason, detail=letter.detail)
            else:
                unknown = refused_entry(record, letter, due_ms or record.timestamp_ms)
                unknown = unknown._replace(caller_id=change.caller_id)
            if isinstance(change, Carried | Replacement):
                change = change._replace(content=unknown)
            else:
                change = unknown
        replaced.append((offset, change))
    return replaced
