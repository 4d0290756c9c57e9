"""Reschedule a pending request: write it again with another due time, to replace the first one."""

from __future__ import annotations

from base64 import b64encode
from datetime import datetime
from typing import NamedTuple

import orjson

from blackbox.client.request_value import instant
from blackbox.formats import Format
from blackbox.records.cancel import REPLACES, as_request, replaces
from blackbox.records.carried import carried, original_record
from blackbox.records.recurrence import without_follows
from blackbox.records.request import Headers, Record, Request, Shard, request_id


class ReplacementRecord(NamedTuple):
    """A record that replaces a request; write it to the partition of that request."""

    key: bytes | None
    value: bytes
    headers: Headers


def replacement_of(
    shard: Shard,
    record: Record,
    format: Format,
    *,
    countdown_s: float | None = None,
    at: datetime | str | int | None = None,
) -> ReplacementRecord:
    """The same request in the format `countdown` with a new due time; `countdown_s` counts from now.

    The message stays the same byte for byte. A recurring request recurs as before, from the new
    time on. Raises ValueError for a record that is not a valid request in this format, and unless
    exactly one of the two times is given.
    """
    if (countdown_s is None) is (at is None):
        raise ValueError("give exactly one of countdown and at")
    # The request as its caller wrote it: its terms, without the conditions of later records.
    original = original_record(record) if carried(record.headers) else record
    original = as_request(original) if replaces(original.headers) else original
    request = format.parse(original, original.timestamp_ms)
    if not isinstance(request, Request):
        raise ValueError(
            f"{shard.source(record.offset)} is not a valid request of the format countdown"
        )
    terms = orjson.loads(original.value or b"")
    # JSON is not written twice: a number may change on the way. Bytes stay as they are.
    if not isinstance(terms["message"], str) and request.message is not None:
        terms |= {"message": b64encode(request.message).decode(), "encoding": "base64"}
    terms |= {"countdown": countdown_s, "at": instant(at)}
    # The record that is in the index, which may be a carried one. The header must be the last.
    name = request_id(shard, record.offset).encode()
    headers: Headers = [*without_follows(original.headers), (REPLACES, name)]
    return ReplacementRecord(original.key, orjson.dumps(terms), headers)
