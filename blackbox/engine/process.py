"""The process engine: intake and dispatch of all shards in one process, polled by a scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread

from blackbox.config.settings import Settings
from blackbox.config.wiring import formats, kafka, own_topics
from blackbox.core.parsing import Parsed, parse_batch
from blackbox.engine import hidden_records
from blackbox.engine.metrics import Metrics
from blackbox.engine.oscillator import Oscillator
from blackbox.engine.promoter import PromotionJob
from blackbox.engine.redis_monitor import RedisMonitor
from blackbox.engine.shard_pool import ShardPool
from blackbox.engine.steady_scheduler import SteadyScheduler
from blackbox.journal import unowned_partitions
from blackbox.journal.membership import Membership
from blackbox.journal.own_topics import GROW_RECEIPTS_EVERY_S
from blackbox.journal.request_reader import RequestReader
from blackbox.records.clock import Clock
from blackbox.records.errors import IndexFull, RecoveryRequired
from blackbox.records.request import Shard
from blackbox.support import interpreter

logger = logging.getLogger("blackbox.engine.process")

INTAKE_RECORDS = 4000
GATHER_S = 0.005
STOP_S = 3.0
PAUSE_S = 0.2


class ProcessEngine:
    """Takes in and dispatches the shards that the consumer group gives to this process."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = Clock()
        self._kafka = kafka(settings)
        self._topics = own_topics(settings, self._kafka)
        self._formats = formats(settings)
        self._reader = RequestReader(self._kafka, most_records=INTAKE_RECORDS, gather_s=GATHER_S)
        self._monitor = RedisMonitor(
            settings, metrics, self._clock, pause=self._reader.pause, resume=self._reader.resume
        )
        self._membership = Membership(
            self._kafka,
            list(settings.topics),
            settings.instance_id,
            # Lambdas, because the pool is created later: it needs the membership's `confirm`.
            gained=lambda shard: self._pool.gain(shard),
            lost=lambda shards: self._pool.lose(shards),
        )
        self._pool = ShardPool(
            settings,
            self._kafka,
            metrics,
            self._clock,
            confirm=self._membership.confirm,
            opened=self._reader.start,
            closed=self._reader.stop,
        )
        self._promotion = PromotionJob(
            settings, self._kafka, metrics, self._clock, shards=self._pool.open_shards
        )
        self._hidden = hidden_records.HiddenRecords(self._kafka, metrics, self._membership.owned)
        self._oscillator = Oscillator(
            settings, self._kafka, metrics, self._clock, shards=self._membership.owned
        )
        self._stopping = Event()
        self._intake = Thread(target=self._take_in, name="intake", daemon=True)
        self._scheduler = SteadyScheduler()

    def start(self) -> None:
        """Create missing topics, and join the group; raises RecoveryRequired if Kafka or Redis does not answer."""
        self._monitor.observe_clock()
        self._topics.ensure()
        self._promotion.add_to(self._scheduler)
        for name, work, every_s in (
            ("poll", self._pool.poll, self._settings.poll_interval_ms / 1000),
            ("watch", self._check_every_second, 1),
            ("hidden", self._hidden.check, hidden_records.CHECKED_EVERY_S),
            ("grow", self._grow_receipts, GROW_RECEIPTS_EVERY_S),
            ("unowned", self._membership.look_for_unowned, unowned_partitions.LOOK_S),
            ("memory", interpreter.give_memory_back, interpreter.GIVEN_BACK_EVERY_S),
        ):
            self._scheduler.add_job(work, "interval", seconds=every_s, id=name)
        self._scheduler.start()
        self._intake.start()
        self._membership.start()
        self._oscillator.start()

    def stop(self) -> None:
        """Finish the ticks in flight, give every shard up, leave the group."""
        self._stopping.set()
        self._promotion.stop()
        self._oscillator.stop()
        self._scheduler.shutdown(wait=False)
        self._intake.join(STOP_S)
        self._pool.close()
        # Gives the shards up before it leaves the group, which only then gives them to others.
        self._membership.close()
        # After the membership: giving up a shard still calls the reader.
        self._reader.close()
        self._oscillator.join()

    def is_live(self) -> bool:
        """Whether the thread that reads requests runs; an outage of Kafka or Redis does not make it dead."""
        # A restart would bring back neither of them, and would interrupt a rebuild.
        return not self._scheduler.running or self._intake.is_alive()

    def is_ready(self) -> bool:
        """Whether every shard that the group gave to this process is open."""
        return self._membership.has_joined and not self.not_open()

    def stuck(self) -> list[Shard]:
        """The shards without progress for about a minute, see `ShardOwner.is_stuck`."""
        return self._pool.stuck()

    def not_open(self) -> list[Shard]:
        """The shards that the group gave to this process and are not open."""
        return sorted(self._membership.owned() - self._pool.open_shards())

    def why_not_open(self) -> dict[Shard, str]:
        """Why the last try failed, for each shard that could not be opened."""
        return self._pool.why_not_open()

    def _take_in(self) -> None:
        parsed: dict[Shard, Parsed] = {}

        # Called while Redis executes a batch, so that the next one is parsed in the same time.
        def read_ahead() -> None:
            if not parsed:
                parsed.update(self._read(wait=False))

        while not self._stopping.is_set():
            # A copy, because `read_ahead` fills `parsed` again while these are stored.
            batches = dict(parsed) or self._read(wait=True)
            parsed.clear()
            for shard, batch in batches.items():
                self._take(shard, batch, read_ahead)

    def _read(self, *, wait: bool) -> dict[Shard, Parsed]:
        try:
            batches, lost = self._reader.read(wait=wait)
            for failure in lost:
                self._pool.recover(failure.shard, failure)
            # Caps callers' timestamps: by a clock that is behind, requests would become early.
            latest_ms = self._clock.latest_ms()
            admission = self._pool.admission
            return {
                shard: parse_batch(
                    self._formats[shard.topic],
                    batch,
                    latest_ms,
                    self._settings.horizon_ms_of(shard.topic),
                    None if admission is None else admission.rulings(),
                )
                for shard, batch in batches.items()
            }
        except RecoveryRequired as reason:
            logger.warning("%s; retrying", reason)
        except Exception as reason:
            logger.exception("reading requests failed unexpectedly; recovering every shard")
            # The reader is past these records: each shard reads them again from its position.
            for owner in self._pool.all():
                owner.recover(reason)
        self._stopping.wait(PAUSE_S)
        return {}

    def _take(self, shard: Shard, batch: Parsed, while_busy: Callable[[], None]) -> None:
        owner = self._pool.get(shard)
        if owner is None:
            return
        try:
            owner.take(batch, while_busy)
        except IndexFull as full:
            self._monitor.pause_intake(f"{full}; requests wait in Kafka until it has room")
            if owner.is_open:  # and unless the shard has just been lost
                owner.opened(owner, batch.start)
        except Exception as reason:
            logger.exception("%s: intake failed unexpectedly; recovering", shard)
            self._pool.recover(shard, reason)

    def _grow_receipts(self) -> None:
        self._topics.grow_receipts(self._membership.owned())

    def _check_every_second(self) -> None:
        self._monitor.check()
        # For lag monitors. A recovery without an index learns from it whether receipts are missing.
        self._membership.commit_later(
            {
                owner.shard: positions.requests
                for owner in self._pool.all()
                if (positions := owner.positions) is not None
            }
        )
