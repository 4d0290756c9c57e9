"""Conversion of consumed Kafka messages to the records of the pure layer."""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Message

from blackbox.core.plan import UNKNOWN_EPOCH
from blackbox.journal.polled_messages import is_unreadable
from blackbox.records.request import Headers, Invalid, Reason, Record


def read_records(messages: Sequence[Message]) -> list[Record]:
    """The records of consumed messages; `unreadable` says why a record or its headers cannot be read."""
    headers, unreadable = read_headers(messages)
    stamps = map(Message.timestamp, messages)
    records = [
        Record(m.offset(), ms, m.key(), m.value(), found, None, by == TIMESTAMP_LOG_APPEND_TIME)  # type: ignore[arg-type]
        for m, found, (by, ms) in zip(messages, headers, stamps, strict=True)
    ]
    for place, refusal in unreadable.items():
        records[place] = records[place]._replace(unreadable=refusal)
    return records


def leader_epochs(messages: Sequence[Message]) -> tuple[int, int]:
    """The leader epochs of the first and the last message; UNKNOWN_EPOCH where there is none."""
    if not messages:
        return UNKNOWN_EPOCH, UNKNOWN_EPOCH
    first, last = messages[0].leader_epoch(), messages[-1].leader_epoch()
    return (UNKNOWN_EPOCH if first is None else first, UNKNOWN_EPOCH if last is None else last)


def read_headers(messages: Sequence[Message]) -> tuple[list[Headers], dict[int, Invalid]]:
    """The headers of each message; where they cannot be read, they are empty, with the reason by index."""
    found: list[Headers | None] = []
    unreadable: dict[int, Invalid] = {}
    # After an error, `waiting` continues with the next message, and `found` has all before it.
    waiting = map(Message.headers, messages)
    while len(found) < len(messages):
        try:
            found.extend(waiting)  # type: ignore[arg-type]
        except (SystemError, UnicodeDecodeError) as error:
            cause = error.__cause__ or error
            if not isinstance(cause, UnicodeDecodeError):
                raise
            # A second call of headers() would return names that crash Python (confluent-kafka 2.16.1).
            detail = f"a header name is not UTF-8: {cause}"
            unreadable[len(found)] = Invalid(Reason.BAD_HEADERS, detail)
            found.append([])
    for place, refusal in enumerate(map(Message.error, messages)):
        if refusal is not None:
            about = "its record batch has too many bytes, or is damaged: "
            detail = f"{about if is_unreadable(refusal) else ''}{refusal.str()}"
            unreadable[place] = Invalid(Reason.UNREADABLE, detail)
    return [headers or [] for headers in found], unreadable
