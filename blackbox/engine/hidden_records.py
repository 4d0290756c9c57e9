"""Requests hidden behind a producer's open transaction: they cannot be read before it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from blackbox.engine.metrics import Metrics
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.topics import Topics
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.engine.hidden")

CHECKED_EVERY_S = 10.0
WARN_AFTER_S = 30.0


@dataclass(eq=False, repr=False)
class HiddenRecords:
    """Shows hidden records of the shards that this process owns as metrics, and logs those that last."""

    access: KafkaAccess
    metrics: Metrics
    shards: Callable[[], Iterable[Shard]]
    now_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._topics: Topics | None = None
        self._since: dict[Shard, tuple[int, float]] = {}
        self._warned: set[Shard] = set()

    def check(self) -> None:
        shards = list(self.shards())
        if not shards:
            self._since = {}
            return
        topics = self._topics or Topics(self.access.admin())
        written = topics.ends(shards, committed=False)
        # Asked second: a transaction that ended in between is not reported.
        readable = topics.ends(shards, committed=True)
        # Without an answer, the client may have lost all brokers: the next check replaces it.
        self._topics = topics if readable else None
        # Shards may have been lost during the queries; their gauges must not come back.
        ours = set(self.shards())
        self._note({s: (readable[s], written[s]) for s in ours if s in readable and s in written})

    def _note(self, ends: dict[Shard, tuple[int, int]]) -> None:
        before, now_s = self._since, self.now_s()
        self._since = {}
        for shard, (readable, written) in ends.items():
            held_s = 0.0
            if readable < written:
                at, since_s = before.get(shard, (readable, now_s))
                # The readable end moved: another transaction hides the records now.
                self._since[shard] = readable, since_s if at == readable else now_s
                held_s = now_s - self._since[shard][1]
            count = max(0, written - readable)
            self.metrics.show(shard, hidden_records=count, hidden_seconds=held_s)
            self._warn(shard, readable, count, held_s)

    def _warn(self, shard: Shard, readable: int, count: int, held_s: float) -> None:
        if held_s <= WARN_AFTER_S:
            self._warned.discard(shard)
        elif shard not in self._warned:
            self._warned.add(shard)
            logger.warning(
                "%s: an open transaction has hidden %d records (of all callers) from offset %d on "
                "for %.0f s; if it does not end, run kafka-transactions.sh find-hanging --topic %s "
                "--partition %d",
                shard, count, readable, held_s, shard.topic, shard.partition,
            )  # fmt: skip
