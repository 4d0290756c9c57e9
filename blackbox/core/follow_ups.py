"""Follow-ups: what is written together with the outcome of a request.

For a recurring request, this is the request for the next time. For a schedule, it is a tombstone,
and a copy of the message for the history topic.

All but the copy go to the request topic, where callers write as well. A tombstone after a newer
schedule of the same id would end the newer one, by compaction if not by intake. The next request of
a recurring one that is being cancelled would bring it back. So before a batch is committed,
everything between what intake has stored and these records is read from Kafka, including what is
uncommitted. If one of the batch was asked for again or cancelled there, the transaction is aborted.
Most of a long backlog is read before the transaction begins.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

from blackbox.core.plan import Batch, Bounds
from blackbox.formats import Format
from blackbox.records.cancel import as_request, cancel_of, cancels, replaces
from blackbox.records.entry import Entry
from blackbox.records.outgoing import Outgoing, Refusal, deliveries
from blackbox.records.receipt import Places
from blackbox.records.recurrence import asked_again, follows, marked
from blackbox.records.request import Cancel, Invalid, Reason, Record, Shard, offset_in

logger = logging.getLogger("blackbox.core.follow_ups")

MOST_INSIDE = 4000
"""Records of others to be read inside a transaction: this many take well under a second of its time."""


class Journal(Protocol):
    """The request topic, including records that are not committed or never will be."""

    def request_bounds(self) -> Bounds: ...

    def requests(self, start: int, end: int) -> Iterator[Batch]: ...


@dataclass(slots=True)
class FollowUps:
    """The follow-ups that a shard writes with its outcomes. `history_topic` is set for schedules only.

    Not safe for use from two threads at once.
    """

    shard: Shard
    contract: Format
    journal: Journal
    history_topic: str | None = None
    _newest: dict[int | str, int] = field(default_factory=dict)
    _seen: int = 0

    def has_some(self, entries: Iterable[Entry]) -> bool:
        """Whether any of these requests has follow-ups."""
        return self.history_topic is not None or any(entry.recurs for entry in entries)

    def topics(self, entry: Entry) -> tuple[str, ...]:
        """The topics of this request's follow-ups. The request cannot end without them."""
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
                        value = asked_again(entry, now_ms)
                    except (ValueError, LookupError, OverflowError, TypeError) as why:
                        where = self.shard.source(offset)
                        logger.error("%s: recurs no more (%s): %s", where, entry.recurs, why)
                        continue
                    headers = marked(entry.headers, self.shard.source(offset))
                    yield Outgoing(offset, topic, _key(entry), value, headers, partition)
            return
        valid = {offset: entry for offset, entry in ended.items() if entry.caller_id is not None}
        for message in deliveries(self.shard, valid):
            key = _key(valid[message.offset])
            yield message._replace(topic=topic, key=key, value=None, partition=partition)

    def copies(self, delivered: Mapping[int, Entry]) -> Iterator[Outgoing]:
        """Copies of the messages for the history topic."""
        if self.history_topic is not None:
            for message in deliveries(self.shard, delivered):
                yield message._replace(topic=self.history_topic)

    def look_ahead(self, position: int) -> None:
        """Read a long backlog above `position` before a transaction begins, which the read could outlast.

        Repeats as long as each pass leaves at most half as much as the one before. Raises
        RecoveryRequired when Kafka does not answer.
        """
        before = math.inf
        while True:
            end = self.journal.request_bounds().end
            left = end - max(position, self._seen)
            if left <= MOST_INSIDE or left > before / 2:
                return
            self._look(position, end, set())
            before = left

    def overtaken(
        self, position: int, ended: Mapping[int, Entry], written: Places
    ) -> dict[int, Refusal]:
        """The requests that a later record, before what was written, asks for again or cancels.

        Requests below `position` are known to the index; records above it are read once. Raises
        RecoveryRequired when Kafka does not answer.
        """
        at = {there for pairs in written.values() for _, there in pairs}
        self._look(position, max(at, default=position - 1) + 1, at)
        found: dict[int, Refusal] = {}
        for offset, entry in ended.items():
            # A request that was carried on is cancelled by its first id.
            names = (offset, entry.origin, entry.caller_id)
            newer = max(self._newest.get(name, -1) for name in names if name is not None)
            if newer >= position and newer > offset:
                where = self.shard.source(newer)
                detail = f"{where} asks for it anew or cancels it, and is to be read first"
                found[offset] = Reason.UNREACHABLE, detail
        return found

    def _look(self, position: int, end: int, own: Set[int]) -> None:
        if position >= self._seen:
            self._newest.clear()
        start = max(position, self._seen)
        self._seen = max(self._seen, end)
        if all(offset in own for offset in range(start, min(end, start + len(own) + 1))):
            return  # no other writer in between
        for batch in self.journal.requests(start, end):
            for record in batch.records:
                for name in () if record.offset in own else self._meant(record):
                    self._newest[name] = record.offset

    def _meant(self, record: Record) -> Iterator[int | str]:
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
        asked = self.contract.parse(record, record.timestamp_ms)
        if asked is None:
            return
        if self.history_topic is not None and record.key is not None:  # compaction works by the key
            yield record.key.decode(errors="replace")
        elif not isinstance(asked, Invalid) and asked.caller_id is not None:
            yield asked.caller_id


def _key(entry: Entry) -> bytes:
    return (entry.caller_id or "").encode()
