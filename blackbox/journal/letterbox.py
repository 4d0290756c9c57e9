"""The dead-letter topic: what lies there, and what became of it.

A letter stays where it is. That it was replayed or discarded says a mark behind it, in the same
partition: a record without a value, whose last header names the letter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Literal, NamedTuple, TypeVar

from confluent_kafka import KafkaError, KafkaException

from blackbox.doubt import JournalLost
from blackbox.formats.terms import caller_of
from blackbox.journal.access import KafkaAccess, doubt
from blackbox.journal.partition_reader import FETCHED_AHEAD
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics
from blackbox.journal.transactions import Transactions
from blackbox.outgoing import LETTER_HEADERS
from blackbox.request import Headers, Record, Shard, placed

HEADER = "blackbox-letter"
TAIL = 10_000
"""Records at the end of each partition that are looked at."""

LONGEST_STRETCH = 256
"""Of them that are held at once where only some are wanted: each may have a megabyte."""

T = TypeVar("T")

Fate = Literal["replayed", "discarded"]
FATES: tuple[Fate, ...] = ("replayed", "discarded")


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter. `became` is None while nobody did anything about it."""

    place: str
    at_ms: int
    reason: str
    detail: str
    source: str
    caller: str | None
    key: bytes | None
    value: bytes | None
    headers: Headers
    became: Fate | None

    @classmethod
    def of(cls, record: Record, place: str, became: Fate | None) -> Letter:
        ours = record.headers[-len(LETTER_HEADERS) :]
        about = {name: (held or b"").decode(errors="replace") for name, held in ours}
        return cls(
            place=place,
            at_ms=record.timestamp_ms,
            reason=about.get("blackbox-reason", ""),
            detail=about.get("blackbox-detail", ""),
            source=about.get("blackbox-source", ""),
            caller=caller_of(record.headers),
            key=record.key,
            value=record.value,
            headers=record.headers[: len(record.headers) - len(LETTER_HEADERS)],
            became=became,
        )


class Again(NamedTuple):
    """A record to be written once more; None: the letter is only put away."""

    shard: Shard
    key: bytes | None
    value: bytes | None
    headers: Headers


class Letterbox:
    """Reads the dead-letter topic and marks letters. Not safe for use from two threads at once.

    Every method raises JournalLost when Kafka does not answer, NotAllowed for a right that lacks.
    """

    def __init__(self, access: KafkaAccess, topic: str) -> None:
        self._access = access
        self._topic = topic
        self._admin = access.admin()

    def newest(self, take: Callable[[Letter], T | None], limit: int | None = None) -> list[T]:
        """What `take` makes of the letters, the newest first, without those that it makes nothing of.

        Among the last ten thousand records of each partition; with a `limit` no more are read, from
        the end, than it takes to find so many.
        """
        count = Topics(self._admin).partitions([self._topic], to="Read").get(self._topic, 0)
        found: list[tuple[int, T]] = []
        for partition in range(count):
            found += islice(self._taken(Shard(self._topic, partition), take, limit), limit)
        found.sort(key=itemgetter(0), reverse=True)
        return [taken for _, taken in found[:limit]]

    def _taken(
        self, shard: Shard, take: Callable[[Letter], T | None], limit: int | None
    ) -> Iterator[tuple[int, T]]:
        for letter in self._letters(shard, TAIL if limit is None else min(limit, LONGEST_STRETCH)):
            taken = take(letter)
            if taken is not None:
                yield letter.at_ms, taken

    def _letters(self, shard: Shard, stretch: int) -> Iterator[Letter]:
        """From the end on, in stretches that double: a mark comes behind its letter."""
        ahead = FETCHED_AHEAD if stretch == TAIL else 1
        became: dict[str, Fate] = {}
        with closing(ShardJournal(shard, self._access, ahead=ahead)) as journal:
            start, end = journal.request_bounds()
            last = max(start, end - TAIL)
            while end > last:
                first = max(last, end - stretch)
                batches = journal.requests(first, end)
                records = [record for batch in batches for record in batch.records]
                became |= {named: fate for record in records for named, fate in _mark(record)}
                while records:
                    record = records.pop()
                    if not _mark(record):
                        place = shard.source(record.offset)
                        yield Letter.of(record, place, became.get(place))
                end, stretch = first, min(2 * stretch, LONGEST_STRETCH)

    def put_away(self, places: Mapping[str, Again | None]) -> list[str]:
        """Mark these letters, and write again what is to be; which of them were open till then.

        In one transaction, under an id of its own: of two who do this at once, one does. Raises a
        Doubt when nothing was done, or that is not known: look again.
        """
        name = self._access.transactional_id("letters")
        with closing(Transactions(self._access, name, f"{self._topic}: letters")) as transactions:
            transactions.open()
            open_now = set(self.newest(lambda one: one.place if one.became is None else None))
            chosen = [place for place in places if place in open_now]
            if chosen:
                transactions.begin()
                _write(transactions, self._topic, [(place, places[place]) for place in chosen])
                transactions.commit(f"Write on topic {self._topic}")
            return chosen


def _mark(record: Record) -> list[tuple[str, Fate]]:
    """The letter that a mark names, and what became of it; none for a letter."""
    if record.value is not None or not record.headers or record.headers[-1][0] != HEADER:
        return []
    fate, _, place = (record.headers[-1][1] or b"").decode(errors="replace").partition(" ")
    return [(place, known) for known in FATES if known == fate]


def _write(
    transactions: Transactions, topic: str, letters: Sequence[tuple[str, Again | None]]
) -> None:
    failed: list[tuple[str | None, KafkaError]] = []

    def report(error: KafkaError | None, message: object) -> None:
        if error is not None:
            failed.append((getattr(message, "topic", str)(), error))

    try:
        for place, again in letters:
            if again is not None:
                there, partition = again.shard
                transactions.send(there, again.value, again.key, partition, report, again.headers)
            fate = FATES[0] if again is not None else FATES[1]
            lies = placed(place)
            assert lies is not None
            assert lies[0].topic == topic
            mark: Headers = [(HEADER, f"{fate} {place}".encode())]
            transactions.send(topic, None, None, lies[0].partition, report, mark)
    except KafkaException as error:
        transactions.abort()
        raise JournalLost(f"nothing was written: {error}") from None
    left = transactions.flush()
    if failed:
        where, cause = failed[0]
        transactions.abort()
        raise doubt(KafkaException(cause), "nothing was written", f"Write on topic {where}")
    if left:
        raise JournalLost(f"{left} records unacknowledged; nothing was written")
