"""Reads offset by offset: where a batch cannot be read, an offset is in doubt, or nothing is returned."""

from __future__ import annotations

from collections.abc import Iterator

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from blackbox.journal.offset_lookup import OffsetLookup
from blackbox.journal.polled_messages import is_unreadable, offset_of, without_content
from blackbox.journal.unreadable_batches import read_over


def read_carefully(
    lookup: OffsetLookup, consumer: Consumer, topic: str, partition: int, start: int, end: int
) -> Iterator[tuple[list[Message], int]]:
    """Messages from `start` to before `end`, until one of them can be read as usual, or a batch was read over.

    Each list comes with the offset reached. A broker looks an offset up by the batches' offsets, not by what
    records claim. What has no content is returned with an error in its place: a record of a batch that
    cannot be read, a record that the client never returns, and one that claims a later offset, at its own.
    The consumer then continues after them.
    """
    reached = start
    for messages, reached in _read_carefully(lookup, topic, partition, start, end):
        yield messages, reached
    consumer.assign([TopicPartition(topic, partition, reached)])


def _read_carefully(
    lookup: OffsetLookup, topic: str, partition: int, start: int, end: int
) -> Iterator[tuple[list[Message], int]]:
    elsewhere: int | None = None
    at = start
    while at < end:
        found = lookup.first_from(topic, partition, at)
        error, claimed = found.error(), offset_of(found)
        if is_unreadable(error):
            yield from read_over(lookup, found, at, end)
            return
        if error is None and claimed == at:
            yield [found], at + 1
            return
        if error is not None and error.code() == KafkaError._BAD_MSG and claimed < end:
            yield [found], claimed + 1
            at = claimed + 1
            continue
        if error is not None or (claimed != elsewhere and lookup.is_there(found)):
            # The end of the partition, or of what is passed over, has an offset, too.
            yield [], max(at, min(claimed, end))
            return
        elsewhere = claimed
        why = KafkaError(KafkaError._BAD_MSG, f"the record at {at} claims the offset {claimed}")
        yield [without_content(topic, partition, at, why)], at + 1
        at += 1
