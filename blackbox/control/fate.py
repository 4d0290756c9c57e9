"""What became of a request: the index says whether it is pending, the receipts what ended it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from blackbox.connect import formats, kafka
from blackbox.entry import Entry
from blackbox.fate import Fate, Fates
from blackbox.index.inspector import Inspector, Pending
from blackbox.journal.access import KafkaAccess
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.logs import QUIET
from blackbox.plan import Labels
from blackbox.request import Record, Shard, request_id
from blackbox.settings import Settings

COUNTED_FOR_S = 5.0
VISIBLE_WITHIN_S = 5.0
LOOK_S = 0.02


class Registry:
    """Looks up fates. Raises JournalLost or IndexLost when Kafka or Redis does not answer."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._access = kafka(settings, QUIET)
        self._inspector = Inspector.of(settings.redis_url.get_secret_value())
        self._formats = formats(settings)
        self._admin = self._access.admin()
        self._partitions: dict[str, int] = {}
        self._counted_s = -math.inf
        self.count_partitions()

    @property
    def access(self) -> KafkaAccess:
        return self._access

    @property
    def inspector(self) -> Inspector:
        return self._inspector

    def count_partitions(self) -> None:
        """Look how many there are, unless that was done a moment ago."""
        if time.monotonic() - self._counted_s > COUNTED_FOR_S:
            topics = self._settings.topics
            journals = [name for topic in topics for name in (topic, receipts_topic(topic))]
            self._partitions = Topics(self._admin).partitions(
                [*journals, self._settings.dead_letter_topic], to="Read"
            )
            self._counted_s = time.monotonic()

    def partitions(self, topic: str) -> int:
        """Of one of blackbox's topics; 0 for one that is not there."""
        return self._partitions.get(topic, 0)

    def shards(self) -> Iterator[Shard]:
        """Every shard there is."""
        for topic in self._settings.topics:
            for partition in range(self._partitions.get(topic, 0)):
                yield Shard(topic, partition)

    def record(self, shard: Shard, offset: int) -> Record | None:
        """The record of a request, if Kafka has it."""
        with closing(ShardJournal(shard, self._access)) as journal:
            return journal.record(offset)

    def holder(self, caller_id: str) -> tuple[Shard, int] | None:
        """The pending request under this caller id."""
        for shard in self.shards():
            offset = self._inspector.offset_of(shard, caller_id)
            if offset is not None:
                return shard, offset
        return None

    def request_end(self, shard: Shard) -> int:
        """The next offset of the request topic."""
        journal = ShardJournal(shard, self._access)
        try:
            return journal.request_bounds().end
        finally:
            journal.close()

    def fate(self, shard: Shard, offset: int) -> Fate:
        """What became of the request at this place.

        1. the index is asked first: what is not in it any more has its receipt already;
        2. then the receipts, from the time on when it could have been dispatched;
        3. a request of the cold tier may have become another record: its fate, then.
        """
        if shard.partition >= self._partitions.get(shard.topic, 0):
            return Fate(request_id(shard, offset), shard.source(offset), "unknown")
        pending = self._inspector.look_up(shard, offset)  # 1
        standing = self._inspector.standing(shard, 0)
        with closing(ShardJournal(shard, self._access)) as journal:
            fates = self._fates(shard, journal)
            asked = fates.asked(offset)
            known = asked.fate
            if pending is not None:
                return replace(known, state="pending", is_cold=False, **_of_pending(pending))
            if self._inspector.is_cold(shard, offset):
                return replace(known, state="pending", is_cold=True)
            _wait_for(journal, standing.labels)
            outcome = fates.outcome(asked)  # 2
            if outcome is not None:
                return fates.explained(outcome)
            if known.state != "unread":
                return known
            if standing.has_cold_tier or self._settings.hot_horizon_s:
                there = fates.carried_to(offset)  # 3
                if there is not None:
                    return self.fate(shard, there).told_of(shard, offset)
        is_read = standing.labels is not None and offset < standing.labels.requests
        return replace(known, state="ended" if is_read else "unread")

    def close(self) -> None:
        self._inspector.close()

    def _fates(self, shard: Shard, journal: ShardJournal) -> Fates:
        has_receipts = shard.partition < self._partitions.get(receipts_topic(shard.topic), 0)
        now_ms = time.time_ns() // 1_000_000
        return Fates(shard, journal, self._formats[shard.topic], now_ms, has_receipts)


def _wait_for(journal: ShardJournal, labels: Labels | None) -> None:
    """Until the receipts that the index knows can be read: a commit is told before readers see it."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while labels is not None and journal.receipt_bounds().end < labels.receipts:
        if time.monotonic() > deadline:
            return
        time.sleep(LOOK_S)


def _of_pending(pending: Pending) -> dict[str, Any]:
    entry: Entry | None = pending.entry
    if entry is None:
        return {"next_try_ms": pending.at_ms}
    return {
        "caller": entry.caller,
        "caller_id": entry.caller_id,
        "target": entry.target or None,
        "due_ms": entry.due_ms,
        "next_try_ms": pending.at_ms,
        "attempts": entry.attempts + entry.waits,
        "reason": entry.reason,
        "detail": entry.detail,
    }
