"""What a topic refuses that others take, so that it is known before it spoils a batch."""

from __future__ import annotations

from typing import NamedTuple

from blackbox.outgoing import Outgoing, Refusal
from blackbox.request import Reason

BATCH_BYTES = 61
"""The head of a record batch, in Kafka's message format 2."""


class Limits(NamedTuple):
    """A topic's own. `most_bytes` is what a batch of one record may have, None: any."""

    needs_key: bool
    most_bytes: int | None

    def refusal(self, message: Outgoing) -> Refusal | None:
        """Why the brokers would refuse this message, if they would."""
        if self.needs_key and message.key is None:
            return (
                Reason.REFUSED,
                f"{message.topic}: is compacted and takes no message without a key; give one, or another topic",
            )
        if self.most_bytes is not None and (size := batch_bytes(message)) > self.most_bytes:
            return (
                Reason.TOO_LARGE,
                f"{message.topic}: {size} bytes with its headers, more than max.message.bytes={self.most_bytes}",
            )
        return None


def batch_bytes(message: Outgoing) -> int:
    """The size of a record batch with this message alone, not compressed."""
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
    """Of a length as Kafka writes it: seven bits a byte, the lowest of them the sign."""
    return max(1, ((count << 1).bit_length() + 6) // 7)
