"""Spark tasks that read whole indexes, a shard each, and the key space beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from blackbox.index.dump import Dump
from blackbox.pipeline.tasks.tables import arrow_schema, batch, numbers
from blackbox.request import Shard
from blackbox.settings import Settings

HELD = (
    "topic string, partition int, offset long, at_ms long, entry boolean, payload boolean, "
    "cold boolean"
)
"""What an index has of a request: its entry, its payload, one without the other, or a cold one's bit."""

_HELD = arrow_schema(HELD)


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Reads the shards whose numbers are its rows; one number more stands for orphaned payloads."""

    settings: Settings
    shards: tuple[Shard, ...]

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        dump = Dump(self.settings.redis_url.get_secret_value())
        for number in numbers(rows):
            if number == len(self.shards):
                yield from _orphans(dump, self.shards)
            else:
                yield from _entries(dump, self.shards[number])
                yield from _cold(dump, self.shards[number])
        dump.close()


def _entries(dump: Dump, shard: Shard) -> Iterator[pa.RecordBatch]:
    for held in dump.entries(shard):
        there = [True] * len(held)
        yield _rows(
            [shard] * len(held),
            [one.offset for one in held],
            [one.at_ms for one in held],
            there,
            [one.has_payload for one in held],
            [False] * len(held),
        )


def _cold(dump: Dump, shard: Shard) -> Iterator[pa.RecordBatch]:
    for offsets in dump.cold(shard):
        count = len(offsets)
        nothing = [False] * count
        yield _rows([shard] * count, offsets, [None] * count, nothing, nothing, [True] * count)


def _orphans(dump: Dump, shards: tuple[Shard, ...]) -> Iterator[pa.RecordBatch]:
    for found in dump.orphans(shards):
        count = len(found)
        yield _rows(
            [shard for shard, _ in found],
            [offset for _, offset in found],
            [None] * count,
            [False] * count,
            [True] * count,
            [False] * count,
        )


def _rows(shards: Sequence[Shard], *columns: Sequence[object]) -> pa.RecordBatch:
    where = [[shard.topic for shard in shards], [shard.partition for shard in shards]]
    return batch([*where, *columns], _HELD)
