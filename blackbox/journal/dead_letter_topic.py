"""The dead-letter topic: reads letters, and what became of them.

A letter stays where it is. A mark behind it, in the same partition, says that it was replayed or
discarded: a record without a value, whose last header names the letter.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from typing import Literal, NamedTuple, TypeVar, get_args

from blackbox.formats.format import caller_of
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.partition_reader import FETCHED_AHEAD, PartitionReader
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics
from blackbox.records.carried import record_bytes
from blackbox.records.outgoing import LETTER_HEADERS
from blackbox.records.request import Headers, Record, Shard, placed

HEADER = "blackbox-letter"
TAIL = 10_000
"""How many records at the end of each partition are read."""

# The most records read at once when only some are wanted: each may have a megabyte.
LONGEST_STRETCH = 256

# Records whose values and headers are copied from the Kafka client before any is shortened.
READ_AT_ONCE = 50

MOST_SHOWN_BYTES = 10_000  # of a key, and of a value

# A program that may write to the topic can forge longer ones, and thousands are in memory at once. A detail
# of blackbox has 500 characters, and at most 620 that say what was left out, with the names of two
# topics: without their end, the letter would pass for that of a tombstone. A source has 278.
MOST_CHARS = dict(zip(LETTER_HEADERS, (50, 1200, 300), strict=True))
MOST_MARK_BYTES = 300

T = TypeVar("T")

Closing = Literal["replayed", "discarded"]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter. `became` is None until it is replayed or discarded; `key` and `value` may be cut short.

    `content_bytes`: the size of the whole key, value and headers.
    """

    place: str
    at_ms: int
    reason: str
    detail: str
    source: str
    caller: str | None
    key: bytes | None
    value: bytes | None
    headers: Headers
    value_bytes: int
    became: Closing | None = None
    target: str | None = None
    content_bytes: int = 0

    @classmethod
    def of(cls, record: Record, place: str) -> DeadLetter:
        # Only the last headers are blackbox's: a caller may have used the same names before them.
        ours = dict(record.headers[-len(LETTER_HEADERS) :])
        reason, detail, source = (
            _text(ours.get(name), MOST_CHARS[name]) for name in LETTER_HEADERS
        )
        return cls(
            place=place,
            at_ms=record.timestamp_ms,
            reason=reason,
            detail=detail,
            source=source,
            caller=caller_of(record.headers),
            key=record.key,
            value=record.value,
            headers=record.headers[: len(record.headers) - len(LETTER_HEADERS)],
            value_bytes=len(record.value or b""),
            content_bytes=record_bytes(record),
        )

    def shortened(self, target: str | None, most_bytes: int) -> DeadLetter:
        """The letter as it is shown: key and value cut short, without headers, with its target."""
        key, value = first_bytes(self.key, most_bytes), first_bytes(self.value, most_bytes)
        return replace(self, key=key, value=value, headers=[], target=target)

    def without_content(self) -> DeadLetter:
        return replace(self, key=None, value=None, headers=[])


def _text(held: bytes | None, most_chars: int) -> str:
    # A character has at most four bytes; the rest is not even decoded.
    return (held or b"")[: 4 * most_chars].decode(errors="replace")[:most_chars]


def first_bytes(held: bytes | None, most_bytes: int) -> bytes | None:
    """At most `most_bytes` of it, not cut within a UTF-8 character."""
    if held is None or len(held) <= most_bytes:
        return held
    end = most_bytes
    # A character has at most four bytes; all but its first are 10xxxxxx.
    while end > most_bytes - 3 and held[end] & 0xC0 == 0x80:
        end -= 1
    return held[:end]


