"""The entry of a request whose payload Redis lost: made again from its record, or a dead letter.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from blackbox.core.interpret import interpret_record, refused_entry
from blackbox.core.letter_record import RECORD_GONE
from blackbox.core.plan import Carried, Replacement
from blackbox.formats import Format
from blackbox.records.entry import Entry
from blackbox.records.refusal_causes import BROKEN_RULES, TOO_LATE
from blackbox.records.request import Invalid, Reason, Record, Request

TIMELINESS_LOST = (
    "Redis lost the payload, so it is unknown whether this replacement came in time; the replaced "
    "request may have been delivered. Check maxmemory-policy, and replay this one if the other was "
    "not delivered"
)
WAS_INVALID = Invalid(
    Reason.WAS_INVALID,
    "it was invalid when it was read, and is valid by the settings of now; replay it",
)
NOT_IN_TIME = Invalid(
    Reason.TOO_LATE,
    "the request to replace was not pending; by the settings of now, this record is not a request",
)


def reread(format: Format, record: Record, cause: str | None = None) -> Entry:
    """The entry of a request whose stored form was lost, or that was refused for a cause and so has none."""
    if cause is not None and cause in BROKEN_RULES:
        _, asked = interpret_record(format, record, record.timestamp_ms, None)
        letter = refused_entry(record, BROKEN_RULES[cause], record.timestamp_ms)
        return letter if asked is None else letter._replace(caller=asked.caller)
    # without a horizon: it was in the index, whatever the horizon is now
    change, _ = interpret_record(format, record, record.timestamp_ms, None)
    if isinstance(change, Carried):
        change = change.content
    if isinstance(change, Entry) and change.reason is not None:
        return change
    if cause == TOO_LATE and isinstance(change, Replacement):
        return change.too_late
    if cause is not None:
        # A reason of its own: unlike an undeliverable request, it has replaced nothing.
        why = NOT_IN_TIME if cause == TOO_LATE else WAS_INVALID
        return refused_entry(record, why, record.timestamp_ms)
    if isinstance(change, Replacement):
        # only the stored form showed whether it was in time
        why = Invalid(Reason.PAYLOAD_LOST, TIMELINESS_LOST)
        lost = refused_entry(record, why, record.timestamp_ms)
        return lost._replace(caller_id=change.caller_id)
    if isinstance(change, Request):
        return Entry(*change)
    if isinstance(change, Entry):
        return change
    raise ValueError(f"the record at offset {record.offset} is not a request to deliver: {change}")


def payload_lost(offset: int, now_ms: int, cause: str | None = None) -> Entry:
    """The entry for a dead letter in place of a request of which nothing is left, but perhaps a cause."""
    nothing = Record(offset, now_ms, None, None, [])
    if cause is not None and cause in BROKEN_RULES:
        reason, detail = BROKEN_RULES[cause]
        return refused_entry(nothing, Invalid(reason, f"{detail}; {RECORD_GONE}"), now_ms)
    detail = (
        "the payload is missing in Redis and the record in Kafka; check maxmemory-policy and the "
        "request topic's retention.ms"
        if cause is None
        else "the record of a refused request is no longer in Kafka; check the request topic's "
        "retention.ms"
    )
    return refused_entry(nothing, Invalid(Reason.PAYLOAD_LOST, detail), now_ms)
