"""Records that are not at the offsets that they claim.

In a record batch, each record has an offset of its own. Brokers set the batch's offset, but do not check those of
the records of an uncompressed batch, and clients believe them. Without a check, a writer could have its record
pass for another, or move a reader past the records of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from blackbox.journal.topics import RECEIPTS_SUFFIX
from blackbox.journal.unreadable_batches import is_unreadable, without_content
from blackbox.records.errors import JournalSilent

_OUT_OF_RANGE = (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET)


class PlaceCheck:
    """Looks up whether a record is where it claims to be, with a consumer of its own.

    Not safe for use from two threads at once.
    """

    def __init__(self, connect: Callable[[], Consumer], silence_s: float) -> None:
        self._connect = connect
        self._silence_s = silence_s
        self._consumer: Consumer | None = None

    def __call__(self, message: Message) -> bool:
        """Raises KafkaException, or JournalSilent when nothing is read for the time given."""
        if self._consumer is None:
            self._consumer = self._connect()
        return _is_there(self._consumer, message, self._silence_s)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


def believed(
    polled: Sequence[Message], position: int, is_there: Callable[[Message], bool]
) -> Sequence[Message]:
    """The polled messages, up to the first whose offset is in doubt; errors in their place are kept.

    Offsets without a gap, from `position` on, cannot hide the record of another. Behind a gap, such as a
    marker of a transaction or what compaction removed, the last one is looked up: if it is where it
    claims to be, nothing before it was passed over.
    """
    count = _without_gap(polled, position)
    # Only blackbox writes receipts, each with a marker behind it.
    if count == len(polled) or (polled[0].topic() or "").endswith(RECEIPTS_SUFFIX):
        return polled
    last, claimed, end = position + count - 1, None, count
    for message in polled[count:]:
        if message.error() is None:
            if _offset(message) <= last:
                break
            last, claimed = _offset(message), message
        end += 1
    return polled[:end] if claimed is None or is_there(claimed) else polled[:count]


def read_doubted(
    consumer: Consumer, topic: str, partition: int, start: int, end: int, silence_s: float
) -> Iterator[tuple[list[Message], int]]:
    """Read each offset by itself, until one is found that has the record that claims it, or until `end`.

    A broker looks an offset up by the batches' offsets, not by what records claim. A record that claims
    another offset is returned at its own, without content. Each list comes with the offset reached, from
    which on the consumer continues.
    """
    elsewhere: int | None = None
    for at in range(start, end):
        found = _first(consumer, topic, partition, at, silence_s)
        error, claimed = found.error(), _offset(found)
        if error is None and claimed == at:
            yield [found], at + 1
            return
        is_gap = error is not None or (
            claimed != elsewhere and _is_there(consumer, found, silence_s)
        )
        if is_gap:
            # An unreadable batch, or the end of the partition: both have an offset of their own.
            reached = max(at, min(claimed, end))
            consumer.assign([TopicPartition(topic, partition, reached)])
            yield [], reached
            return
        elsewhere = claimed
        why = KafkaError(KafkaError._BAD_MSG, f"the record at {at} claims the offset {claimed}")
        yield [without_content(found, at, why)], at + 1


def _without_gap(polled: Sequence[Message], position: int) -> int:
    for count, message in enumerate(polled):
        if message.offset() != position + count:
            return count
    return len(polled)


def _is_there(consumer: Consumer, message: Message, silence_s: float) -> bool:
    topic, partition = message.topic() or "", message.partition() or 0
    found = _first(consumer, topic, partition, _offset(message), silence_s)
    return found.error() is None and _content(found) == _content(message)


def _first(
    consumer: Consumer, topic: str, partition: int, offset: int, silence_s: float
) -> Message:
    """What is read from this offset on: a message, or an error that belongs to an offset."""
    consumer.assign([TopicPartition(topic, partition, offset)])
    found = consumer.poll(silence_s)
    if found is None:
        text = f"{topic}/{partition}: nothing read from {offset} on for {silence_s} s"
        raise JournalSilent(text)
    error = found.error()
    belongs = error is None or is_unreadable(error) or error.code() == KafkaError._PARTITION_EOF
    if not belongs and error.code() not in _OUT_OF_RANGE:  # type: ignore[union-attr]
        raise KafkaException(error)
    return found


def _content(message: Message) -> tuple[Any, ...]:
    # Not the headers: reading names that are not UTF-8 twice crashes Python.
    return message.offset(), message.timestamp(), message.key(), message.value()


def _offset(message: Message) -> int:
    return message.offset() or 0
