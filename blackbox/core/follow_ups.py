"""Follow-ups: what is written together with the outcome of a request.

For a recurring request, this is the request for the next time. For a schedule, it is a tombstone,
and a copy of the message for the history topic.

All but the copy go to the request topic, where callers write as well. A tombstone after a newer
schedule of the same id would end the newer one. The next request of a recurring one that is being
cancelled would bring it back. So before a batch is committed, the records between those that intake
has stored and these follow-ups are read. If one of the batch was replaced or cancelled there, the
transaction is aborted. That request waits for intake; the others are sent again without it, in parts:
those without follow-ups, which cannot be superseded, then two halves.
"""

from __future__ import annotations

import logging
import math
from array import array
from bisect import bisect_left
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from blackbox.core.plan import Batch, Bounds
from blackbox.formats import Format
from blackbox.formats.format import CALLER_HEADER
from blackbox.records.cancel import as_request, cancel_of, cancels, replaces
from blackbox.records.entry import Entry
from blackbox.records.outgoing import FORMS, Outgoing, Refusal, deliveries
from blackbox.records.receipt import Places
from blackbox.records.recurrence import (
    follows,
    last_request_value,
    next_request_headers,
    next_request_value,
    request_value_at,
)
from blackbox.records.request import Cancel, Invalid, Reason, Record, Shard, offset_in

logger = logging.getLogger("blackbox.core.follow_ups")

# Records of others that are read inside a transaction: they take well under a second of its time.
MOST_INSIDE = 4000

# After an id was superseded: how long it goes after the others, and of how many ids this is known.
CONTENDED_MS, MOST_CONTENDED = 10_000, 10_000

# Names in a backlog that are kept from one batch to the next: 16 bytes each, 64 MB a shard. Behind
# them the backlog is read again for each batch. This takes time, but no batch is postponed for it:
# if Redis is full of recurring requests, intake waits for them to leave.
MOST_REMEMBERED = 4_000_000


class UncommittedRequests(Protocol):
    """The request topic, including records that are not committed or never will be."""

    # they come before the follow-ups, and count if they are committed later

    def request_bounds(self) -> Bounds: ...
    def requests(self, start: int, end: int) -> Iterator[Batch]: ...


