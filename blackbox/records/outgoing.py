"""The records blackbox writes: a delivered message, and a dead letter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from blackbox.records.entry import Entry
from blackbox.records.recurrence import AGAIN, request_value_at
from blackbox.records.request import Record, Shard, id_prefix, id_suffix

MAX_DETAIL = 500
FORMS = 3
"""How many forms a dead letter has, each smaller than the one before."""

LETTER_HEADERS = ("blackbox-reason", "blackbox-detail", "blackbox-source")

MESSAGE_ONLY = (
    "the record of the request is no longer in Kafka: this dead letter has its message instead"
)
"""The start of the detail of a dead letter that cannot be replayed."""

# At the end, as `dead_letters` writes it: the text before it may be a caller's.
_LEFT_OUT = re.compile(r"value of ([0-9]+) bytes(, key and headers)? left out\)\Z")

Refusal = tuple[str, str]
"""Why a record cannot be written: the reason word and the detail."""


class Outgoing(NamedTuple):
    """A record to produce for the request at `offset`; `partition` -1: by its key."""

    offset: int
    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | str | None]]
    partition: int = -1


class LeftOut(NamedTuple):
    """The parts that a smaller form of a dead letter lacks: the value of this size; if `is_bare`, key and headers too."""

    value_bytes: int
    is_bare: bool


def deliveries(shard: Shard, entries: Mapping[int, Entry]) -> Iterator[Outgoing]:
    """The messages as callers asked for them: the request's headers first, blackbox's own last."""
    before_id, before_offset = id_prefix(shard), shard.source_prefix
    for offset, entry in entries.items():
        # the id is that of the request as its caller wrote it, the source may be a carried record
        original_offset = offset if entry.origin is None else entry.origin
        # blackbox's own last: cancels and carried records are known by their last header, so a
        # message to a request topic cannot pose as one
        headers = [
            *entry.headers,
            ("blackbox-id", before_id + id_suffix(original_offset)),
            ("blackbox-due-ms", str(entry.due_ms)),
            ("blackbox-source", before_offset + str(offset)),
        ]
        yield Outgoing(offset, entry.target, entry.key, entry.message, headers)


def rewritten_request(
    shard: Shard, offset: int, entry: Entry, partition: int, now_ms: int = 0
) -> Outgoing:
    """A pending request as a new record of its topic, in the format `countdown`.

    With `now_ms`, when it is written, it expires when the entry does.
    """
    # The reader of a record for a time that is past takes the time of writing instead, except for
    # a recurring request, which keeps its due time.
    since_ms = 0 if entry.recurs else now_ms
    value = request_value_at(entry, entry.due_ms, since_ms)
    key = None if entry.caller_id is None else entry.caller_id.encode()
    headers = [*entry.headers, (AGAIN, shard.source(offset))]
    return Outgoing(offset, shard.topic, key, value, headers, partition)


def dead_letters(
    shard: Shard, topic: str, original: Record, reason: str, detail: str
) -> Iterator[Outgoing]:
    """The request's record with the reason; then without its value; then without key and headers.

    `blackbox-source` says where the whole record is.
    """
    source = shard.source(original.offset)
    size = len(original.value or b"")
    shorter = f"{detail[:MAX_DETAIL]} (too large for {topic}: see the record at {source}, value of {size} bytes"
    for key, value, headers, text in (
        (original.key, original.value, original.headers, detail[:MAX_DETAIL]),
        (original.key, None, original.headers, f"{shorter} left out)"),
        (None, None, [], f"{shorter}, key and headers left out)"),
    ):
        about = zip(LETTER_HEADERS, (reason, text, source), strict=True)
        yield Outgoing(original.offset, topic, key, value, [*headers, *about])


def left_out(detail: str) -> LeftOut | None:
    """The parts that a dead letter with this detail lacks; None if it is the whole record."""
    found = _LEFT_OUT.search(detail)
    return None if found is None else LeftOut(int(found[1]), found[2] is not None)
