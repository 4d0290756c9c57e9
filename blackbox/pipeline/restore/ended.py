"""Which requests have ended, by the receipts in Kafka and those that the ledger keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pyspark.sql.functions import col, lit
from pyspark.sql.functions import max as largest

from blackbox.index.bits import SEGMENT
from blackbox.journal.access import KafkaAccess
from blackbox.journal.ranges import Range
from blackbox.journal.topics import receipts_topic
from blackbox.pipeline.journals import PLACE, Kept, Reach, Span, pieces
from blackbox.pipeline.restore.tasks import Tasks, collected
from blackbox.pipeline.tasks.ended import (
    MARKS,
    SEGMENT_BYTES,
    Bitmaps,
    MarkReceipts,
    MarkRows,
    Void,
)
from blackbox.plan import Labels
from blackbox.request import Shard

RECEIPTS_PIECE = 20_000
"""Receipts that one task reads, each of up to some thousand outcomes."""

Bits = dict[int, int]
"""Bitmaps of 65,536 offsets by segment, as numbers."""


def ended(
    tasks: Tasks,
    access: KafkaAccess,
    kept: Kept | None,
    in_kafka: Reach,
    labels: Mapping[Shard, Labels],
) -> dict[Shard, Bits]:
    """The requests that receipts below the labels end, but for those that were void."""
    held: Mapping[Shard, Span] = kept.reach.receipts if kept is not None else {}
    ranges = [
        Range(receipts_topic(shard.topic), shard.partition, start, labels[shard].receipts)
        for shard, start in starts(in_kafka.receipts, held, labels)
    ]
    cut = tuple(pieces(ranges, RECEIPTS_PIECE))
    void = _void_in(kept)
    marks = tasks.run(MarkReceipts(access, cut, void), MARKS, len(cut))
    if any(row.bits is None for row in marks):  # seldom: a transaction was torn
        void = _with_voids(void, (row for row in marks if row.bits is None))
        marks = tasks.run(MarkReceipts(access, cut, void), MARKS, len(cut))
    if kept is not None:
        told = kept.outcomes().where(~col("outcome").isin("void", "gone"))
        marks += collected(told.select(*PLACE, "receipt").mapInArrow(MarkRows(void), MARKS))
    return merged(marks)


def starts(
    kafka: Mapping[Shard, Span], held: Mapping[Shard, Span], shards: Collection[Shard]
) -> list[tuple[Shard, int]]:
    """From where on each journal is read from Kafka: behind the ledger."""
    return [
        (shard, max(kafka[shard].start, held[shard].end if shard in held else 0))
        for shard in shards
    ]


def merged(marks: Iterable[Any]) -> dict[Shard, Bits]:
    """The bitmaps of rows of MARKS, those of a segment joined."""
    found: dict[Shard, Bits] = {}
    for row in marks:
        if row.bits is not None:
            bits = found.setdefault(Shard(row.topic, row.partition), {})
            more = int.from_bytes(row.bits, "big")
            bits[row.segment] = bits.get(row.segment, 0) | more
    return found


def without(
    bits: Mapping[Shard, Bits], others: Mapping[Shard, Mapping[int, int]]
) -> dict[Shard, Bits]:
    """The offsets that are not among the others."""
    return {
        shard: {
            segment: some & ~others.get(shard, {}).get(segment, 0) for segment, some in held.items()
        }
        for shard, held in bits.items()
    }


def as_bitmaps(bits: Mapping[Shard, Bits]) -> Bitmaps:
    """The same as tasks take it."""
    return {
        shard: {segment: some.to_bytes(SEGMENT_BYTES, "big") for segment, some in held.items()}
        for shard, held in bits.items()
    }


def last_of(bits: Bits) -> int:
    """The largest offset; of one at least."""
    segment = max(bits)
    return (segment + 1) * SEGMENT - (bits[segment] & -bits[segment]).bit_length()


def _void_in(kept: Kept | None) -> Void:
    if kept is None:
        return {}
    told = kept.outcomes().where(col("outcome") == lit("void"))
    return _with_voids({}, collected(told.groupBy(PLACE).agg(largest("receipt").alias("receipt"))))


def _with_voids(void: Void, told: Iterable[Any]) -> Void:
    joined = {shard: dict(receipts) for shard, receipts in void.items()}
    for row in told:
        receipts = joined.setdefault(Shard(row.topic, row.partition), {})
        receipts[row.offset] = max(row.receipt, receipts.get(row.offset, -1))
    return joined
