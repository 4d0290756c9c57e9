"""Spark tasks that fill lost indexes again: which requests are ended, and the entries of the others."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from blackbox import interpreter
from blackbox.connect import formats
from blackbox.doubt import IndexFull
from blackbox.entry import Entry
from blackbox.formats import may_have_caller_id
from blackbox.index.bits import SEGMENT, Bits
from blackbox.index.connection import pool
from blackbox.index.restoring import NOTHING, Content, Restoring, Superseded
from blackbox.intake import parse
from blackbox.journal.access import KafkaAccess
from blackbox.journal.ranges import Range, read_ranges
from blackbox.journal.records import read_records
from blackbox.journal.topics import RECEIPTS_SUFFIX
from blackbox.plan import Batch
from blackbox.receipt import Receipt, decode
from blackbox.request import Reason, Record, Request, Shard
from blackbox.settings import Settings

Bitmaps = Mapping[Shard, Mapping[int, bytes]]
"""Offsets of a shard's requests as bitmaps of 65,536 each, by segment, in Redis' order of bits."""

Void = Mapping[Shard, Mapping[int, int]]
"""By request, the last receipt that declares its earlier outcomes void."""

PUT_ENTRIES = 2000
PUT_BYTES = 8 << 20
SEGMENT_BYTES = SEGMENT // 8

MARKS = "topic string, partition int, segment long, bits binary, offset long, receipt long"
"""A bitmap of a segment; or, without one, the request `offset` that the receipt `receipt` voids."""

Asked = Sequence[tuple[int, Request | Entry]]
"""Pending requests by offset, an invalid one as the entry it becomes."""

NAMES = "topic string, partition int, offset long, caller_id string"

DONE = (
    "topic string, partition int, piece int, scanned long, named long, entries long, "
    "caller_ids long, checksum long, largest long, seconds double, problem string"
)

_MARKS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("segment", pa.int64()),
        ("bits", pa.binary()),
        ("offset", pa.int64()),
        ("receipt", pa.int64()),
    ]
)
_NAMES = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("caller_id", pa.string()),
    ]
)
_DONE = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("piece", pa.int32()),
        ("scanned", pa.int64()),
        ("named", pa.int64()),
        ("entries", pa.int64()),
        ("caller_ids", pa.int64()),
        ("checksum", pa.int64()),
        ("largest", pa.int64()),
        ("seconds", pa.float64()),
        ("problem", pa.string()),
    ]
)


class Shipped(Protocol):
    """Bitmaps that Spark brings to each Python worker once."""

    @property
    def value(self) -> Bitmaps: ...


class Moment(NamedTuple):
    """What all tasks of a run agree on; `run` is None for one that writes nothing.

    `latest_ms` is the later of Redis' and the driver's clock: a record's timestamp beyond it counts
    as it. Payloads expire as from `now_ms` on.
    """

    run: str | None
    now_ms: int
    latest_ms: int


@dataclass(slots=True)
class Done:
    """What a task did of a shard; `piece` is its range's number, -1 for rows of the ledger.

    `named` counts records that may have a caller id. `problem` says why it ended too early.
    """

    shard: Shard
    piece: int
    scanned: int = 0
    named: int = 0
    content: Content = NOTHING
    largest: int = 0
    seconds: float = 0.0
    problem: str | None = None

    @classmethod
    def of(cls, row: Any) -> Done:
        """From a row of the schema."""
        return cls(
            Shard(row.topic, row.partition), row.piece, row.scanned, row.named,
            Content(row.entries, row.caller_ids, row.checksum), row.largest, row.seconds,
            row.problem,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MarkReceipts:
    """Reads ranges of receipts: marks the requests they end, but for what `void` says; tells voids.

    Raises ValueError, naming the place, for a record that is no receipt.
    """

    access: KafkaAccess
    ranges: tuple[Range, ...]
    void: Void

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for range_ in (self.ranges[number] for number in _numbers(rows)):
            shard = Shard(range_.topic.removesuffix(RECEIPTS_SUFFIX), range_.partition)
            marks = Marks(self.void.get(shard, {}))
            voided: list[tuple[int, int]] = []
            for chunk in read_ranges(self.access, [range_]):
                for at, receipt in _receipts(range_, chunk.messages):
                    marks.add(receipt.removals(), at)
                    voided += [(offset, at) for offset in receipt.void]
            yield _mark_rows(shard, marks, voided)


@dataclass(frozen=True, slots=True)
class MarkRows:
    """Marks the requests that rows name, but for those of a receipt that `void` is later than."""

    void: Void

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        _tune_once()
        found: dict[tuple[str, int], Marks] = {}
        for some in rows:
            columns = (some.column(name).to_pylist() for name in ("offset", "receipt"))
            shards = zip(
                some.column("topic").to_pylist(), some.column("partition").to_pylist(), strict=True
            )
            for at, offset, receipt in zip(shards, *columns, strict=True):
                if at not in found:
                    found[at] = Marks(self.void.get(Shard(*at), {}))
                found[at].add((offset,), receipt)
        for at, marks in found.items():
            yield _mark_rows(Shard(*at), marks, [])


class Marks:
    """Requests of one shard that are ended, as they are found."""

    def __init__(self, void: Mapping[int, int]) -> None:
        self._void = void
        self.bitmaps: defaultdict[int, bytearray] = defaultdict(partial(bytearray, SEGMENT_BYTES))

    def add(self, offsets: Iterable[int], receipt: int) -> None:
        """Those that this receipt ends."""
        void, bitmaps = self._void, self.bitmaps
        for offset in offsets:
            if not void or void.get(offset, -1) < receipt:
                bit = offset % SEGMENT
                bitmaps[offset // SEGMENT][bit >> 3] |= 0x80 >> (bit & 7)


@dataclass(frozen=True, slots=True)
class ReadNames:
    """Reads ranges of request topics: one row for each request or cancel with a caller id."""

    settings: Settings
    access: KafkaAccess
    ranges: tuple[Range, ...]
    latest_ms: int

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        contracts = formats(self.settings)
        for range_ in (self.ranges[number] for number in _numbers(rows)):
            contract, name = contracts[range_.topic], self.settings.topics[range_.topic]
            for chunk in read_ranges(self.access, [range_]):
                messages = [m for m in chunk.messages if may_have_caller_id(name, m.value())]
                batch = Batch(chunk.start, chunk.end, read_records(messages))
                asked = [
                    (offset, one.caller_id)
                    for offset, one in parse(contract, batch, self.latest_ms, None).changes
                    if one.caller_id is not None
                ]
                yield _name_rows(range_, asked)


@dataclass(frozen=True, slots=True)
class FillFromKafka:
    """Reads ranges of request topics: puts what is not ended into the indexes of their shards.

    `named` takes only records that may have a caller id; else only the others, which nothing that
    comes later can replace or cancel.
    """

    settings: Settings
    access: KafkaAccess
    ranges: tuple[Range, ...]
    named: bool
    ended: Shipped
    moment: Moment

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        filling = _Filling(self.settings, self.moment)
        try:
            for number in _numbers(rows):
                yield _done_rows([self._fill(number, filling)])
        finally:
            filling.close()

    def _fill(self, number: int, filling: _Filling) -> Done:
        range_ = self.ranges[number]
        began = time.monotonic()
        done = Done(Shard(range_.topic, range_.partition), number)
        ended = _flags(self.ended.value.get(done.shard, {}), range_)
        try:
            for chunk in read_ranges(self.access, [range_]):
                messages = list(self._wanted(chunk.messages, range_, ended, done))
                filling.put(done, read_records(messages))
        except (Superseded, IndexFull) as reason:
            done.problem = str(reason)
        done.seconds = time.monotonic() - began
        return done

    def _wanted(
        self, messages: Sequence[Any], range_: Range, ended: bytes, done: Done
    ) -> Iterator[Any]:
        contract, start, named = self.settings.topics[range_.topic], range_.start, self.named
        done.scanned += len(messages)
        for message in messages:
            has_name = may_have_caller_id(contract, message.value())
            done.named += has_name
            if has_name is named and not ended[message.offset() - start]:
                yield message


@dataclass(frozen=True, slots=True)
class FillFromRows:
    """Puts those requests that rows of the ledger hold, and that are not ended, into their indexes."""

    settings: Settings
    ended: Shipped
    moment: Moment

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        _tune_once()
        ended = {shard: Bits(bitmaps) for shard, bitmaps in self.ended.value.items()}
        done: dict[Shard, Done] = {}
        filling = _Filling(self.settings, self.moment)
        try:
            for some in rows:
                for shard, records in _by_shard(some.to_pylist()).items():
                    part = done.setdefault(shard, Done(shard, -1))
                    skipped: Container[int] = ended.get(shard, frozenset())
                    pending = [record for record in records if record.offset not in skipped]
                    self._fill(part, pending, filling)
                    part.scanned += len(records)
        finally:
            filling.close()
        yield _done_rows(list(done.values()))

    def _fill(self, done: Done, records: list[Record], filling: _Filling) -> None:
        began = time.monotonic()
        try:
            if done.problem is None:
                filling.put(done, records)
        except (Superseded, IndexFull) as reason:
            done.problem = str(reason)
        done.seconds += time.monotonic() - began


class _Filling:
    """The indexes that one task fills."""

    def __init__(self, settings: Settings, moment: Moment) -> None:
        self._contracts = formats(settings)
        self._moment = moment
        self._grace_s = settings.grace_s
        self._connections = pool(settings.redis_url.get_secret_value())
        self._indexes: dict[Shard, Restoring] = {}

    def put(self, done: Done, records: Sequence[Record]) -> None:
        """Store the entries that these records ask for, and count them."""
        batch = Batch(0, 0, records)
        contract, latest_ms = self._contracts[done.shard.topic], self._moment.latest_ms
        changes = parse(contract, batch, latest_ms, None).changes
        asked = [(offset, one) for offset, one in changes if isinstance(one, (Request, Entry))]
        for portion in _portions(asked):
            content, largest = self._put(done.shard, portion)
            done.content += content
            done.largest = max(done.largest, largest)

    def close(self) -> None:
        for index in self._indexes.values():
            index.close()
        self._connections.disconnect()

    def _put(self, shard: Shard, asked: Asked) -> tuple[Content, int]:
        run = self._moment.run
        if run is None:
            return Content(len(asked), sum(one.caller_id is not None for _, one in asked), 0), 0
        if shard not in self._indexes:
            self._indexes[shard] = Restoring(shard, self._connections, run, grace_s=self._grace_s)
        return self._indexes[shard].put(asked, self._moment.now_ms)


def _portions(asked: Asked) -> Iterator[Asked]:
    """Of 2,000 entries and about 8 MiB at most."""
    first = size = 0
    for at, (_, one) in enumerate(asked):
        size += len(one.message or b"")
        if at > first and (at - first == PUT_ENTRIES or size > PUT_BYTES):
            yield asked[first:at]
            first, size = at, len(one.message or b"")
    if asked:
        yield asked[first:]


def _flags(bitmaps: Mapping[int, bytes], range_: Range) -> bytes:
    """A byte for each offset of the range, 0 unless it is marked."""
    first, last = range_.start // SEGMENT, (range_.end - 1) // SEGMENT
    no_bit = bytes(SEGMENT_BYTES)
    digits = "".join(
        f"{int.from_bytes(bitmaps.get(segment, no_bit), 'big'):0{SEGMENT}b}"
        for segment in range(first, last + 1)
    )
    skipped = first * SEGMENT
    flags = digits[range_.start - skipped : range_.end - skipped].encode()
    return flags.replace(b"0", b"\0")


def _receipts(range_: Range, messages: Iterable[Any]) -> Iterator[tuple[int, Receipt]]:
    for message in messages:
        try:
            yield message.offset(), decode(message.value())
        except ValueError as error:
            at = f"{range_.topic}/{range_.partition}@{message.offset()}"
            raise ValueError(f"{at}: {error}") from None


def _by_shard(rows: Iterable[Mapping[str, Any]]) -> dict[Shard, list[Record]]:
    found: dict[Shard, list[Record]] = {}
    for row in rows:
        headers = [(header["key"], header["value"]) for header in row["headers"] or ()]
        # A record with such headers cannot be parsed again: they are not in the ledger.
        unreadable = row["detail"] if row["reason"] == Reason.BAD_HEADERS else None
        record = Record(
            row["offset"], row["timestamp_ms"], row["key"], row["value"], headers, unreadable
        )
        found.setdefault(Shard(row["topic"], row["partition"]), []).append(record)
    return found


def _numbers(rows: Iterator[pa.RecordBatch]) -> Iterator[int]:
    _tune_once()
    for some in rows:
        yield from some.column("id").to_pylist()


_tune_once = cache(interpreter.tune)


def _mark_rows(shard: Shard, marks: Marks, voided: Sequence[tuple[int, int]]) -> pa.RecordBatch:
    bitmaps = [(segment, bytes(bits), None, None) for segment, bits in marks.bitmaps.items()]
    return _rows(shard, [*bitmaps, *((None, None, *one) for one in voided)], _MARKS)


def _name_rows(range_: Range, named: Sequence[tuple[int, str]]) -> pa.RecordBatch:
    return _rows(Shard(range_.topic, range_.partition), named, _NAMES)


def _done_rows(parts: Sequence[Done]) -> pa.RecordBatch:
    rows = [
        (*d.shard, d.piece, d.scanned, d.named, *d.content, d.largest, d.seconds, d.problem)
        for d in parts
    ]
    return _batch(rows, _DONE)


def _rows(shard: Shard, rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    return _batch([(*shard, *row) for row in rows], schema)


def _batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else ((),) * len(schema)
    arrays = [pa.array(held, field.type) for held, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
