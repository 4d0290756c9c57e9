"""Record batches that the client cannot decompress: it returns an error in place of their records.

Brokers accept a zstd batch of a few kilobytes that has more than `receive.message.max.bytes` when it is
decompressed. The client refuses it again at each attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from confluent_kafka import Message

from blackbox.journal.offset_lookup import OffsetLookup
from blackbox.journal.polled_messages import is_unreadable, offset_of, without_content

AT_ONCE = 4000


def readable(polled: Sequence[Message]) -> Sequence[Message]:
    """The messages before the first unreadable batch."""
    for place, message in enumerate(polled):
        if is_unreadable(message.error()):
            return polled[:place]
    return polled


def read_over(
    lookup: OffsetLookup, refused: Message, start: int, end: int
) -> Iterator[tuple[list[Message], int]]:
    """The records from `start` to before `end` of the batch that was `refused`, without content.

    Each list comes with the offset reached. The error of each message says why it has no content.
    """
    place, why = (refused.topic() or "", refused.partition() or 0), refused.error()
    assert why is not None
    first = max(start, offset_of(refused))
    if first >= end:  # it was written later; before it are markers of transactions, or nothing
        yield [], end
        return
    behind = _end(lookup, refused, first, end)
    for at in range(first, behind, AT_ONCE):
        reached = min(at + AT_ONCE, behind)
        yield [without_content(*place, offset, why) for offset in range(at, reached)], reached


def _end(lookup: OffsetLookup, refused: Message, first: int, end: int) -> int:
    """The offset behind the batch, at most `end`; `first` is in it."""
    # The client does not say how many records the batch has. Reads at any offset in it fail with
    # the batch's own offset: by doubling, then by bisection.
    inside, step = first, 1
    while inside + step < end and _is_in(lookup, refused, inside + step):
        inside, step = inside + step, 2 * step
    behind = min(inside + step, end)
    while behind - inside > 1:
        middle = (inside + behind) // 2
        if _is_in(lookup, refused, middle):
            inside = middle
        else:
            behind = middle
    return behind


def _is_in(lookup: OffsetLookup, refused: Message, offset: int) -> bool:
    found = lookup.first_from(refused.topic() or "", refused.partition() or 0, offset)
    return is_unreadable(found.error()) and found.offset() == refused.offset()
