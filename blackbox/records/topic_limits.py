"""The limits of topics, checked before a record that exceeds one makes a whole batch fail."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Literal, NamedTuple

from blackbox.records.outgoing import Outgoing, Refusal
from blackbox.records.request import Reason

# Parts of one transaction and their time: the shard waits for the brokers at each, and the
# transaction times out.
MOST_PARTS, PARTS_S = 20, 3.0

# The size of a record batch's head, in Kafka's message format 2.
BATCH_BYTES = 61


class Limits(NamedTuple):
    """The limits of one topic. `most_bytes` is the largest record batch it takes; None: any."""

    needs_key: bool
    most_bytes: int | None
    one_by_one: bool = False  # it refused a batch lately

    def refusal(self, message: Outgoing) -> Refusal | None:
        if self.needs_key and message.key is None:
            return (
                Reason.REFUSED,
                f"{message.topic}: the topic is compacted and does not accept messages without a "
                "key; give a key, or another topic",
            )
        if self.most_bytes is not None and (size := batch_bytes(message)) > self.most_bytes:
            return (
                Reason.TOO_LARGE,
                f"{message.topic}: {size} bytes with its headers, more than "
                f"max.message.bytes={self.most_bytes}",
            )
        return None


NO_LIMITS = Limits(needs_key=False, most_bytes=None)


class RecordBatches:
    """Splits what a transaction sends to strict topics: brokers take or refuse a record batch as a whole."""

    def __init__(self, limits: Mapping[str, Limits]) -> None:
        self._strict = {
            topic: limit
            for topic, limit in limits.items()
            if limit.most_bytes is not None or limit.one_by_one
        }
        self._held: dict[str, int] = {}
        self._full: set[str] = set()
        # offsets of requests each of whose records has a record batch of its own
        self.apart: set[int] = set()
        self._count = 0
        self._until_s = time.monotonic() + PARTS_S

    @property
    def has_limits(self) -> bool:
        return bool(self._strict)

    def place(self, *records: Outgoing) -> Literal["here", "next", "later"]:
        """Whether what one request sends goes with what was sent before, after a flush, or in a later transaction."""
        if not self._strict:
            return "here"
        first = records[0].topic
        if len(records) == 1 and first not in self._strict and first not in self._full:
            return "here"
        topics = {record.topic for record in records}
        sizes: dict[str, int] = {}
        for record in records:
            if record.topic in self._strict:
                sizes[record.topic] = sizes.get(record.topic, 0) + batch_bytes(record)
        if all(topic in sizes and self._strict[topic].one_by_one for topic in topics):
            self.apart.add(records[0].offset)
        is_full = not self._full.isdisjoint(topics)
        if not is_full and all(self._has_room(topic, size) for topic, size in sizes.items()):
            self._held |= {topic: self._held.get(topic, 0) + size for topic, size in sizes.items()}
            return "here"
        if is_full or self._count == MOST_PARTS or time.monotonic() > self._until_s:
            # also what would still fit: it must not overtake
            self._full |= topics
            return "later"
        self._count += 1
        # the flush sends the records of all topics
        self._held = sizes
        return "next"

    def _has_room(self, topic: str, size: int) -> bool:
        held, limit = self._held.get(topic), self._strict[topic]
        if held is None:
            return True
        return not limit.one_by_one and held + size <= (limit.most_bytes or math.inf)


def batch_bytes(message: Outgoing) -> int:
    """The size of a record batch that holds only this message, not compressed."""
    size = 3  # attributes, and the differences of timestamp and offset
    for part in (message.key, message.value):
        size += 1 if part is None else _counted(len(part))
    size += _varint_bytes(len(message.headers))
    for name, value in message.headers:
        size += _counted(len(name.encode()))
        part = value.encode() if isinstance(value, str) else value
        size += 1 if part is None else _counted(len(part))
    return BATCH_BYTES + _counted(size)


def _counted(length: int) -> int:
    return _varint_bytes(length) + length


def _varint_bytes(count: int) -> int:
    """The size of a length as Kafka writes it: seven bits per byte, the lowest bit is the sign."""
    return max(1, ((count << 1).bit_length() + 6) // 7)
