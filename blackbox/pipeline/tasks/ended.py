"""Spark tasks that find which requests have ended, as bitmaps of 65,536 offsets each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pyarrow as pa

from blackbox import interpreter
from blackbox.index.bits import SEGMENT
from blackbox.journal.access import KafkaAccess
from blackbox.journal.ranges import Range, read_ranges
from blackbox.journal.topics import RECEIPTS_SUFFIX
from blackbox.receipt import Receipt, decode
from blackbox.request import Shard

SEGMENT_BYTES = SEGMENT // 8

Bitmaps = Mapping[Shard, Mapping[int, bytes]]
"""Offsets of a shard's requests by segment, in Redis' order of bits."""

Void = Mapping[Shard, Mapping[int, int]]
"""By request, the last receipt that declares its earlier outcomes void."""

MARKS = "topic string, partition int, segment long, bits binary, offset long, receipt long"
"""A bitmap of a segment; or, without one, the request `offset` that the receipt `receipt` voids."""

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


@dataclass(frozen=True, slots=True)
class MarkReceipts:
    """Reads ranges of receipts: marks the requests they end, but for what `void` says; tells voids.

    Raises ValueError, naming the place, for a record that is no receipt.
    """

    access: KafkaAccess
    ranges: tuple[Range, ...]
    void: Void

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for range_ in (self.ranges[number] for number in numbers(rows)):
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


class Nothing:
    """Does nothing, so that the process it does it in is there for the next task."""

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (_mark_rows(Shard("", 0), Marks({}), []) for _ in rows)


class Marks:
    """Requests of one shard that are marked, as they are found."""

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


def flags(bitmaps: Mapping[int, bytes], range_: Range) -> bytes:
    """A byte for each offset of the range, 0 unless it is marked."""
    first, last = range_.start // SEGMENT, (range_.end - 1) // SEGMENT
    no_bit = bytes(SEGMENT_BYTES)
    digits = "".join(
        f"{int.from_bytes(bitmaps.get(segment, no_bit), 'big'):0{SEGMENT}b}"
        for segment in range(first, last + 1)
    )
    skipped = first * SEGMENT
    marked = digits[range_.start - skipped : range_.end - skipped].encode()
    return marked.replace(b"0", b"\0")


def numbers(rows: Iterator[pa.RecordBatch]) -> Iterator[int]:
    """The numbers of the ranges that a task is to read."""
    _tune_once()
    for some in rows:
        yield from some.column("id").to_pylist()


_tune_once = cache(interpreter.tune)


def _receipts(range_: Range, messages: Iterable[Any]) -> Iterator[tuple[int, Receipt]]:
    for message in messages:
        try:
            yield message.offset(), decode(message.value())
        except ValueError as error:
            at = f"{range_.topic}/{range_.partition}@{message.offset()}"
            raise ValueError(f"{at}: {error}") from None


def _mark_rows(shard: Shard, marks: Marks, voided: Sequence[tuple[int, int]]) -> pa.RecordBatch:
    rows: list[tuple[Any, ...]] = [
        *((*shard, segment, bytes(bits), None, None) for segment, bits in marks.bitmaps.items()),
        *((*shard, None, None, offset, at) for offset, at in voided),
    ]
    columns = zip(*rows, strict=True) if rows else ((),) * len(_MARKS)
    arrays = [pa.array(held, field.type) for held, field in zip(columns, _MARKS, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_MARKS)
