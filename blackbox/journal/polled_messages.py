"""The results of a consumer for one partition: messages, and errors in the place of some."""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import KafkaError, KafkaException, Message

# The client's error of a batch of which it returns nothing, such as one whose records claim earlier offsets; it
# passes over it.
PASSED_OVER = KafkaError.MSG_SIZE_TOO_LARGE
OUT_OF_RANGE = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)


def messages_below(polled: Sequence[Message], end: int) -> tuple[list[Message], int]:
    """The messages below `end`, and the offset reached by them and by end-of-partition events.

    Raises KafkaException for any other error that was polled in place of a message, unless it is of a batch
    that the client passed over.
    """
    errors = [(message, error) for message in polled if (error := message.error()) is not None]
    for _, error in errors:
        if error.code() not in (KafkaError._PARTITION_EOF, PASSED_OVER):
            raise KafkaException(error)
    ends = [message for message, error in errors if error.code() != PASSED_OVER]
    messages = [m for m in polled if m.error() is None] if errors else list(polled)
    # The event also counts offsets without a message, such as transaction markers.
    reached = max(offset_of(message) for message in ends) if ends else 0
    if messages:
        reached = max(reached, offset_of(messages[-1]) + 1)
    if reached > end:
        messages = [message for message in messages if offset_of(message) < end]
    return messages, min(reached, end)


def is_elsewhere(polled: Message, position: int) -> bool:
    """Whether this is an out-of-range error of another position than the one that is read.

    The client goes on from where a record claims to be, and returns the error of that also to a later read.
    """
    error = polled.error()
    return error is not None and error.code() in OUT_OF_RANGE and polled.offset() != position


def is_of_no_record(polled: Message, position: int) -> bool:
    """Whether this is an error that says nothing about what is at this position or behind it."""
    error = polled.error()
    return error is not None and (error.code() == PASSED_OVER or is_elsewhere(polled, position))


def is_unreadable(error: KafkaError | None) -> bool:
    """Whether a polled error stands for a record batch that cannot be decompressed."""
    return error is not None and error.code() == KafkaError._BAD_COMPRESSION


def offset_of(message: Message) -> int:
    offset = message.offset()
    assert offset is not None
    return offset


def without_content(topic: str, partition: int, offset: int, why: KafkaError) -> Message:
    """A message at this offset that has an error in place of its content."""
    # Callers take it for a consumed message; it is never given back to a client.
    return Message(topic=topic, partition=partition, offset=offset, error=why)
