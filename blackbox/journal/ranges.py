"""Exact ranges of offsets, for reads that one process plans and others perform."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from blackbox.journal.claimed_offsets import believed
from blackbox.journal.kafka_access import REQUEST_TIMEOUT_S, KafkaAccess, journal_error, read_right
from blackbox.journal.partition_reader import (
    HESITATION_S,
    READ_RECORDS,
    SILENCE_S,
    PartitionReader,
)
from blackbox.journal.polled_messages import OUT_OF_RANGE, messages_below, offset_of
from blackbox.journal.unreadable_batches import readable
from blackbox.records.errors import JournalLost, JournalSilent, RecordsRemoved

ANOTHER_SILENCE_S = 0.5


class Range(NamedTuple):
    """The offsets `start` to `end` - 1 of one partition."""

    topic: str
    partition: int
    start: int
    end: int


CHUNK_RECORDS = 4000
CHUNK_BYTES = 8 << 20


class Chunk(NamedTuple):
    """The records of a range from `start` to `end` - 1; a range without records has one empty chunk."""

    range: Range
    start: int
    end: int
    messages: list[Message]


def read_ranges(
    access: KafkaAccess,
    ranges: Sequence[Range],
    lost: Callable[[Range, JournalLost], None] | None = None,
    silence_s: float = SILENCE_S,
    *,
    skip_removed: bool = False,
) -> Iterator[Chunk]:
    """The committed records of each range, one range after the other, each in order.

    Raises RecordsRemoved when retention has removed offsets that are wanted, JournalSilent when Kafka
    returns nothing for `silence_s`. With `lost`, calls it instead, and skips the rest of that
    range. With `skip_removed`, skips only the removed offsets, without an error.
    """
    left = list(ranges)
    while left:
        try:
            with _borrowed_consumer(access) as consumer:
                yield from _read_in_turn(consumer, left, access, silence_s)
        except JournalLost as reason:
            if skip_removed and isinstance(reason, RecordsRemoved):
                rest = left.pop(0)._replace(start=reason.first)
                left[:0] = [rest] if rest.start < rest.end else []
                continue
            if lost is None:
                raise
            lost(left.pop(0), reason)
            # So that many silent ranges take little longer than one.
            if isinstance(reason, JournalSilent):
                silence_s = min(silence_s, ANOTHER_SILENCE_S)


def _read_in_turn(
    consumer: Consumer, left: list[Range], access: KafkaAccess, silence_s: float
) -> Iterator[Chunk]:
    """Read the ranges in `left`; each is removed from it once it is read."""
    _turn_to(consumer, left[0])
    while left:
        wanted = left[0]
        start = reached = wanted.start
        is_last = False
        while not is_last:
            try:
                messages, reached = _read_on(consumer, wanted, reached, access.group_id, silence_s)
            except _Silent:
                reader = PartitionReader(access, silence_s=silence_s)
                yield from _read_patiently(reader, consumer, wanted, start, reached)
                if len(left) > 1:
                    _turn_to(consumer, left[1])
                break
            is_last = reached >= wanted.end
            if is_last and len(left) > 1:
                _turn_to(consumer, left[1])  # fetched while this range is processed
            if messages or is_last:
                yield from _bounded(Chunk(wanted, start, reached, messages))
                start = reached
        left.pop(0)


class _Silent(Exception):
    """Nothing was read for a while, a record batch cannot be read, or an offset is in doubt."""


def _read_patiently(
    reader: PartitionReader, consumer: Consumer, wanted: Range, start: int, reached: int
) -> Iterator[Chunk]:
    """The rest of a range, which the client does not return."""
    with closing(reader):
        rest = reader.read_patiently(wanted.topic, wanted.partition, reached, wanted.end)
        try:
            for messages, there in rest:
                yield from _bounded(Chunk(wanted, start, there, messages))
                start = reached = there
        except JournalLost as error:
            cause = error.__cause__
            if isinstance(cause, KafkaException) and cause.args[0].code() in OUT_OF_RANGE:
                raise _out_of_range(consumer, wanted, reached) from None
            raise


def _bounded(chunk: Chunk) -> Iterator[Chunk]:
    """Split a chunk into chunks of at most 4,000 records and about 8 MiB."""
    if len(chunk.messages) <= CHUNK_RECORDS and sum(map(len, chunk.messages)) <= CHUNK_BYTES:
        yield chunk
        return
    start, first, size = chunk.start, 0, 0
    for at, message in enumerate(chunk.messages):
        size += len(message)
        if at > first and (at - first == CHUNK_RECORDS or size > CHUNK_BYTES):
            yield Chunk(chunk.range, start, offset_of(message), chunk.messages[first:at])
            start, first, size = offset_of(message), at, len(message)
    yield chunk._replace(start=start, messages=chunk.messages[first:]) if first else chunk


# Kept connected, so that the next read need not connect.
_idle_consumers: dict[tuple[object, ...], list[Consumer]] = {}


@contextmanager
def _borrowed_consumer(access: KafkaAccess) -> Iterator[Consumer]:
    settings = tuple(sorted(access.settings.items()))
    # Spark's workers are forks, and a client of the parent does not work in them.
    key = (os.getpid(), access.bootstrap_servers, access.group_id, settings)
    idle = _idle_consumers.setdefault(key, [])
    consumer = idle.pop() if idle else _connect(access)
    try:
        yield consumer
        consumer.unassign()
    except BaseException:  # even if the caller stops in the middle of a range
        consumer.close()
        raise
    idle.append(consumer)


def _connect(access: KafkaAccess) -> Consumer:
    return access.consumer(
        **{
            "enable.partition.eof": True,
            # At a partition's end a fetch stays in flight this long, and the next range waits for it.
            "fetch.wait.max.ms": 2,
            "fetch.queue.backoff.ms": 5,
            # The next assign throws away what was fetched beyond the range.
            "queued.min.messages": 20_000,
            "queued.max.messages.kbytes": 32_768,
        }
    )


def _turn_to(consumer: Consumer, wanted: Range) -> None:
    try:
        consumer.assign([TopicPartition(wanted.topic, wanted.partition, wanted.start)])
    except KafkaException as error:
        raise journal_error(error, f"{wanted.topic}/{wanted.partition}: cannot read") from error


def _read_on(
    consumer: Consumer, wanted: Range, reached: int, group: str, silence_s: float
) -> tuple[list[Message], int]:
    """More messages of the range, perhaps none, and the offset reached with them."""
    if reached >= wanted.end:
        return [], wanted.end
    at = f"{wanted.topic}/{wanted.partition}"
    polled: list[Message] = []
    try:
        first = consumer.poll(min(HESITATION_S, silence_s))
        if first is None:
            raise _Silent
        polled = [first, *consumer.consume(READ_RECORDS - 1, timeout=0)]
        is_doubted = len(believed(polled, reached, lambda _: False)) < len(polled)
        if is_doubted or len(readable(polled)) < len(polled):
            raise _Silent  # to a reader that can look offsets up, and read over batches
        messages, there = messages_below(polled, wanted.end)
    except KafkaException as error:
        if error.args[0].code() in OUT_OF_RANGE:
            read = [offset_of(message) + 1 for message in polled if message.error() is None]
            raise _out_of_range(consumer, wanted, max([reached, *read])) from None
        needs = read_right(error.args[0], wanted.topic, group)
        raise journal_error(error, f"{at}: cannot read from {reached}", needs) from error
    return messages, max(reached, there)


def _out_of_range(consumer: Consumer, wanted: Range, position: int) -> JournalLost:
    topic, partition = wanted.topic, wanted.partition
    try:
        bounds = consumer.get_watermark_offsets(
            TopicPartition(topic, partition), timeout=REQUEST_TIMEOUT_S
        )
    except KafkaException:
        bounds = None
    if bounds is not None and position > bounds[1]:
        return JournalLost(
            f"{topic}/{partition}: cannot read offset {position}, because it ends at {bounds[1]}; "
            "it was truncated, or deleted and created again: start again from its first offset"
        )
    first = bounds[0] if bounds is not None else "unknown"
    text = (
        f"{topic}/{partition}: cannot read offset {position}, because the first available one is "
        f"{first}; retention, DeleteRecords or blackbox's own trimming removed the earlier records: "
        f"start at an available offset, and if {topic} has a retention.ms or retention.bytes of its "
        "own, raise it"
    )
    # An offset that is not out of range any more does not show what was removed.
    is_removed = bounds is not None and bounds[0] > position
    return RecordsRemoved(text, bounds[0]) if bounds and is_removed else JournalLost(text)
