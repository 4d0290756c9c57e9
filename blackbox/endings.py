"""What follows the end of a schedule: its tombstone, and a copy of the message for the history.

A tombstone that stands behind a newer schedule of the same id would end that one, by compaction if
not by intake. So before a batch is committed, whatever callers wrote between what intake has stored
and the tombstones is looked at, in Kafka and uncommitted: nothing is ended that was written anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from blackbox.entry import Entry
from blackbox.formats import Format
from blackbox.outgoing import Outgoing, Refusal, deliveries
from blackbox.plan import Batch
from blackbox.receipt import Places
from blackbox.request import Reason, Shard


class Journal(Protocol):
    """The request topic, with what is not committed, or never will be."""

    def requests(self, start: int, end: int) -> Iterator[Batch]: ...


@dataclass(frozen=True, slots=True)
class Endings:
    """What is written with the outcomes of a shard of the format `scheduler`."""

    shard: Shard
    history_topic: str
    contract: Format
    journal: Journal

    @property
    def topics(self) -> frozenset[str]:
        """Where it writes: without them nothing can end."""
        return frozenset({self.history_topic, self.shard.topic})

    def tombstones(self, ended: Mapping[int, Entry]) -> Iterator[Outgoing]:
        """Of each valid request among these: in its own partition, with the delivered headers."""
        topic, partition = self.shard
        valid = {offset: entry for offset, entry in ended.items() if entry.caller_id is not None}
        for message in deliveries(self.shard, valid):
            key = (valid[message.offset].caller_id or "").encode()
            yield message._replace(topic=topic, key=key, value=None, partition=partition)

    def copies(self, delivered: Mapping[int, Entry]) -> Iterator[Outgoing]:
        """The messages once more, for the history topic."""
        for message in deliveries(self.shard, delivered):
            yield message._replace(topic=self.history_topic)

    def overtaken(
        self, label: int, ended: Mapping[int, Entry], tombstones: Places
    ) -> dict[int, Refusal]:
        """The requests whose id was written again, behind them and before their tombstone.

        Requests below `label` are known to the index. Raises a Doubt when Kafka does not answer.
        """
        at = {there for pairs in tombstones.values() for _, there in pairs}
        end = max(at, default=label - 1) + 1
        if end - label <= len(at):
            return {}
        latest = {entry.caller_id: offset for offset, entry in ended.items()}
        found: dict[int, Refusal] = {}
        for batch in self.journal.requests(label, end):
            for record in batch.records:
                if record.offset in at or record.key is None:
                    continue
                offset = latest.get(record.key.decode(errors="replace"))
                if offset is None or offset >= record.offset:
                    continue
                if self.contract.parse(record, record.timestamp_ms) is not None:
                    newer = self.shard.source(record.offset)
                    detail = f"its id was written again at {newer}, which is to be read first"
                    found[offset] = Reason.UNREACHABLE, detail
        return found
