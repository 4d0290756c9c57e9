"""Spark tasks that read what target topics hold of the messages delivered to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa

from blackbox import interpreter
from blackbox.journal.access import KafkaAccess
from blackbox.journal.ranges import Range, read_ranges
from blackbox.journal.records import read_headers

FOUND = (
    "topic string, partition int, offset long, at_topic string, at_partition int, at_offset long, "
    "early_ms long"
)
"""A message at `at_…` that says it was asked for at `topic`/`partition`@`offset`.

`early_ms` is how long before its due time the broker appended it, null where the broker does not
stamp records itself.
"""

_FOUND = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("at_topic", pa.string()),
        ("at_partition", pa.int32()),
        ("at_offset", pa.int64()),
        ("early_ms", pa.int64()),
    ]
)
_APPENDED = 2
"""The kind of timestamp that the broker gives (TIMESTAMP_LOG_APPEND_TIME)."""


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Reads the ranges whose numbers are its rows; only what came from one of `topics` counts."""

    access: KafkaAccess
    ranges: tuple[Range, ...]
    topics: frozenset[str]

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        _tune_once()
        mine = [self.ranges[number] for some in rows for number in some.column("id").to_pylist()]
        for chunk in read_ranges(self.access, mine):
            found = list(self._found(chunk.messages))
            if found:
                yield _batch(chunk.range, found)

    def _found(self, messages: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        for message, headers in zip(messages, read_headers(messages)[0], strict=True):
            own: Mapping[str, bytes | None] = dict(headers[-len(_OWN) :])
            source = _place(own.get("blackbox-source"))
            if source is not None and source[0] in self.topics:
                kind, at_ms = message.timestamp()
                due_ms = _number(own.get("blackbox-due-ms"))
                early_ms = due_ms - at_ms if kind == _APPENDED and due_ms is not None else None
                yield (*source, message.offset(), early_ms)


_OWN = ("blackbox-id", "blackbox-due-ms", "blackbox-source")
_tune_once = cache(interpreter.tune)


def _place(text: bytes | None) -> tuple[str, int, int] | None:
    """`TB/3@1234`; None for anything else."""
    where, at, offset = (text or b"").decode(errors="replace").rpartition("@")
    topic, slash, partition = where.rpartition("/")
    if not (at and slash and _is_number(partition, 9) and _is_number(offset, 18)):
        return None
    return topic, int(partition), int(offset)


def _is_number(text: str, digits: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= digits


def _number(text: bytes | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and len(text) <= 18 else None


def _batch(range_: Range, found: list[tuple[Any, ...]]) -> pa.RecordBatch:
    topics, partitions, offsets, places, early = zip(*found, strict=True)
    where = [[range_.topic] * len(found), [range_.partition] * len(found), places]
    columns = [topics, partitions, offsets, *where, early]
    arrays = [pa.array(held, field.type) for held, field in zip(columns, _FOUND, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_FOUND)
