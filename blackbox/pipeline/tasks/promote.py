"""Spark tasks that promote a shard each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from blackbox import interpreter
from blackbox.doubt import Doubt
from blackbox.journal.access import KafkaAccess
from blackbox.pipeline.tasks.tables import arrow_schema, batch, numbers
from blackbox.promoter import Promoter
from blackbox.promotion import Promoted
from blackbox.request import Shard
from blackbox.settings import Settings

SCHEMA = (
    "topic string, partition int, cold long, near long, renewed long, lost long, refused long, "
    "problem string"
)
_SCHEMA = arrow_schema(SCHEMA)


class Outcome(NamedTuple):
    """What became of a shard's promotion; `problem` says why it ended too early."""

    promoted: Promoted
    problem: str | None

    @classmethod
    def of(cls, row: Any) -> Outcome:
        """From a row of the schema."""
        shard = Shard(row.topic, row.partition)
        done = Promoted(shard, row.cold, row.near, row.renewed, row.lost, row.refused)
        return cls(done, row.problem)


@dataclass(frozen=True, slots=True)
class PromoteShards:
    """Promotes the shards whose numbers are its rows."""

    settings: Settings
    access: KafkaAccess
    shards: tuple[Shard, ...]
    now_ms: int

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        interpreter.tune()
        promoter = Promoter(self.settings, self.access)
        try:
            for number in numbers(rows):
                yield _as_row(self._promote(promoter, self.shards[number]))
        finally:
            promoter.close()

    def _promote(self, promoter: Promoter, shard: Shard) -> Outcome:
        try:
            return Outcome(promoter.promote(shard, self.now_ms), None)
        except Doubt as reason:
            return Outcome(Promoted(shard), str(reason))


def _as_row(outcome: Outcome) -> pa.RecordBatch:
    done = outcome.promoted
    counts = (done.cold, done.near, done.renewed, done.lost, done.refused)
    return batch([[held] for held in (*done.shard, *counts, outcome.problem)], _SCHEMA)
