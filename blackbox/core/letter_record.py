"""The record in a dead letter, if it is not read from Kafka.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from blackbox.core.due_batch import is_record
from blackbox.formats import Format
from blackbox.records.entry import Entry
from blackbox.records.outgoing import MESSAGE_ONLY, rewritten_request
from blackbox.records.request import Record, Shard

RECORD_GONE = "the record was too large for Redis and is no longer in Kafka"


def stand_in(shard: Shard, offset: int, entry: Entry, format: Format) -> tuple[Record, str]:
    """The remains of a request in Redis, and the detail of its dead letter."""
    detail = entry.detail or ""
    if entry.left_bytes:
        detail = f"{detail}; {RECORD_GONE}"
    elif not is_record(entry) and not format.is_written_by_blackbox:
        return _record(offset, entry, entry.key, entry.message), f"{MESSAGE_ONLY}; {detail}"
    return as_record(shard, offset, entry), detail


def as_record(shard: Shard, offset: int, entry: Entry) -> Record:
    """The record itself, or one that asks for the same in the format `countdown`."""
    if is_record(entry):
        return _record(offset, entry, entry.key, entry.message)
    asked = rewritten_request(shard, offset, entry, shard.partition)
    return _record(offset, entry, asked.key, asked.value)


def _record(offset: int, entry: Entry, key: bytes | None, value: bytes | None) -> Record:
    headers = [(name, v.encode() if isinstance(v, str) else v) for name, v in entry.headers]
    return Record(offset, entry.due_ms, key, value, headers)
