"""The status of a request by its own record."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from blackbox.core.ports import Journal
from blackbox.core.request_status import RequestStatus, State
from blackbox.formats import Format
from blackbox.records.cancel import cancel_of, cancels
from blackbox.records.carried import carried, carry_of, original_if_carried
from blackbox.records.request import Cancel, Record, Request, Shard, request_id


class OwnRecord(NamedTuple):
    """The content of a request's own record. The status is `unread`, `cancel` or `tombstone`; `unknown` if it is gone.

    `written_ms` is when Kafka got it, None when that is not known. `origin` is the request as its
    caller wrote it: for a carried record, another offset than its own.
    """

    offset: int
    written_ms: int | None
    status: RequestStatus
    origin: int


def read_own_record(
    shard: Shard, journal: Journal, format: Format, offset: int, now_ms: int, within_s: float
) -> OwnRecord:
    record = journal.record(offset, within_s)
    if record is None:
        return OwnRecord(offset, None, _status(shard, offset, "unknown"), offset)
    written_ms = record.timestamp_ms if record.timestamp_ms >= 0 else None
    return OwnRecord(offset, written_ms, _parsed(shard, format, record, now_ms), origin_of(record))


def origin_of(record: Record) -> int:
    """The offset of the request as its caller wrote it."""
    if carried(record.headers):
        with suppress(ValueError):  # a forged one
            return carry_of(record).origin
    return record.offset


def _parsed(shard: Shard, format: Format, record: Record, now_ms: int) -> RequestStatus:
    offset, record = record.offset, original_if_carried(record)
    if cancels(record.headers):
        named = cancel_of(record)
        return _status(shard, offset, "cancel", caller_id=getattr(named, "id", None))
    parsed = format.parse(record, now_ms)
    if parsed is None:
        return _status(shard, offset, "tombstone")
    if isinstance(parsed, Cancel):
        return _status(shard, offset, "cancel", caller_id=parsed.caller_id)
    if isinstance(parsed, Request):
        return _status(
            shard,
            offset,
            "unread",
            caller=parsed.caller,
            caller_id=parsed.caller_id,
            target=parsed.target,
            due_ms=parsed.due_ms,
        )
    why = {"reason": parsed.reason, "detail": parsed.detail}
    return _status(shard, offset, "unread", due_ms=record.timestamp_ms, **why)


def _status(shard: Shard, offset: int, state: State, **known: Any) -> RequestStatus:
    return RequestStatus(request_id(shard, offset), shard.source(offset), state, **known)
