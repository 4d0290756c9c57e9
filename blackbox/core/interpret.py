"""The interpretation of one record of a request topic, and the dead letters of refused records.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from itertools import chain

from blackbox.core.plan import Carried, Change, Cold, Replacement
from blackbox.formats import Format
from blackbox.records.cancel import HEADER as CANCELS
from blackbox.records.cancel import REPLACES, as_request, cancel_of
from blackbox.records.carried import HEADER as CARRIED
from blackbox.records.carried import (
    LENGTHS_BYTES,
    carry_of,
    original_record,
    record_bytes,
    stands_for_removed,
)
from blackbox.records.entry import Entry, encode
from blackbox.records.request import Cancel, Invalid, Reason, Record, Request

# Clients and topics take 1 MB by default, and a carried record has one more header. No setting
# changes this: the journal alone decides which requests are cold.
MOST_COLD_BYTES = 900_000

# How far a writer's clock may be ahead. It is more than clocks usually differ by, so such callers
# have cold requests too; these are late by as much.
WRITER_AHEAD_MS = 1000

# Of a stored entry. A caller whose requests are refused must not fill Redis for the others.
MOST_REFUSED_BYTES = 1_000


def interpret_record(
    format: Format, record: Record, latest_ms: int, horizon_ms: int | None
) -> tuple[Change | None, Request | None]:
    """The change that a record makes, or None; and its request, if callers' rules apply to it."""
    # read once, without a call for each kind: this runs for each record
    last = record.headers[-1][0] if record.headers else None
    if last == CARRIED:
        # no request for the rules: they judged it when its own record was read
        return _read_carried(format, record, latest_ms), None
    parsed: Request | Cancel | Invalid | None
    replaced_id: str | None = None
    if record.unreadable is not None:
        parsed = record.unreadable
    elif last == CANCELS:
        parsed = cancel_of(record)
    elif last == REPLACES:
        parsed = named = cancel_of(record)
        if isinstance(named, Cancel):
            parsed, replaced_id = format.parse(as_request(record), latest_ms), named.id
    else:
        parsed = format.parse(record, latest_ms)
    if isinstance(parsed, Invalid):
        # due at once, even if its writer set a timestamp in the future
        return refused_entry(record, parsed, min(record.timestamp_ms, latest_ms)), None
    if not isinstance(parsed, Request):
        return parsed, None
    is_cold = _is_cold(record, parsed, latest_ms, horizon_ms)
    change: Request | Cold = Cold(parsed.caller_id) if is_cold else parsed
    if replaced_id is not None:
        return _replacement(record, replaced_id, change, latest_ms), parsed
    return change, parsed


def _read_carried(format: Format, record: Record, latest_ms: int) -> Carried | Entry:
    due_ms = min(record.timestamp_ms, latest_ms)
    try:
        carry = carry_of(record)
    except ValueError as error:
        return refused_entry(record, Invalid(Reason.BAD_HEADERS, str(error)), due_ms)
    original = original_record(record)
    parsed = (
        _removed(carry.previous)
        if stands_for_removed(record)
        else format.of_accepted.parse(original, latest_ms)
    )
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


def _removed(offset: int) -> Invalid:
    detail = (
        f"Kafka removed the record at offset {offset} before it was promoted or renewed; have the "
        "caller send the request again, and set retention.ms=-1"
    )
    return Invalid(Reason.PAYLOAD_LOST, detail)


def _replacement(record: Record, id: str, content: Request | Cold, latest_ms: int) -> Replacement:
    detail = (
        f"the request to replace, {id}, is not pending: it was delivered, has ended, or was "
        "renewed under another id by the cold tier; look it up"
    )
    letter = Invalid(Reason.TOO_LATE, detail)
    too_late = refused_entry(record, letter, min(record.timestamp_ms, latest_ms))
    return Replacement(id, content.caller_id, content, too_late)


def _is_cold(record: Record, request: Request, latest_ms: int, horizon_ms: int | None) -> bool:
    """Whether a request stays out of the index."""
    # by the record alone, not by the time of reading: a rebuild must come to the same result
    if horizon_ms is None or record.timestamp_ms < 0:
        return False
    # The exception: its due time was made from `latest_ms`, and only the index can keep that.
    if not record.has_broker_time and record.timestamp_ms > latest_ms + WRITER_AHEAD_MS:
        return False
    is_far_ahead = request.due_ms - record.timestamp_ms > horizon_ms
    return is_far_ahead and record_bytes(record) <= MOST_COLD_BYTES


def refused_entry(
    record: Record,
    invalid: Invalid,
    due_ms: int,
    caller: str | None = None,
    caller_id: str | None = None,
) -> Entry:
    """The entry of a request that can only become a dead letter; with the record's content, if it is small."""
    reason, detail = invalid
    letter = Entry(
        "", None, due_ms, caller=caller, caller_id=caller_id, reason=reason, detail=detail
    )
    names_and_values = chain.from_iterable(record.headers)
    # also headers that are empty take room in Redis
    parts = filter(None, (record.key, record.value, *names_and_values))
    size = LENGTHS_BYTES * len(record.headers) + sum(map(len, parts))
    whole = letter._replace(message=record.value, key=record.key, headers=record.headers)
    # JSON has six bytes for a control character
    if size <= MOST_REFUSED_BYTES and len(encode(whole)) <= MOST_REFUSED_BYTES:
        return whole
    # the dead letter is built from the record in Kafka
    return letter._replace(left_bytes=size)
