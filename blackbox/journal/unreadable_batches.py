"""Record batches that the client cannot decompress: it returns an error in place of their records.

Brokers accept a zstd batch of a few kilobytes that has more than `receive.message.max.bytes` when it is
decompressed. The client refuses it again at each attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from blackbox.records.errors import JournalSilent

AT_ONCE = 4000


def is_unreadable(error: KafkaError | None) -> bool:
    """Whether a polled error stands for a record batch that cannot be decompressed."""
    return error is not None and error.code() == KafkaError._BAD_COMPRESSION


def readable(polled: Sequence[Message]) -> tuple[Sequence[Message], Message | None]:
    """The messages before the first unreadable batch, and the error in its place, if there is one."""
    for place, message in enumerate(polled):
        if is_unreadable(message.error()):
            return polled[:place], message
    return polled, None


def read_over(
    consumer: Consumer, refused: Message, start: int, end: int, silence_s: float
) -> Iterator[tuple[list[Message], int]]:
    """The records from `start` to before `end` of the batch that was `refused`, without content.

    Each list comes with the offset reached. The error of each message says why it has no content. The
    consumer then continues behind the batch. Raises JournalSilent when nothing is read for `silence_s`.
    """
    topic, partition = refused.topic() or "", refused.partition() or 0
    first = max(start, refused.offset() or 0)
    if first >= end:  # it was written later; before it are markers of transactions, or nothing
        yield [], end
        return
    behind = _end(consumer, refused, first, end, silence_s)
    consumer.assign([TopicPartition(topic, partition, behind)])
    for at in range(first, behind, AT_ONCE):
        reached = min(at + AT_ONCE, behind)
        offsets = range(at, reached)
        yield [without_content(refused, offset, refused.error()) for offset in offsets], reached


def _end(consumer: Consumer, refused: Message, first: int, end: int, silence_s: float) -> int:
    """The offset behind the batch, at most `end`; `first` is in it."""
    # The client does not say how many records the batch has. Reads at any offset in it fail with
    # the batch's own offset: by doubling, then by bisection.
    inside, step = first, 1
    while inside + step < end and _is_in(consumer, refused, inside + step, silence_s):
        inside, step = inside + step, 2 * step
    behind = min(inside + step, end)
    while behind - inside > 1:
        middle = (inside + behind) // 2
        if _is_in(consumer, refused, middle, silence_s):
            inside = middle
        else:
            behind = middle
    return behind


def _is_in(consumer: Consumer, refused: Message, offset: int, silence_s: float) -> bool:
    topic, partition = refused.topic() or "", refused.partition() or 0
    consumer.assign([TopicPartition(topic, partition, offset)])
    found = consumer.poll(silence_s)
    if found is None:
        text = f"{topic}/{partition}: nothing read from {offset} on for {silence_s} s"
        raise JournalSilent(text)
    error = found.error()
    if is_unreadable(error):
        return found.offset() == refused.offset()
    if error is not None and error.code() != KafkaError._PARTITION_EOF:
        raise KafkaException(error)
    return False


def without_content(message: Message, offset: int, why: KafkaError | None) -> Message:
    """A message of the same partition at this offset, with an error in place of its content."""
    # Callers take it for a consumed message; it is never given back to a client.
    return Message(topic=message.topic(), partition=message.partition(), offset=offset, error=why)
