"""Spark tasks that read a range of a journal each, as rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from blackbox.config.settings import Settings
from blackbox.config.wiring import formats
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.message_conversion import read_records
from blackbox.journal.ranges import Chunk, Range, read_ranges
from blackbox.journal.receipt_parsing import read_receipts
from blackbox.journal.topics import RECEIPTS_SUFFIX
from blackbox.records.cancel import as_request, cancel_of, cancels, replaces
from blackbox.records.carried import carried, carry_of, original_record
from blackbox.records.receipt import Places, Receipt
from blackbox.records.request import Cancel, Invalid, Reason, Record, Request, Shard, offset_in
from blackbox.spark.task_io import as_batches, numbers

REQUESTS = (
    "topic string, partition int, offset long, timestamp_ms long, kind string, target string, "
    "due_ms long, expires_ms long, caller string, caller_id string, reason string, detail string, "
    "carries long, origin long"
)
"""`kind` is request, cancel or invalid; an invalid one is due when it was written.

For a record that promotion wrote, `carries` is the offset of the record it was written from, and
`origin` that of the original request. For a cancel by id, or a replacement, `carries` is the offset
of the request, and there is no `origin`.
"""

RECORDS = f"{REQUESTS}, key binary, value binary, headers array<struct<key:string,value:binary>>"

OUTCOMES = (
    "topic string, partition int, receipt long, at_ms long, outcome string, offset long, "
    "to_topic string, to_partition int, to_offset long"
)
"""`offset` is that of the request in `topic`/`partition`, `receipt` that of the receipt that names it.

`outcome` is delivered, dead, expired, invalid, void, gone (then `to_offset` is where that ends),
ignored (a conditional record that did not count), cut (from this offset on, this and earlier receipts
name other requests than the current ones), mark (no receipt below `to_offset` names a request from
this offset on), or unknown (requests that were due before the time `to_offset`, epoch ms, may have an
outcome that is in no receipt; `offset` is how far the writer had read).
"""


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Reads the ranges of request topics whose numbers it gets as rows; `whole` adds the records."""

    settings: Settings
    access: KafkaAccess
    ranges: tuple[Range, ...]
    whole: bool
    skip_removed: bool = False

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        read = read_numbered_ranges(
            self.access, self.ranges, batches, skip_removed=self.skip_removed
        )
        return as_batches(self._rows(read), RECORDS if self.whole else REQUESTS)

    def _rows(self, read: Iterator[Chunk]) -> Iterator[list[tuple[Any, ...]]]:
        formats_by_topic = formats(self.settings)
        # Parsed as the service would now: timestamps that callers set are capped at this time.
        latest_ms = time.time_ns() // 1_000_000
        for chunk in read:
            parse = formats_by_topic[chunk.range.topic].parse
            shard = Shard(chunk.range.topic, chunk.range.partition)
            yield [
                (*row, *_written(record)) if self.whole else row
                for record in read_records(chunk.messages)
                if (row := _columns_of(parse, record, latest_ms, shard)) is not None
            ]


@dataclass(frozen=True, slots=True)
class OutcomeRows:
    """Reads the ranges of receipts whose numbers it gets as rows, without records that are not receipts.

    Raises RecoveryRequired, naming the place, for a receipt of another version.
    """

    access: KafkaAccess
    ranges: tuple[Range, ...]
    skip_removed: bool = False

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        read = read_numbered_ranges(
            self.access, self.ranges, batches, skip_removed=self.skip_removed
        )
        return as_batches((list(_outcome_rows(chunk)) for chunk in read), OUTCOMES)


def read_numbered_ranges(
    access: KafkaAccess,
    ranges: tuple[Range, ...],
    batches: Iterator[pa.RecordBatch],
    *,
    skip_removed: bool = False,
) -> Iterator[Chunk]:
    wanted = [ranges[number] for number in numbers(batches)]
    return read_ranges(access, wanted, skip_removed=skip_removed)


def _columns_of(read: Any, record: Record, latest_ms: int, shard: Shard) -> tuple[Any, ...] | None:
    """The row of a record; None for a record that asks for nothing."""
    asked: Request | Cancel | Invalid | None
    about: tuple[Any, ...]
    carries: tuple[int | None, int | None] = (None, None)
    if record.unreadable is not None:
        asked = record.unreadable
    elif carried(record.headers):
        try:
            carry = carry_of(record)
            asked, carries = (
                read(original_record(record), latest_ms),
                (carry.previous, carry.origin),
            )
        except ValueError as error:
            asked = Invalid(Reason.BAD_HEADERS, str(error))
    elif cancels(record.headers) or replaces(record.headers):
        asked = ended = cancel_of(record)
        if isinstance(ended, Cancel):
            if replaces(record.headers):
                asked = read(as_request(record), latest_ms)
            # An invalid replacement ends nothing, so it names no request.
            if asked is ended or isinstance(asked, Request):
                carries = (offset_in(shard, ended.id or ""), None)
    else:
        asked = read(record, latest_ms)
    if asked is None:
        return None
    at = (*shard, record.offset, record.timestamp_ms)
    if isinstance(asked, Request):
        target, _, due_ms, _, _, caller, caller_id, expires_ms, _ = asked
        about = ("request", target, due_ms, expires_ms, caller, caller_id, None, None)
    elif isinstance(asked, Cancel):
        about = ("cancel", None, None, None, None, asked.caller_id, None, None)
    else:
        # due at once, even if its writer set a timestamp in the future
        due_ms, reason = min(record.timestamp_ms, latest_ms), str(asked.reason)
        about = ("invalid", None, due_ms, None, None, None, reason, asked.detail)
    return (*at, *about, *carries)


def _written(record: Record) -> tuple[Any, ...]:
    headers = [{"key": name, "value": held} for name, held in record.headers]
    return record.key, record.value, headers


def _outcome_rows(chunk: Chunk) -> Iterator[tuple[Any, ...]]:
    topic, partition = chunk.range.topic.removesuffix(RECEIPTS_SUFFIX), chunk.range.partition
    for at, receipt in read_receipts(chunk.messages):
        for outcome, offset, place in _outcomes(receipt):
            yield (topic, partition, at, receipt.at_ms, outcome, offset, *place)


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
    if receipt.mark is not None:
        yield "mark", receipt.mark.requests, (None, None, receipt.mark.receipts)
    if receipt.unknown_ms:
        yield "unknown", receipt.read, (None, None, receipt.unknown_ms)
    for outcome in ("ignored", "cut"):
        for offset in getattr(receipt, outcome):
            yield outcome, offset, nowhere


def _places(places: Places) -> Iterator[tuple[int, tuple[str, int, int]]]:
    for at, pairs in places.items():
        topic, _, partition = at.rpartition("/")
        for offset, there in pairs:
            yield offset, (topic, int(partition), there)
