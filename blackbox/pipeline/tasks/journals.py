"""Spark tasks that read a range of a journal each, as rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from blackbox.cancel import as_request, cancel_of, cancels, replaces
from blackbox.cold import as_asked, carried, carry_of
from blackbox.connect import formats
from blackbox.journal.access import KafkaAccess
from blackbox.journal.ranges import Chunk, Range, read_ranges
from blackbox.journal.records import read_records
from blackbox.journal.topics import RECEIPTS_SUFFIX
from blackbox.pipeline.tasks.tables import arrow_schema, batch, numbers, tune_once
from blackbox.receipt import Places, Receipt, decode
from blackbox.request import Cancel, Invalid, Reason, Record, Request, Shard, offset_in
from blackbox.settings import Settings

REQUESTS = (
    "topic string, partition int, offset long, timestamp_ms long, kind string, target string, "
    "due_ms long, expires_ms long, caller string, caller_id string, reason string, detail string, "
    "carries long, origin long"
)
"""`kind` is request, cancel or invalid; an invalid one is due when it was written.

A record that promotion wrote `carries` the one at this offset, and is the request of `origin`. A
cancel by id, or a replacement, has the offset of the request in `carries` and no `origin`.
"""

RECORDS = f"{REQUESTS}, key binary, value binary, headers array<struct<key: string, value: binary>>"

OUTCOMES = (
    "topic string, partition int, receipt long, at_ms long, outcome string, offset long, "
    "to_topic string, to_partition int, to_offset long"
)
"""`offset` of the request in `topic`/`partition`, told by the receipt at the offset `receipt`.

`outcome` is delivered, dead, expired, invalid, void or gone (then `to_offset` is where that ends).
"""

_REQUESTS = arrow_schema(REQUESTS)
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_RECORDS = pa.schema(
    [*_REQUESTS, ("key", pa.binary()), ("value", pa.binary()), ("headers", _HEADERS)]
)
_OUTCOMES = arrow_schema(OUTCOMES)


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Reads the ranges of a request topic whose numbers are its rows; `whole` keeps the records."""

    settings: Settings
    access: KafkaAccess
    ranges: tuple[Range, ...]
    whole: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        contracts = formats(self.settings)
        latest_ms = time.time_ns() // 1_000_000
        for chunk in _chunks(self.access, self.ranges, batches):
            read = contracts[chunk.range.topic].parse
            shard = Shard(chunk.range.topic, chunk.range.partition)
            found = [
                (record, row)
                for record in read_records(chunk.messages)
                if (row := _columns_of(read, record, latest_ms, shard)) is not None
            ]
            if found:
                records, rows = (list(part) for part in zip(*found, strict=True))
                yield _request_rows(chunk.range, records if self.whole else None, rows)


@dataclass(frozen=True, slots=True)
class OutcomeRows:
    """Reads the ranges of receipts whose numbers are its rows.

    Raises ValueError, naming the place, for a record that is no receipt.
    """

    access: KafkaAccess
    ranges: tuple[Range, ...]

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for chunk in _chunks(self.access, self.ranges, rows):
            told = [row for message in chunk.messages for row in _told(chunk.range, message)]
            yield _outcome_rows(chunk.range, told)


def _chunks(
    access: KafkaAccess, ranges: tuple[Range, ...], rows: Iterator[pa.RecordBatch]
) -> Iterator[Chunk]:
    tune_once()
    mine = [ranges[number] for number in numbers(rows)]
    return (chunk for chunk in read_ranges(access, mine) if chunk.messages)


def _columns_of(read: Any, record: Record, latest_ms: int, shard: Shard) -> tuple[Any, ...] | None:
    """None for a record that asks for nothing."""
    asked: Request | Cancel | Invalid | None
    about: tuple[Any, ...]
    carries: tuple[int | None, int | None] = (None, None)
    if record.unreadable is not None:
        asked = Invalid(Reason.BAD_HEADERS, record.unreadable)
    elif carried(record.headers):
        asked, carries = _carried(read, record, latest_ms)
    elif cancels(record.headers):
        asked = cancel_of(record)
        if isinstance(asked, Cancel):
            carries = (offset_in(shard, asked.id or ""), None)
    elif replaces(record.headers):
        ended = cancel_of(record)
        asked = ended if isinstance(ended, Invalid) else read(as_request(record), latest_ms)
        if isinstance(ended, Cancel) and isinstance(asked, Request):
            carries = (offset_in(shard, ended.id or ""), None)
    else:
        asked = read(record, latest_ms)
    if asked is None:
        return None
    at = (record.offset, record.timestamp_ms)
    if isinstance(asked, Request):
        target, _, due_ms, _, _, caller, caller_id, expires_ms, _ = asked
        about = ("request", target, due_ms, expires_ms, caller, caller_id, None, None)
    elif isinstance(asked, Cancel):
        about = ("cancel", None, None, None, None, asked.caller_id, None, None)
    else:
        due_ms, reason = record.timestamp_ms, str(asked.reason)
        about = ("invalid", None, due_ms, None, None, None, reason, asked.detail)
    return (*at, *about, *carries)


def _carried(
    read: Any, record: Record, latest_ms: int
) -> tuple[Any, tuple[int | None, int | None]]:
    """What was asked at first; the record that this one carries, and the first of them."""
    try:
        carry = carry_of(record)
    except ValueError as error:
        return Invalid(Reason.BAD_HEADERS, str(error)), (None, None)
    return read(as_asked(record), latest_ms), (carry.previous, carry.origin)


def _request_rows(
    range_: Range, whole: list[Record] | None, rows: list[tuple[Any, ...]]
) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    where = [[range_.topic] * len(rows), [range_.partition] * len(rows)]
    if whole is None:
        return batch([*where, *columns], _REQUESTS)
    keys = [record.key for record in whole]
    values = [record.value for record in whole]
    headers = [[{"key": k, "value": v} for k, v in record.headers] for record in whole]
    return batch([*where, *columns, keys, values, headers], _RECORDS)


def _told(range_: Range, message: Any) -> Iterator[tuple[Any, ...]]:
    try:
        receipt = decode(message.value())
    except ValueError as error:
        at = f"{range_.topic}/{range_.partition}@{message.offset()}"
        raise ValueError(f"{at}: {error}") from None
    for outcome, offset, place in _outcomes(receipt):
        yield (message.offset(), receipt.at_ms, outcome, offset, *place)


def _outcomes(receipt: Receipt) -> Iterator[tuple[str, int, tuple[Any, Any, Any]]]:
    for offset, place in _places(receipt.delivered):
        yield "delivered", offset, place
    letters = dict(_places(receipt.letters))
    nowhere = (None, None, None)
    for outcome in ("dead", "expired", "invalid", "void"):
        for offset in getattr(receipt, outcome):
            yield outcome, offset, nowhere if outcome == "void" else letters.get(offset, nowhere)
    if receipt.gone:
        first, end = receipt.gone
        yield "gone", first, (None, None, end)


def _places(places: Places) -> Iterator[tuple[int, tuple[str, int, int]]]:
    for at, pairs in places.items():
        topic, _, partition = at.rpartition("/")
        for offset, there in pairs:
            yield offset, (topic, int(partition), there)


def _outcome_rows(range_: Range, told: list[tuple[Any, ...]]) -> pa.RecordBatch:
    topic = range_.topic.removesuffix(RECEIPTS_SUFFIX)
    columns = zip(*told, strict=True) if told else [[] for _ in range(len(_OUTCOMES) - 2)]
    return batch([[topic] * len(told), [range_.partition] * len(told), *columns], _OUTCOMES)
