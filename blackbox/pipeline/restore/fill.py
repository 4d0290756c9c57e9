"""What is pending, put into the indexes of many shards at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.functions import col, lit, shiftright
from pyspark.sql.functions import max as largest

from blackbox.journal.access import KafkaAccess
from blackbox.journal.ranges import Range
from blackbox.pipeline.journals import PIECE, PLACE, SHARD, Kept, pieces
from blackbox.pipeline.restore.ended import Bits, as_bitmaps, merged, without
from blackbox.pipeline.restore.tasks import Tasks, collected
from blackbox.pipeline.tasks.ended import MARKS, Bitmaps, MarkRows, flags
from blackbox.pipeline.tasks.restore import (
    FILLED,
    Done,
    Fill,
    FillChosen,
    FillFromRows,
    Moment,
    Shipped,
)
from blackbox.request import Shard
from blackbox.settings import Settings

RECORD = [*PLACE, "timestamp_ms", "caller_id", "reason", "detail", "key", "value", "headers"]


@dataclass(frozen=True, slots=True)
class Filling:
    """One run over the requests in Kafka, and those in the ledger that Kafka need not have."""

    tasks: Tasks
    settings: Settings
    access: KafkaAccess
    kept: Kept | None
    moment: Moment

    def fill(self, ranges: Iterable[Range], ended: Mapping[Shard, Bits]) -> list[Done]:
        """Put what has not ended; what became of each piece.

        1. what has no caller id, and so is never replaced or cancelled;
        2. of each caller id the latest request, unless a cancel is later or it has ended: only the
           pieces that hold such a one are read again;
        3. the ledger's.
        """
        cut = tuple(pieces(ranges, PIECE))
        with ExitStack() as stack:
            shipped = stack.enter_context(self.tasks.shipped(as_bitmaps(ended)))
            task = Fill(self.settings, self.access, cut, shipped, self.moment)
            filled = self.tasks.rows(task, FILLED, len(cut)).persist()  # it must not run twice
            stack.callback(filled.unpersist)
            parts = _done(filled.where(col("piece").isNotNull()))  # 1
            if self.kept is None and not any(part.named for part in parts):
                return parts
            chosen = as_bitmaps(without(self._latest(filled), ended))
            parts += self._fill_chosen(cut, chosen)  # 2
            if self.kept is not None:
                parts += self._fill_from_ledger(self.kept, shipped, chosen)  # 3
        return parts

    def _latest(self, filled: DataFrame) -> dict[Shard, Bits]:
        names = filled.where(col("caller_id").isNotNull()).select(*PLACE, "caller_id", "is_cancel")
        if self.kept is not None:
            held = self._held(self.kept).where(col("caller_id").isNotNull())
            is_cancel = (col("kind") == lit("cancel")).alias("is_cancel")
            names = names.unionByName(held.select(*PLACE, "caller_id", is_cancel))
        marks = latest(names).withColumn("receipt", lit(0)).mapInArrow(MarkRows({}), MARKS)
        return merged(collected(marks))

    def _fill_chosen(self, cut: Sequence[Range], chosen: Bitmaps) -> list[Done]:
        again = tuple(
            piece
            for piece in cut
            if any(flags(chosen.get(Shard(piece.topic, piece.partition), {}), piece))
        )
        with self.tasks.shipped(chosen) as shipped:
            task = FillChosen(self.settings, self.access, again, shipped, self.moment)
            return list(map(Done.of, self.tasks.run(task, FILLED, len(again))))

    def _fill_from_ledger(self, kept: Kept, ended: Shipped, chosen: Bitmaps) -> list[Done]:
        is_cancel = (col("kind") == lit("cancel")) & col("carries").isNull()
        rows = self._held(kept).where(~is_cancel).select(RECORD)
        with self.tasks.shipped(chosen) as shipped:
            task = FillFromRows(self.settings, ended, shipped, self.moment)
            return _done(rows.mapInArrow(task, FILLED))

    def _held(self, kept: Kept) -> DataFrame:
        """The ledger's requests; it may hold topics that are not ours any more."""
        return kept.requests().where(col("topic").isin(*self.settings.topics))


def latest(names: DataFrame) -> DataFrame:
    """Of each caller id of a shard the latest request, but where a cancel is later."""
    mark = col("offset") * 2 + col("is_cancel").cast("long")  # numbers are hashed, structs sorted
    found = names.groupBy(*SHARD, "caller_id").agg(largest(mark).alias("last"))
    is_cancel = col("last") % 2 == lit(1)
    return found.where(~is_cancel).select(*SHARD, shiftright("last", 1).alias("offset"))


def summed(shard: Shard, parts: Iterable[Done]) -> Done:
    """What became of a shard, of all its pieces."""
    total = Done(shard)
    for part in parts:
        if part.shard == shard:
            total = replace(
                total,
                scanned=total.scanned + part.scanned,
                content=total.content + part.content,
                largest=max(total.largest, part.largest),
                seconds=total.seconds + part.seconds,
                problem=total.problem or part.problem,
            )
    return total


def _done(rows: DataFrame) -> list[Done]:
    found: list[Any] = collected(rows)
    return list(map(Done.of, found))
