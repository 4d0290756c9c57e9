"""Spark tasks that promote shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from blackbox.config.settings import Settings
from blackbox.core.promotion import Promoted
from blackbox.engine.promoter import Promoter
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.records.errors import RecoveryRequired
from blackbox.records.request import Shard
from blackbox.spark.task_io import as_reports, numbers


class Outcome(NamedTuple):
    """The result of a shard's promotion; `problem` says why it stopped early."""

    promoted: Promoted
    problem: str | None


@dataclass(frozen=True, slots=True)
class PromoteShards:
    """Promotes the shards whose numbers it receives."""

    settings: Settings
    access: KafkaAccess
    shards: tuple[Shard, ...]
    now_ms: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with closing(Promoter(self.settings, self.access)) as promoter:
            yield from as_reports(
                self._promote(promoter, self.shards[number]) for number in numbers(batches)
            )

    def _promote(self, promoter: Promoter, shard: Shard) -> Outcome:
        try:
            return Outcome(promoter.promote(shard, self.now_ms), None)
        except RecoveryRequired as reason:
            return Outcome(Promoted(shard), str(reason))
