"""Periodic work for every open shard of a process, beside its owner."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from threading import Event, Thread

from blackbox.engine.metrics import Metrics
from blackbox.engine.shard_owner import ShardOwner
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import TopicIds
from blackbox.journal.trim import Trimmer
from blackbox.records.clock import Clock
from blackbox.records.errors import ForeignIndex, RecoveryRequired

logger = logging.getLogger("blackbox.core.low_water")

FIRST_WALK_AFTER_S = 60.0
# The first wait is at most this share of the interval: a process that restarts often trims, too.
FIRST_SHARE = 0.1

# The walks of all shards are spread over this share of the interval, to keep the load low. They may take longer
# (LONGEST_WALK), and must end within the interval.
WALKED_SHARE = 0.5

# Requests that callers write to a recreated topic within this time may be delivered twice.
BINDINGS_CHECKED_EVERY_S = 1.0


@dataclass(eq=False, repr=False)
class Caretaker:
    """Walks over each open shard, lets its owner write the low-water mark, and trims the journals."""

    access: KafkaAccess
    metrics: Metrics
    clock: Clock
    owners: Callable[[], Sequence[ShardOwner]]
    _: KW_ONLY
    interval_s: float
    retention_s: float

    def __post_init__(self) -> None:
        self._trimmer = Trimmer(self.access, int(self.retention_s * 1000))
        self._ids = TopicIds(self.access)
        self._stopping = Event()

    def start(self) -> None:
        # The topic ids are checked in a thread of their own, because a walk takes minutes.
        for work in (self._run, self._watch_bindings):
            Thread(target=work, name="caretaker", daemon=True).start()

    def stop(self) -> None:
        """End soon; a walk in progress is abandoned."""
        self._stopping.set()

    def _run(self) -> None:
        wait_s = min(FIRST_WALK_AFTER_S, self.interval_s * FIRST_SHARE)
        while not self._stopping.wait(wait_s):
            began = time.monotonic()
            owners = self.owners()
            # In random order: a process that is killed early begins with another shard next time.
            for owner in random.sample(owners, len(owners)):
                if self._stopping.is_set():
                    return
                self._move_low_water(owner)
            wait_s = max(1.0, began + self.interval_s - time.monotonic())

    def _watch_bindings(self) -> None:
        while not self._stopping.wait(BINDINGS_CHECKED_EVERY_S):
            try:
                self._check_bindings()
            except Exception:
                logger.exception("reading topic ids failed; retrying later")

    def _check_bindings(self) -> None:
        """Let each shard recover whose topic was created again."""
        # Offsets alone do not show it: the new topic may grow past the position before it is read.
        bound = [(owner, owner.binding) for owner in self.owners()]
        topics = sorted({owner.shard.topic for owner, binding in bound if binding is not None})
        current_ids = self._ids.of(topics)
        for owner, binding in bound:
            topic_id = current_ids.get(owner.shard.topic)
            # None: the topic is missing, or the brokers do not answer; neither says that it is new.
            if binding is not None and topic_id not in (None, binding.topic_id):
                owner.recover(ForeignIndex(f"{owner.shard}: its topic was created again"))

    def _move_low_water(self, owner: ShardOwner) -> None:
        # Read before the walk: it takes minutes, and the topic may be created again in that time.
        binding = owner.binding
        walk_s = self.interval_s * WALKED_SHARE / max(1, len(self.owners()))
        try:
            mark = owner.find_low_water(walk_s, self._stopping)
            if mark is None or binding is None or self._stopping.is_set():
                return
            now_ms = self.clock.earliest_ms()
            with closing(ShardJournal(owner.shard, self.access)) as journal:
                # DeleteRecords names a topic, not its id: records of a new one must not be removed.
                if journal.binding(binding.group) != binding:
                    owner.recover(ForeignIndex(f"{owner.shard}: its topic was created again"))
                    return
                written_ms = journal.written_ms(mark.requests)
            self.metrics.low_water(owner.shard, mark, now_ms if written_ms is None else written_ms)
            self._trimmer.trim(owner.shard, mark, now_ms)
        except RecoveryRequired as reason:
            logger.info("%s: found no new low-water mark: %s", owner.shard, reason)
        except Exception:
            logger.exception(
                "%s: looking for the low-water mark failed; retrying later", owner.shard
            )