@dataclass(slots=True)
class FollowUps:
    """The follow-ups that a shard writes with its outcomes. `history_topic` is set for schedules only.

    Not safe for use from two threads at once.
    """

    shard: Shard
    format: Format
    journal: UncommittedRequests
    history_topic: str | None = None
    # Of names, in the order of the records that name them: an id may have 1,024 bytes.
    _hashes: array[int] = field(default_factory=lambda: array("q"))
    _offsets: array[int] = field(default_factory=lambda: array("q"))
    _remembered: int = 0
    _wanted: frozenset[int] = frozenset()
    _newest_beyond: dict[int, int] = field(default_factory=dict)
    _read: int = 0
    _contended: dict[int, int] = field(default_factory=dict)
    _contended_until_ms: int = 0

    def has_some(self, entries: Iterable[Entry]) -> bool:
        """Whether any of these requests has follow-ups."""
        return self.history_topic is not None or any(entry.recurs for entry in entries)

    def topics(self, entry: Entry) -> tuple[str, ...]:
        """The topics of this request's follow-ups, without which it cannot end."""
        if self.history_topic is not None:
            return self.history_topic, self.shard.topic
        return () if entry.recurs is None else (self.shard.topic,)

    def requests(self, ended: Mapping[int, Entry], now_ms: int) -> Iterator[Outgoing]:
        """The follow-ups for the request topic, in its own partition: tombstones, or requests for next times."""
        topic, partition = self.shard
        if self.history_topic is None:
            for offset, entry in ended.items():
                if entry.recurs is not None:
                    try:
                        value = next_request_value(entry, now_ms)
                    except (ValueError, LookupError, OverflowError, TypeError, OSError) as why:
                        where = self.shard.source(offset)
                        logger.error("%s: no next time (%s): %s", where, entry.recurs, why)
                        # intake refuses it for the same cause: a dead letter that can be replayed
                        value = request_value_at(entry, None)
                    headers = next_request_headers(entry.headers, self.shard.source(offset))
                    yield Outgoing(offset, topic, _key(entry), value, headers, partition)
            return
        valid = {offset: entry for offset, entry in ended.items() if entry.caller_id is not None}
        for message in deliveries(self.shard, valid):
            key = _key(valid[message.offset])
            yield message._replace(topic=topic, key=key, value=None, partition=partition)

    def forms(self, message: Outgoing, entry: Entry) -> Sequence[Outgoing]:
        """The forms of a follow-up, the largest first: it can be larger than the request that it follows.

        The smaller tombstone has only blackbox's own headers. The smaller request for a next time
        also lacks the message, and so becomes a dead letter.
        """
        if message.topic != self.shard.topic:  # a copy is as large as the message
            return (message,)
        smaller = message._replace(headers=message.headers[len(entry.headers) :])
        if self.history_topic is None:
            caller = [] if entry.caller is None else [(CALLER_HEADER, entry.caller)]
            headers = [*caller, *smaller.headers]
            smaller = smaller._replace(value=last_request_value(entry), headers=headers)
        # the broker has refused all forms of the dead letter beside the larger one
        return (smaller,) if entry.shortened >= FORMS else (message, smaller)

    def copies(self, delivered: Mapping[int, Entry]) -> Iterator[Outgoing]:
        """Copies of the messages for the history topic."""
        if self.history_topic is not None:
            for message in deliveries(self.shard, delivered):
                yield message._replace(topic=self.history_topic)

    def read_backlog(self, position: int, ended: Mapping[int, Entry]) -> None:
        """Read a long backlog above `position`, before a transaction begins.

        Raises RecoveryRequired when Kafka does not answer.
        """
        if not self.has_some(ended.values()):
            return
        self._look_for(ended)
        before = math.inf
        while True:
            end = self.journal.request_bounds().end
            left = end - max(position, self._remembered, self._read)
            # more than half: callers write nearly as fast as this reads
            if left <= MOST_INSIDE or left > before / 2:
                return
            self._read_names(position, end, set())
            before = left

    def superseded(
        self, position: int, ended: Mapping[int, Entry], written: Places
    ) -> dict[int, Refusal]:
        """The requests that a later record, before what was written, asks for again or cancels.

        The index knows the requests below `position`. Raises RecoveryRequired when Kafka does not
        answer.
        """
        at = {there for pairs in written.values() for _, there in pairs}
        self._look_for(ended)
        self._read_names(position, max(at, default=position - 1) + 1, at)
        newest = self._newest_records()
        found: dict[int, Refusal] = {}
        for offset, entry in ended.items():
            newer = max(newest.get(name, -1) for name in _hashed_names(offset, entry))
            if newer >= position and newer > offset:
                where = self.shard.source(newer)
                detail = f"{where} replaces or cancels it and must be read first"
                found[offset] = Reason.UNREACHABLE, detail
        return found

    def note_contended(self, superseded: Collection[Entry], now_ms: int) -> None:
        """Note that these were superseded: their caller may go on writing their ids, or others."""
        if superseded:
            self._contended_until_ms = now_ms + CONTENDED_MS
        known = self._contended
        for name in {hash(entry.caller_id) for entry in superseded if entry.caller_id is not None}:
            known.pop(name, None)  # so that the earliest comes first
            known[name] = now_ms + CONTENDED_MS
        for name, until_ms in list(known.items()):
            if until_ms > now_ms and len(known) <= MOST_CONTENDED:
                break
            del known[name]

    def contended(
        self, entries: Iterable[tuple[int, Entry]], now_ms: int
    ) -> tuple[Sequence[int], Sequence[int]]:
        """If an id was superseded lately: those to send after the others, which they could hold up.

        First those with follow-ups (not of schedules, which all have some), then those with such an id.
        """
        with_follow_ups: list[int] = []
        known_ids: list[int] = []
        for offset, entry in entries if now_ms < self._contended_until_ms else ():
            if self._contended.get(hash(entry.caller_id), 0) > now_ms:
                known_ids.append(offset)
            elif entry.recurs is not None:
                with_follow_ups.append(offset)
        return with_follow_ups, known_ids

    def parts(
        self, sent: Mapping[int, Entry], superseded: Container[int]
    ) -> Iterator[Sequence[int]]:
        """The requests that were sent without those that were superseded, in the parts in which they are sent again."""
        left = [offset for offset in sent if offset not in superseded]
        safe = [offset for offset in left if not self.topics(sent[offset])]
        others = [offset for offset in left if self.topics(sent[offset])]
        half = (len(others) + 1) // 2
        yield from filter(None, (safe, others[:half], others[half:]))

    def _look_for(self, ended: Mapping[int, Entry]) -> None:
        """Of what lies behind what is remembered, only these are looked for."""
        names = (_hashed_names(offset, entry) for offset, entry in ended.items())
        wanted = frozenset(chain.from_iterable(names))
        if not wanted <= self._wanted:
            self._wanted, self._newest_beyond, self._read = wanted, {}, self._remembered

    def _newest_records(self) -> dict[int, int]:
        """The last records that name what is wanted, by name."""
        named = self._wanted.intersection(self._hashes)
        pairs = zip(self._hashes, self._offsets, strict=True) if named else ()
        return {name: offset for name, offset in pairs if name in named} | self._newest_beyond

    def _read_names(self, position: int, end: int, own: Set[int]) -> None:
        passed = bisect_left(self._offsets, position)
        del self._hashes[:passed], self._offsets[:passed]
        self._remembered = max(self._remembered, position)
        start = max(self._remembered, self._read)
        if all(offset in own for offset in range(start, min(end, start + len(own) + 1))):
            # no other writer in between
            batches: Iterable[Batch] = [Batch(start, max(start, end), ())]
        else:
            batches = self.journal.requests(start, end)
        for batch in batches:
            is_next = batch.start == self._remembered
            has_room = is_next and len(self._hashes) < MOST_REMEMBERED
            for record in batch.records:
                for named in () if record.offset in own else self._named_by(record):
                    name = hash(named)
                    if has_room:
                        self._hashes.append(name)
                        self._offsets.append(record.offset)
                    elif name in self._wanted:
                        self._newest_beyond[name] = record.offset
            self._read = batch.end
            if has_room:
                self._remembered = batch.end

    def _named_by(self, record: Record) -> Iterator[int | str]:
        """The requests that a record may replace or cancel: by offset, or by caller id."""
        if record.unreadable is None and (cancels(record.headers) or replaces(record.headers)):
            cancel = cancel_of(record)
            offset = offset_in(self.shard, (isinstance(cancel, Cancel) and cancel.id) or "")
            if offset is not None:
                yield offset
            if cancels(record.headers):
                return
            record = as_request(record)
        if follows(record.headers):  # blackbox's own, from an aborted transaction
            return
        parsed = self.format.parse(record, record.timestamp_ms)
        if parsed is None:
            return
        if self.history_topic is not None and record.key is not None:  # compaction works by the key
            yield record.key.decode(errors="replace")
        elif not isinstance(parsed, Invalid) and parsed.caller_id is not None:
            yield parsed.caller_id


def _hashed_names(offset: int, entry: Entry) -> Sequence[int]:
    """The hashes of what others may call this request."""
    # Two names with one hash only postpone a request. One that was carried on is cancelled by its
    # first id.
    names = (offset, entry.origin, entry.caller_id)
    return [hash(name) for name in names if name is not None]


def _key(entry: Entry) -> bytes:
    return (entry.caller_id or "").encode()
