"""All shards that one process owns, for either engine."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from threading import Lock

from blackbox.config.settings import Settings
from blackbox.config.wiring import admission, formats, target_rates
from blackbox.core.batch_limit import BatchLimit
from blackbox.core.dispatch import Dispatch
from blackbox.core.follow_ups import FollowUps
from blackbox.core.intake import Intake
from blackbox.core.lost_payload import reread
from blackbox.core.low_water import LowWater
from blackbox.core.recovery import Recovery
from blackbox.core.triage import Triage
from blackbox.engine.caretaker import Caretaker
from blackbox.engine.linger import Linger
from blackbox.engine.metrics import Metrics
from blackbox.engine.shard_owner import ShardOwner
from blackbox.engine.shard_session import ShardSession
from blackbox.formats import FORMATS
from blackbox.index.connection import pool
from blackbox.index.redis_servers import RedisRoom, RedisServers
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.shard_writer import ShardWriter
from blackbox.journal.target_topics import TargetTopics
from blackbox.records.clock import Clock, ShardClock
from blackbox.records.entry import Entry
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.engine.shard_pool")

# A stop takes less than five seconds in all (docs/guarantees.md).
STOP_S = 3.0
STUCK_S = 60.0


@dataclass(eq=False, repr=False)
class ShardPool:
    """A ShardOwner for each shard, from `gain` to `lose`.

    `confirm(shard, position)` raises RecoveryRequired unless this process still owns the shard.
    `opened(shard, position)` and `closed(shard)` report from where on, and until when, its requests
    are to be read. `lasts_s`: how long a shard is owned at most.
    """

    settings: Settings
    access: KafkaAccess
    metrics: Metrics
    clock: Clock
    _: KW_ONLY
    confirm: Callable[[Shard, int], None]
    lasts_s: float = math.inf
    opened: Callable[[Shard, int], None] = lambda shard, position: None
    closed: Callable[[Shard], None] = lambda shard: None

    def __post_init__(self) -> None:
        settings = self.settings
        self._connections = pool(settings.redis_url.get_secret_value())
        self._targets = TargetTopics(self.access)
        self._formats = formats(settings)
        self.admission = admission(settings, self.access)
        self._rates = target_rates(settings)
        # a poll interval says how long the index is not looked at, at most
        self._linger = Linger(min(settings.linger_ms, settings.poll_interval_ms) / 1000)
        self._owners: dict[Shard, ShardOwner] = {}
        self._lock = Lock()
        self._has_room = RedisRoom(RedisServers(settings.redis_url.get_secret_value()))
        self._caretaker = Caretaker(
            self.access, self.metrics, self.clock, self.all,
            # A Spark window may be shorter than the interval, and must walk over each shard, too.
            interval_s=min(settings.trim_interval_s, self.lasts_s), retention_s=settings.retention_s,
        )  # fmt: skip
        self._caretaker.start()

    def gain(self, shard: Shard) -> None:
        owner = ShardOwner(
            shard,
            self._open_session,
            clock=self.clock,
            metrics=self.metrics,
            wake_up=self.settings.wake_up,
            linger=self._linger,
            batch_limit=BatchLimit(self.settings.batch_limit),
            # An idle shard ticks only once per poll interval.
            stuck_after_s=STUCK_S + self.settings.poll_interval_ms / 1000,
            opened=self._opened,
            closed=self._closed,
            ended=self._ended,
        )
        with self._lock:
            self._owners[shard] = owner
            self.metrics.gained(shard)
        owner.start()

    def lose(self, shards: Sequence[Shard]) -> None:
        """Give these shards up after the ticks in flight; returns when it is done, after 3 s at most."""
        # Removed first: reports of these owners are ignored from now on. They must not stop the
        # reading of a shard that was gained again.
        with self._lock:
            owners = [self._owners.pop(shard) for shard in shards if shard in self._owners]
        for owner in owners:
            self.closed(owner.shard)
            owner.stop()
        deadline = time.monotonic() + STOP_S
        for owner in owners:
            if not owner.join(max(0.0, deadline - time.monotonic())):
                logger.warning("%s: still busy; the next owner will fence it", owner.shard)

    def close(self) -> None:
        """Stop the caretaker; shards that are owned go on until they are lost."""
        self._caretaker.stop()

    def why_not_open(self) -> dict[Shard, str]:
        """The shards whose opening failed, and why it did the last time."""
        return {owner.shard: why for owner in self.all() if (why := owner.why_not_open)}

    def get(self, shard: Shard) -> ShardOwner | None:
        with self._lock:
            return self._owners.get(shard)

    def all(self) -> list[ShardOwner]:
        with self._lock:
            return list(self._owners.values())

    def recover(self, shard: Shard, reason: Exception) -> None:
        """Let this shard recover, if it is owned here."""
        owner = self.get(shard)
        if owner is not None:
            owner.recover(reason)

    def poll(self) -> None:
        for owner in self.all():
            owner.poll()

    def stuck(self) -> list[Shard]:
        """The shards without progress for about a minute, see `ShardOwner.is_stuck`."""
        return sorted(owner.shard for owner in self.all() if owner.is_stuck)

    def open_shards(self) -> set[Shard]:
        return {owner.shard for owner in self.all() if owner.is_open}

    def _counted(self, ended: Mapping[int, Entry]) -> dict[str, list[int]]:
        """The offsets of ended requests, of any outcome, by the callers whose pending requests are counted."""
        if self.admission is None or not (rules := self.admission.rules()).counted:
            return {}
        found: dict[str, list[int]] = {name: [] for name in rules.counted}
        for offset, entry in ended.items():
            name, _ = rules.of(entry.caller)
            if name in found:
                found[name].append(offset)
        return {name: offsets for name, offsets in found.items() if offsets}

    def _opened(self, owner: ShardOwner, offset: int) -> None:
        # Under the lock, so that a shard that is lost at this moment is not read afterwards.
        with self._lock:
            if self._owners.get(owner.shard) is owner:
                self.metrics.show(owner.shard, shard_open=True)
                self.opened(owner.shard, offset)

    def _closed(self, owner: ShardOwner) -> None:
        with self._lock:
            if self._owners.get(owner.shard) is owner:
                self.metrics.show(owner.shard, shard_open=False)
                self.closed(owner.shard)

    def _ended(self, owner: ShardOwner) -> None:
        with self._lock:
            if owner.shard not in self._owners:
                self.metrics.given_up(owner.shard)

    def _confirm(self, shard: Shard, index: ShardIndex, journal: ShardJournal) -> None:
        kept = index.load()
        known = None if kept is None else kept.positions.requests
        # Not 0 for a lost index: `confirm` commits this offset to the group, and recovery reads
        # the group's offset to see whether receipts are missing.
        self.confirm(shard, journal.committed() if known is None else known)

    def _open_session(self, owner: ShardOwner) -> ShardSession:
        settings, access, shard = self.settings, self.access, owner.shard
        index = ShardIndex(shard, self._connections, grace_s=settings.grace_s)
        clock, once = ShardClock(self.clock), settings.delivery == "exactly-once"
        # A new producer for each opening: librdkafka has no KIP-890, and a producer that is used
        # again after a transactional call timed out can lose or tear a transaction.
        writer = ShardWriter(shard, access, exactly_once=once, on_timestamp=clock.observe_kafka)
        has_id = FORMATS[settings.topics[shard.topic]].may_have_caller_id
        journal = ShardJournal(shard, access, may_have_caller_id=has_id)
        # Single records are looked up here: what is fetched ahead would be thrown away.
        originals = ShardJournal(shard, access, prefetched=1)
        format = self._formats[shard.topic]
        horizon_ms = settings.horizon_ms_of(shard.topic)
        intake = Intake(format, index, horizon_ms, self.admission)
        # Follow-ups must see records of open transactions, too: these may be committed before ours.
        uncommitted = ShardJournal(shard, access, isolation="read_uncommitted")
        closing = (index, writer, journal, originals, uncommitted)
        is_schedule = shard.topic in settings.schedule_topics
        history_topic = settings.history_topic if is_schedule else None
        recovery = Recovery(
            shard=shard,
            group=settings.group_id,
            index=index,
            journal=journal,
            writer=writer,
            confirm=lambda: self._confirm(shard, index, journal),
            apply=owner.apply_while_opening,
            upcoming=lambda batch: intake.upcoming(batch, self.clock.latest_ms()),
            now_ms=self.clock.earliest_ms,
            has_room=self._has_room,
            progress=partial(self.metrics.rebuilding, shard),
        )
        low_water = LowWater(shard, index, writer, self.clock.earliest_ms)
        triage = Triage(
            shard=shard,
            targets=self._targets,
            journal=originals,
            reread=partial(reread, format),
            dead_letter_topic=settings.dead_letter_topic,
            retries=settings.retries,
            follow_ups=FollowUps(shard, format, uncommitted, history_topic),
            rates=self._rates,
        )
        dispatch = Dispatch(
            index, writer, triage, owner.batch_limit, self._counted, clock.is_outdated
        )
        return ShardSession(index, intake, dispatch, recovery, low_water, clock, journal, closing)
