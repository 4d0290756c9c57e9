"""Spark tasks of the audit: read whole indexes and orphaned payloads, and read messages back from targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from blackbox.config.settings import Settings
from blackbox.index.index_dump import IndexDump
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.message_conversion import read_headers
from blackbox.journal.ranges import Chunk, Range
from blackbox.records.recurrence import AGAIN
from blackbox.records.request import Shard, placed
from blackbox.spark.journal_tasks import read_numbered_ranges
from blackbox.spark.task_io import as_batches, numbers

HELD = (
    "topic string, partition int, offset long, at_ms long, entry boolean, payload boolean, "
    "cold boolean, ignored boolean"
)
"""The parts of an index about one request: its entry, its payload, or both; or the bit of a cold request.

Or, for a replacement by id or a carried record: that it did not count.
"""

FOUND = (
    "topic string, partition int, offset long, at_topic string, at_partition int, at_offset long, "
    "early_ms long"
)
"""A message at `at_…` whose headers name the request at `topic`/`partition`@`offset`.

`early_ms` is how long before its due time the broker appended it; null where the broker does not set
timestamps itself, or the due time is missing.
"""

# TIMESTAMP_LOG_APPEND_TIME: the broker set the timestamp.
_APPENDED = 2

_OWN = ("blackbox-id", "blackbox-due-ms", "blackbox-source")

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Reads the shards whose numbers it receives; the number after the last shard means orphaned payloads."""

    settings: Settings
    shards: tuple[Shard, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return as_batches(self._rows(numbers(batches)), HELD)

    def _rows(self, numbers: Iterator[int]) -> Iterator[list[Row]]:
        with closing(IndexDump(self.settings.redis_url.get_secret_value())) as dump:
            for number in numbers:
                is_beyond = number == len(self.shards)
                yield from (
                    _orphans(dump, self.shards) if is_beyond else _of(dump, self.shards[number])
                )


def _of(dump: IndexDump, shard: Shard) -> Iterator[list[Row]]:
    for held in dump.entries(shard):
        yield [(*shard, one.offset, one.at_ms, True, one.has_payload, False, False) for one in held]
    for offsets in dump.cold(shard):
        yield [(*shard, offset, None, False, False, True, False) for offset in offsets]
    for offsets in dump.ignored(shard):
        yield [(*shard, offset, None, False, False, False, True) for offset in offsets]


def _orphans(dump: IndexDump, shards: tuple[Shard, ...]) -> Iterator[list[Row]]:
    for found in dump.orphans(shards):
        yield [(*shard, offset, None, False, True, False, False) for shard, offset in found]


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Reads the ranges whose numbers it receives; keeps only messages requested through one of `topics`."""

    access: KafkaAccess
    ranges: tuple[Range, ...]
    topics: frozenset[str]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        read = read_numbered_ranges(self.access, self.ranges, batches, skip_removed=True)
        return as_batches((list(self._found(chunk)) for chunk in read), FOUND)

    def _found(self, chunk: Chunk) -> Iterator[Row]:
        at = (chunk.range.topic, chunk.range.partition)
        for message, headers in zip(chunk.messages, read_headers(chunk.messages)[0], strict=True):
            # blackbox appends its headers: a caller's headers of these names come before them.
            own: Mapping[str, bytes | None] = dict(headers[-len(_OWN) :])
            said = own.get("blackbox-source") or own.get(AGAIN) or b""
            source = placed(said.decode(errors="replace"))
            if source is not None and source[0].topic in self.topics:
                kind, at_ms = message.timestamp()
                due_ms = _number(own.get("blackbox-due-ms"))
                early_ms = due_ms - at_ms if kind == _APPENDED and due_ms is not None else None
                shard, offset = source
                yield (*shard, offset, *at, message.offset(), early_ms)


def _number(text: bytes | None) -> int | None:
    # At most 18 digits: the column is a 64-bit integer.
    return int(text) if text is not None and text.isdigit() and len(text) <= 18 else None
