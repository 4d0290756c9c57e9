"""Records that are not at the offsets that they claim.

In a record batch, each record has an offset of its own. Brokers set the batch's offset, but do not check those of
the records of an uncompressed batch, and clients believe them. Without a check, a writer could make its record
appear to be another, or move a reader past the records of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from confluent_kafka import Message

from blackbox.journal.polled_messages import is_elsewhere, offset_of
from blackbox.journal.topics import RECEIPTS_SUFFIX


def believed(
    polled: Sequence[Message], position: int, is_there: Callable[[Message], bool]
) -> Sequence[Message]:
    """The polled messages, up to the first whose offset is in doubt; errors in their place are kept.

    Offsets without a gap, from `position` on, cannot hide the record of another. Behind a gap, such as a
    marker of a transaction or what compaction removed, the last one is looked up: if it is where it
    claims to be, nothing before it was skipped, unless its writer has put the same content there
    (docs/security.md).
    """
    count = _without_gap(polled, position)
    # Callers cannot write receipts, and each is followed by the marker of its transaction.
    if count == len(polled) or (polled[0].topic() or "").endswith(RECEIPTS_SUFFIX):
        return polled
    last, claimed, end = position + count - 1, None, count
    for message in polled[count:]:
        if is_elsewhere(message, last + 1):
            break
        if message.error() is None:
            if offset_of(message) <= last:
                break
            last, claimed = offset_of(message), message
        end += 1
    return polled[:end] if claimed is None or is_there(claimed) else polled[:count]


def _without_gap(polled: Sequence[Message], position: int) -> int:
    for count, message in enumerate(polled):
        if message.offset() != position + count:
            return count
    return len(polled)