class ReplayRecord(NamedTuple):
    """A record to be written again by a replay; None in its place: the letter is only discarded.

    `offset` is that of the request that the letter is about.
    """

    shard: Shard
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class DeadLetterTopic:
    """Reads the dead-letter topic and marks letters. Not safe for use from two threads at once.

    Only letters about requests of these request topics.
    Every method raises JournalLost when Kafka does not answer, NotAllowed when an ACL is missing.
    """

    def __init__(self, access: KafkaAccess, topic: str, request_topics: Container[str]) -> None:
        self._access = access
        self._topic = topic
        self._request_topics = request_topics
        self._admin = access.admin()

    def newest(
        self,
        take: Callable[[DeadLetter], T | None],
        limit: int | None = None,
        keep: Callable[[DeadLetter], DeadLetter] = lambda letter: letter,
        is_settled: bool = False,
    ) -> list[T]:
        """The results of `take` for the letters, newest first, without None.

        Reads the last ten thousand records of each partition, from the end; with a `limit`, only
        until that many are found. `keep` is applied to each letter when it is read, before `became`
        is known, and returns what is kept of it in memory. With `is_settled`, waits for transactions
        that are open in the topic, up to 30 s.
        """
        count = Topics(self._admin).partitions([self._topic], to="Read").get(self._topic, 0)
        stretch = TAIL if limit is None else min(limit, LONGEST_STRETCH)
        found: list[tuple[int, T]] = []
        for partition in range(count):
            letters = self._letters(Shard(self._topic, partition), stretch, keep, is_settled)
            taken = ((letter.at_ms, one) for letter in letters if (one := take(letter)) is not None)
            found += islice(taken, limit)
        found.sort(key=itemgetter(0), reverse=True)
        return [one for _, one in found[:limit]]

    def _letters(
        self,
        shard: Shard,
        stretch: int,
        keep: Callable[[DeadLetter], DeadLetter],
        is_settled: bool,
    ) -> Iterator[DeadLetter]:
        """The letters from the end on, in stretches that double."""
        prefetched = FETCHED_AHEAD if stretch == TAIL else 1
        # A mark is behind its letter: read from the end, it is known before the letter.
        became: dict[str, Closing] = {}
        reader = PartitionReader(self._access, prefetched=prefetched, at_once=READ_AT_ONCE)
        with closing(ShardJournal(shard, self._access, reader=reader)) as journal:
            start, end = journal.settled_bounds() if is_settled else journal.request_bounds()
            last = max(start, end - TAIL)
            while end > last:
                first = max(last, end - stretch)
                letters: list[DeadLetter] = []
                for batch in journal.requests(first, end):
                    for record in batch.records:
                        if mark := _closing_of(record):
                            became.update(mark)
                            continue
                        letter = DeadLetter.of(record, shard.source(record.offset))
                        if self._is_ours(letter):
                            letters.append(keep(letter))
                while letters:
                    letter = letters.pop()
                    yield replace(letter, became=became.get(letter.place))
                end, stretch = first, min(2 * stretch, LONGEST_STRETCH)

    def whole(self, places: Iterable[str]) -> dict[str, DeadLetter]:
        """The letters at these places, if Kafka has them, with their content, but not what became of them."""
        wanted: dict[Shard, list[int]] = {}
        for shard, offset in filter(None, map(placed, places)):
            wanted.setdefault(shard, []).append(offset)
        found: dict[str, DeadLetter] = {}
        for shard, offsets in wanted.items():
            with closing(ShardJournal(shard, self._access)) as journal:
                for offset, record in journal.records(offsets).items():
                    place = shard.source(offset)
                    found[place] = DeadLetter.of(record, place)
        return found

    def _is_ours(self, letter: DeadLetter) -> bool:
        # Other deployments may share the dead-letter topic; by default they do.
        source = placed(letter.source)
        return source is not None and source[0].topic in self._request_topics


def _closing_of(record: Record) -> list[tuple[str, Closing]]:
    """The letter that a mark names, and what became of it; empty if the record is a letter."""
    if record.value is not None or not record.headers or record.headers[-1][0] != HEADER:
        return []
    held = record.headers[-1][1] or b""
    if len(held) > MOST_MARK_BYTES:  # longer than any place
        return []
    closing, _, place = held.decode(errors="replace").partition(" ")
    return [(place, known) for known in get_args(Closing) if known == closing]
