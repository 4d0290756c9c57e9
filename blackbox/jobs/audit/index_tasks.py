"""Spark tasks that read whole indexes, shard by shard, and orphaned payloads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from blackbox.config.settings import Settings
from blackbox.index.dump import Dump
from blackbox.records.request import Shard
from blackbox.spark.tables import as_batches, numbers

HELD = (
    "topic string, partition int, offset long, at_ms long, entry boolean, payload boolean, "
    "cold boolean"
)
"""What an index holds of a request: its entry, its payload, or both; or the bit of a cold request."""

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Reads the shards whose numbers it receives; the number after the last shard means orphaned payloads."""

    settings: Settings
    shards: tuple[Shard, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return as_batches(self._rows(numbers(batches)), HELD)

    def _rows(self, numbers: Iterator[int]) -> Iterator[list[Row]]:
        with closing(Dump(self.settings.redis_url.get_secret_value())) as dump:
            for number in numbers:
                is_beyond = number == len(self.shards)
                yield from (
                    _orphans(dump, self.shards) if is_beyond else _of(dump, self.shards[number])
                )


def _of(dump: Dump, shard: Shard) -> Iterator[list[Row]]:
    for held in dump.entries(shard):
        yield [(*shard, one.offset, one.at_ms, True, one.has_payload, False) for one in held]
    for offsets in dump.cold(shard):
        yield [(*shard, offset, None, False, False, True) for offset in offsets]


def _orphans(dump: Dump, shards: tuple[Shard, ...]) -> Iterator[list[Row]]:
    for found in dump.orphans(shards):
        yield [(*shard, offset, None, False, True, False) for shard, offset in found]
