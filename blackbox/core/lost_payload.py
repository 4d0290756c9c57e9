"""The entry of a request whose payload Redis lost: made again from its record, or a dead letter.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from blackbox.core.interpret import interpret_record, refused_entry
from blackbox.core.plan import Carried, Replacement
from blackbox.formats import Format
from blackbox.records.entry import Entry
from blackbox.records.request import Invalid, Reason, Record, Request

TIMELINESS_LOST = (
    "Redis lost the payload, so it is unknown whether this replacement came in time; the replaced "
    "request may have been delivered. Check maxmemory-policy, and replay this one if the other was "
    "not delivered"
)


def reread(format: Format, record: Record, was_invalid: bool = False) -> Entry:
    """The entry of a request whose stored form was lost, or that was invalid and so has none."""
    again = _reread(format, record)
    if not was_invalid or again.reason is not None:
        return again
    detail = "it was invalid when it was read, and is valid by the settings of now; replay it"
    return refused_entry(record, Invalid(Reason.REFUSED, detail), record.timestamp_ms)


def _reread(format: Format, record: Record) -> Entry:
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


def payload_lost(offset: int, now_ms: int, *, is_invalid: bool = False) -> Entry:
    """The entry for a dead letter in place of a request of which nothing is left."""
    detail = (
        "the record of an invalid request is no longer in Kafka; check the request topic's "
        "retention.ms"
        if is_invalid
        else "the payload is missing in Redis and the record in Kafka; check maxmemory-policy and the "
        "request topic's retention.ms"
    )
    nothing = Record(offset, now_ms, None, None, [])
    return refused_entry(nothing, Invalid(Reason.PAYLOAD_LOST, detail), now_ms)
