"""The process engine: every shard this process owns, in one process, with a clock that polls them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event, Lock, Thread

from apscheduler.schedulers.background import BackgroundScheduler

from blackbox import interpreter
from blackbox.clock import Clock
from blackbox.connect import kafka
from blackbox.dispatch import Dispatch
from blackbox.doubt import Doubt, IndexFull
from blackbox.formats import make_format
from blackbox.index.connection import pool
from blackbox.index.server import RedisServer
from blackbox.index.shard_index import ShardIndex
from blackbox.intake import Intake, Parsed, parse
from blackbox.journal.membership import Membership
from blackbox.journal.reader import RequestReader
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.targets import Targets
from blackbox.journal.topics import Topics, is_own_topic
from blackbox.journal.writer import Writer
from blackbox.metrics import Metrics
from blackbox.owner import Hold, Owner
from blackbox.recovery import Recovery
from blackbox.request import Shard
from blackbox.settings import Settings

logger = logging.getLogger("blackbox.service")

INTAKE_RECORDS = 4000
GATHER_S = 0.005
PAUSE_AT = 0.85
RESUME_AT = 0.75
STOP_S = 4.0
MAX_SKEW_MS = 1000
PAUSE_S = 0.2
STUCK_S = 60.0


class Service:
    """Takes in and dispatches the shards that the consumer group gives to this process."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = Clock()
        self._kafka = kafka(settings)
        self._redis_url = settings.redis_url.get_secret_value()
        self._connections = pool(self._redis_url)
        self._redis = RedisServer(self._redis_url)
        self._topics = Topics(self._kafka.admin())
        self._targets = Targets(self._kafka.admin())
        self._formats = {
            topic: make_format(
                contract,
                max_countdown_s=settings.max_countdown_s,
                own_topics=partial(
                    is_own_topic,
                    request_topics=list(settings.topics),
                    dead_letter_topic=settings.dead_letter_topic,
                ),
            )
            for topic, contract in settings.topics.items()
        }
        self._reader = RequestReader(self._kafka, most_records=INTAKE_RECORDS, gather_s=GATHER_S)
        self._membership = Membership(
            self._kafka, list(settings.topics), gained=self._gained, lost=self._lost
        )
        self._owners: dict[Shard, Owner] = {}
        self._lock = Lock()
        self._stopping = Event()
        self._full = False
        self._is_apart = False
        self._intake = Thread(target=self._take_in, name="intake", daemon=True)
        self._scheduler = BackgroundScheduler(
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None}
        )

    def start(self) -> None:
        """Create what is missing of ours, then join the group. Raises a Doubt when Kafka or Redis is away."""
        settings = self._settings
        interpreter.tune()
        self._clock.observe(self._redis.now_ms())
        self._topics.ensure(
            list(settings.topics), settings.dead_letter_topic, retention_ms=settings.retention_ms
        )
        self._scheduler.add_job(
            self._poll, "interval", seconds=settings.poll_interval_ms / 1000, id="poll"
        )
        self._scheduler.add_job(self._watch, "interval", seconds=1, id="watch")
        self._scheduler.add_job(self._grow_receipts, "interval", seconds=10, id="grow")
        self._scheduler.start()
        self._intake.start()
        self._membership.start()

    def stop(self) -> None:
        """Finish the ticks in flight, give every shard up, leave the group. Usually well under 4 s."""
        self._stopping.set()
        self._scheduler.shutdown(wait=False)
        self._intake.join(STOP_S)
        self._membership.close()
        self._reader.close()

    def is_live(self) -> bool:
        """Something due was delivered within the last minute, or nothing was due."""
        return not any(owner.is_stuck for owner in self._owned())

    def is_ready(self) -> bool:
        """Every shard the group gave to this process is open."""
        owned = self._membership.owned()
        return {owner.shard for owner in self._owned() if owner.is_open} >= owned and bool(
            self._membership.has_joined
        )

    def stuck(self) -> list[Shard]:
        """The shards where something has been due for a minute and nothing was delivered."""
        return sorted(owner.shard for owner in self._owned() if owner.is_stuck)

    def not_open(self) -> list[Shard]:
        """The shards that the group gave to this process and that are not open."""
        is_open = {owner.shard for owner in self._owned() if owner.is_open}
        return sorted(self._membership.owned() - is_open)

    def _owned(self) -> list[Owner]:
        with self._lock:
            return list(self._owners.values())

    def _gained(self, shard: Shard) -> None:
        owner = Owner(
            shard,
            self._take_hold,
            clock=self._clock,
            metrics=self._metrics,
            wake_up=self._settings.wake_up,
            stuck_after_s=STUCK_S + self._settings.poll_interval_ms / 1000,
            opened=self._opened,
            doubted=self._doubted,
            ended=self._ended,
        )
        with self._lock:
            self._owners[shard] = owner
        owner.start()

    def _lost(self, shards: Sequence[Shard]) -> None:
        with self._lock:
            owners = [self._owners.pop(shard) for shard in shards if shard in self._owners]
        for owner in owners:
            self._reader.stop(owner.shard)
            owner.stop()
        deadline = time.monotonic() + STOP_S
        for owner in owners:
            if not owner.join(max(0.0, deadline - time.monotonic())):
                logger.warning("%s: still busy; its next owner will fence it", owner.shard)

    def _opened(self, owner: Owner, offset: int) -> None:
        with self._lock:
            if self._owners.get(owner.shard) is owner:
                self._metrics.opened(owner.shard, True)
                self._reader.start(owner.shard, offset)

    def _doubted(self, owner: Owner) -> None:
        with self._lock:
            if self._owners.get(owner.shard) is owner:
                self._metrics.opened(owner.shard, False)
                self._reader.stop(owner.shard)

    def _ended(self, owner: Owner) -> None:
        with self._lock:
            if owner.shard not in self._owners:
                self._metrics.given_up(owner.shard)

    def _take_hold(self, owner: Owner) -> Hold:
        settings, shard = self._settings, owner.shard
        writer = Writer(shard, self._kafka, exactly_once=settings.delivery == "exactly-once")
        journal = ShardJournal(shard, self._kafka)
        index = ShardIndex(shard, self._connections, grace_s=settings.grace_s)
        intake = Intake(self._formats[shard.topic], index)

        def confirm() -> None:
            labels = index.load()
            self._membership.confirm(shard, labels.requests if labels is not None else 0)

        recovery = Recovery(
            shard=shard,
            index=index,
            journal=journal,
            writer=writer,
            confirm=confirm,
            apply=owner.apply_while_opening,
            now_ms=self._clock.earliest_ms,
        )
        dispatch = Dispatch(
            shard=shard,
            index=index,
            writer=writer,
            targets=self._targets,
            journal=journal,
            reread=intake.reread,
            dead_letter_topic=settings.dead_letter_topic,
            batch_limit=settings.batch_limit,
            retries=settings.retries,
        )
        return Hold(index, intake, dispatch, recovery, journal, closing=(index, writer, journal))

    def _take_in(self) -> None:
        """Store what was read; while Redis is busy with it, read and parse what comes next."""
        ahead: dict[Shard, Parsed] = {}

        def read_ahead() -> None:
            if not ahead:
                ahead.update(self._read(wait=False))

        while not self._stopping.is_set():
            batches = dict(ahead) or self._read(wait=True)
            ahead.clear()
            for shard, batch in batches.items():
                self._take(shard, batch, read_ahead)

    def _read(self, *, wait: bool) -> dict[Shard, Parsed]:
        try:
            batches, lost = self._reader.read(wait=wait)
            for failure in lost:
                self._doubt(failure.shard, failure)
            latest_ms = self._clock.latest_ms()
            return {
                shard: parse(self._formats[shard.topic], batch, latest_ms)
                for shard, batch in batches.items()
            }
        except Doubt as reason:
            logger.warning("%s; trying again", reason)
        except Exception as reason:
            logger.exception("reading requests failed unexpectedly; every shard recovers")
            for owner in self._owned():
                owner.doubt(reason)
        self._stopping.wait(PAUSE_S)
        return {}

    def _take(self, shard: Shard, batch: Parsed, meanwhile: Callable[[], None]) -> None:
        with self._lock:
            owner = self._owners.get(shard)
        try:
            if owner is not None:
                owner.take(batch, meanwhile)
        except IndexFull as full:
            self._pause(f"{full}; requests wait in Kafka until it has")
            self._reader.start(shard, batch.start)
        except Exception as reason:
            logger.exception("%s: intake failed unexpectedly; recovering", shard)
            self._doubt(shard, reason)

    def _doubt(self, shard: Shard, reason: Exception) -> None:
        with self._lock:
            owner = self._owners.get(shard)
        if owner is not None:
            owner.doubt(reason)

    def _poll(self) -> None:
        for owner in self._owned():
            owner.poll()

    def _watch(self) -> None:
        """Once a second: Redis' clock and memory, and the positions for lag monitors."""
        try:
            self._clock.observe(self._redis.now_ms())
            used = self._redis.memory_used()
        except Doubt as reason:
            logger.warning("%s", reason)
            return
        skew_ms = self._clock.skew_ms()
        self._metrics.skew.set(skew_ms / 1000)
        was_apart, self._is_apart = self._is_apart, abs(skew_ms) > MAX_SKEW_MS
        if self._is_apart and not was_apart:
            logger.error(
                "Redis' clock and this host's are %d ms apart: deliveries are late by that; "
                "synchronise both with NTP", skew_ms,
            )  # fmt: skip
        if used >= PAUSE_AT:
            self._pause(f"Redis has used {used:.0%} of maxmemory; requests wait in Kafka")
        elif used <= RESUME_AT and self._full:
            self._full = False
            self._metrics.paused.set(0)
            self._reader.resume()
            logger.info("Redis has room again; reading requests")
        self._membership.note(
            {o.shard: labels.requests for o in self._owned() if (labels := o.labels) is not None}
        )

    def _pause(self, why: str) -> None:
        if not self._full:
            self._full = True
            self._metrics.paused.set(1)
            self._reader.pause()
            logger.warning("%s", why)

    def _grow_receipts(self) -> None:
        try:
            self._topics.grow_receipts(
                list(self._settings.topics), retention_ms=self._settings.retention_ms
            )
        except Doubt as reason:
            logger.warning("%s; trying again in 10 s", reason)
