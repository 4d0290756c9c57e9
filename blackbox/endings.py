"""What is written with the end of a request: when it recurs, the request for the next time; of a
schedule its tombstone, and a copy of the message for the history.

All but the copy go to the request topic, where callers write as well. A tombstone that stands behind
a newer schedule of the same id would end that one, by compaction if not by intake; the next time of
what is cancelled at this very moment would bring it back. So before a batch is committed, whatever
was written between what intake has stored and these records is looked at, in Kafka and uncommitted:
nothing is ended, or goes on, that was written anew or cancelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from blackbox.cancel import cancel_of, cancels
from blackbox.entry import Entry
from blackbox.formats import Format
from blackbox.outgoing import Outgoing, Refusal, deliveries
from blackbox.plan import Batch
from blackbox.receipt import Places
from blackbox.recurrence import asked_again
from blackbox.request import Cancel, Invalid, Reason, Record, Shard, offset_in


class Journal(Protocol):
    """The request topic, with what is not committed, or never will be."""

    def requests(self, start: int, end: int) -> Iterator[Batch]: ...


@dataclass(frozen=True, slots=True)
class Endings:
    """What a shard writes with its outcomes. `history_topic` is that of schedules, None elsewhere."""

    shard: Shard
    contract: Format
    journal: Journal
    history_topic: str | None = None

    def has_some(self, entries: Iterable[Entry]) -> bool:
        """Whether anything is written with the end of these."""
        return self.history_topic is not None or any(entry.recurs for entry in entries)

    def topics(self, entry: Entry) -> tuple[str, ...]:
        """Where something is written with the end of this request: without them it cannot end."""
        if self.history_topic is not None:
            return self.history_topic, self.shard.topic
        return () if entry.recurs is None else (self.shard.topic,)

    def requests(self, ended: Mapping[int, Entry], now_ms: int) -> Iterator[Outgoing]:
        """For the request topic, in its own partition: tombstones, and requests for the next time."""
        topic, partition = self.shard
        if self.history_topic is None:
            for offset, entry in ended.items():
                if entry.recurs is not None:
                    value, headers = asked_again(entry, now_ms), list(entry.headers)
                    yield Outgoing(offset, topic, _key(entry), value, headers, partition)
            return
        valid = {offset: entry for offset, entry in ended.items() if entry.caller_id is not None}
        for message in deliveries(self.shard, valid):
            key = _key(valid[message.offset])
            yield message._replace(topic=topic, key=key, value=None, partition=partition)

    def copies(self, delivered: Mapping[int, Entry]) -> Iterator[Outgoing]:
        """The messages once more, for the history topic."""
        if self.history_topic is not None:
            for message in deliveries(self.shard, delivered):
                yield message._replace(topic=self.history_topic)

    def overtaken(
        self, label: int, ended: Mapping[int, Entry], written: Places
    ) -> dict[int, Refusal]:
        """The requests that were asked for anew or cancelled, behind them and before what was written.

        Requests below `label` are known to the index. Raises a Doubt when Kafka does not answer.
        """
        at = {there for pairs in written.values() for _, there in pairs}
        end = max(at, default=label - 1) + 1
        if end - label <= len(at):
            return {}
        named = ended.items()
        latest = {e.caller_id: offset for offset, e in named if e.caller_id is not None}
        found: dict[int, Refusal] = {}
        for batch in self.journal.requests(label, end):
            for record in batch.records:
                if record.offset in at:
                    continue
                for offset in self._meant(record, latest):
                    if offset in ended and offset < record.offset:
                        newer = self.shard.source(record.offset)
                        detail = f"{newer} asks for it anew or cancels it, and is to be read first"
                        found[offset] = Reason.UNREACHABLE, detail
        return found

    def _meant(self, record: Record, latest: Mapping[str, int]) -> Iterator[int]:
        """The requests that a record may replace or cancel."""
        if record.unreadable is None and cancels(record.headers):
            cancel = cancel_of(record)
            named = offset_in(self.shard, (isinstance(cancel, Cancel) and cancel.id) or "")
            if named is not None:
                yield named
            return
        asked = self.contract.parse(record, record.timestamp_ms)
        if asked is None:
            return
        caller_id = None if isinstance(asked, Invalid) else asked.caller_id
        if self.history_topic is not None and record.key is not None:  # compaction goes by it
            caller_id = record.key.decode(errors="replace")
        if caller_id is not None and caller_id in latest:
            yield latest[caller_id]


def _key(entry: Entry) -> bytes:
    return (entry.caller_id or "").encode()
