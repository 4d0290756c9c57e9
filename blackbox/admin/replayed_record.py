"""Whether the record at a dead letter's source is still that of its request, and what a replay writes of it."""

from __future__ import annotations

from blackbox.journal.dead_letter_topic import DeadLetter
from blackbox.records.cancel import REPLACES
from blackbox.records.carried import HEADER as CARRIED
from blackbox.records.clock import CLOCKS_APART_MS
from blackbox.records.outgoing import left_out
from blackbox.records.recurrence import AGAIN
from blackbox.records.recurrence import HEADER as FOLLOWS
from blackbox.records.request import Headers, Record

LATER_BY_ITS_PRODUCER = (
    "may be another record now: its timestamp, which its producer set, is later than the letter's. "
    "If the request topic was not created again, the producer's clock was ahead, and this record may "
    "be the only copy of the request: read it, and have its caller send the request again before you "
    "discard the letter"
)


def why_another(letter: DeadLetter, record: Record) -> str | None:
    """Why the record at the letter's source is not, or may not be, that of its request, and what to do.

    The offsets of a topic that was deleted and created again begin again.
    """
    why = _difference(letter, record)
    # The letter has the time of blackbox; clocks differ.
    if why is None and record.timestamp_ms > letter.at_ms + CLOCKS_APART_MS:
        if not record.has_broker_time:  # the clock of its producer may be wrong by any time
            return LATER_BY_ITS_PRODUCER
        why = "its timestamp is later than the letter's"
    if why is None:
        return None
    return (
        f"is another record now ({why}): discard the letter, and have its caller send the request "
        "again"
    )


def _difference(letter: DeadLetter, record: Record) -> str | None:
    left = left_out(letter.detail) if letter.value is None else None
    if left is None or not left.is_bare:
        if record.key != letter.key:
            return "its key is not the letter's"
        # Of a record that promotion wrote, the letter has only the caller's headers.
        if as_new(record.headers) != as_new(letter.headers):
            return "its headers are not the letter's"
    if left is None:
        return None if record.value == letter.value else "its value is not the letter's"
    size = len(record.value or b"")
    return None if size == left.value_bytes else f"its value has {size} bytes"


def as_new(headers: Headers) -> Headers:
    """The headers as a caller's new record has them."""
    # With these a replay would count for another record, which has ended: a replacement would be too
    # late, a carried record would be ignored, and a follow-up would not count against a later one.
    end = len(headers)
    while end and headers[end - 1][0] in (REPLACES, CARRIED, FOLLOWS, AGAIN):
        end -= 1
    return headers[:end]
