"""The Spark engine: one driver, which runs the verbs on Spark for the shards that the group gave it."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from threading import Event, Lock

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from blackbox.config.settings import Half, Settings
from blackbox.config.wiring import kafka, own_topics
from blackbox.engine import hidden_records
from blackbox.engine.metrics import OF_DRIVER, Metrics
from blackbox.engine.oscillator import Oscillator
from blackbox.engine.promoter import PromotionJob
from blackbox.engine.redis_monitor import RedisMonitor
from blackbox.engine.spark.dispatch_windows import DispatchWindows
from blackbox.engine.spark.intake_stream import IntakeStream
from blackbox.engine.spark.spark_watch import EngineFailed, spark_watch
from blackbox.engine.steady_scheduler import SteadyScheduler
from blackbox.index.inspector import Inspector
from blackbox.journal import unowned_partitions
from blackbox.journal.membership import Membership
from blackbox.journal.own_topics import GROW_RECEIPTS_EVERY_S
from blackbox.records.clock import Clock
from blackbox.records.errors import RecoveryRequired
from blackbox.records.request import Shard
from blackbox.spark.spark_session import start_session

logger = logging.getLogger("blackbox.spark")

# For dispatch, then for intake: a stop takes less than five seconds (docs/guarantees.md).
STOP_S = 2.5
# How long others may keep the shards: a driver that cannot read may still be able to deliver.
WARM_UP_S = 120.0


@dataclass(eq=False, repr=False)
class SparkEngine:
    """Takes in and dispatches, on Spark, the shards that the consumer group gives to this driver.

    With `only`, it does one half, and another application does the other. `failed` is called when
    the engine cannot go on.
    """

    settings: Settings
    metrics: Metrics
    _: KW_ONLY
    only: Half | None
    failed: Callable[[Exception], None]

    def __post_init__(self) -> None:
        settings, metrics = self.settings, self.metrics
        # Names this application: notes and caches of workers of an earlier one are ignored.
        self._run = uuid.uuid4().hex[:12]
        self._clock = Clock()
        self._kafka = kafka(settings)
        self._topics = own_topics(settings, self._kafka)
        self._inspector = Inspector.of(settings.redis_url.get_secret_value())
        self._has_room = Event()
        self._has_room.set()
        self._monitor = RedisMonitor(
            settings, metrics, self._clock, pause=self._has_room.clear, resume=self._has_room.set
        )
        self._shards: set[Shard] = set()
        self._lock = Lock()
        self._session: SparkSession | None = None
        self._windows: DispatchWindows | None = None
        self._stream: IntakeStream | None = None
        self._slots = 0
        self._is_stopping = False
        self._join_by_s = 0.0
        # Each half needs every shard: in one group, each would get a part of them.
        group = f"{settings.group_id}.intake" if self.only == "intake" else settings.group_id
        self._membership = Membership(
            self._kafka.in_group(group),
            list(settings.topics),
            settings.instance_id,
            gained=self._gained,
            lost=self._lost,
        )
        self._promotion = PromotionJob(
            settings, self._kafka, metrics, self._clock, shards=self._membership.owned
        )
        self._hidden = hidden_records.HiddenRecords(self._kafka, metrics, self._membership.owned)
        self._oscillator = Oscillator(
            settings, self._kafka, metrics, self._clock, shards=self._membership.owned
        )
        self._scheduler = SteadyScheduler()

    def start(self) -> None:
        """Create missing topics, start Spark, join the group; raises RecoveryRequired if a server does not answer.

        It joins only when Spark has an executor. If others have the shards, it joins only when its queries are
        warm, or two minutes later.
        """
        settings = self.settings
        self._monitor.observe_clock()
        self._topics.ensure()
        began = time.monotonic()
        self._session = start_session(settings.spark_master, settings.spark_settings())
        logger.info(
            "Spark %s on %s after %.1f s",
            self._session.version, self._session.sparkContext.master, time.monotonic() - began,
        )  # fmt: skip
        self._watch = spark_watch(self._session, settings, self.only)
        self._slots = self._count_slots()
        if not self._slots:
            logger.info("waiting for an executor of Spark; until then, no shard is taken")
        if self.only != "intake":
            self._windows = DispatchWindows(
                self._session, settings, self._kafka, self.metrics, self._run
            )
            self._windows.start(self._groups())
            self._promotion.add_to(self._scheduler)
        if self.only != "dispatch":
            self._stream = IntakeStream(
                self._session, settings, self._kafka, self.metrics, self._run,
                has_room=self._has_room, tasks=lambda: slots_for("intake", self._slots, self.only),
                pause_intake=self._monitor.pause_intake,
            )  # fmt: skip
            self._stream.start()
        for name, work, every_s in (
            ("renew", self._renew, 1),
            ("slots", self._look_at_slots, 1),
            ("watch", self._check_every_second, 1),
            ("hidden", self._hidden.check, hidden_records.CHECKED_EVERY_S),
            ("grow", self._grow_receipts, GROW_RECEIPTS_EVERY_S),
            ("unowned", self._membership.look_for_unowned, unowned_partitions.LOOK_S),
        ):
            self._scheduler.add_job(work, "interval", seconds=every_s, id=name)
        self._join_by_s = time.monotonic() + WARM_UP_S
        self._scheduler.add_job(
            self._join, "interval", seconds=1, id="join", next_run_time=datetime.now(tz=UTC)
        )
        self._scheduler.start()
        if self.only != "intake":
            self._oscillator.start()

    def _join(self) -> None:
        """Join the group; not yet without an executor, or if others have the shards while this driver is cold."""
        if not self._slots:
            self._join_by_s = time.monotonic() + WARM_UP_S
            return
        stream = self._stream
        may_wait = time.monotonic() < self._join_by_s
        if stream and not stream.is_warm and may_wait and self._membership.has_others():
            return
        if not self._is_stopping:
            self._membership.start()
        self._scheduler.remove_job("join")

    def stop(self) -> None:
        """Finish the ticks and the batch in flight, leave the group, end Spark."""
        self._is_stopping = True
        self._promotion.stop()
        self._oscillator.stop()
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
        if self._stream is not None:
            self._stream.stop(0)
        if self._windows is not None:
            self._windows.stop(STOP_S)
        if self._stream is not None and not self._stream.stop(STOP_S):
            logger.warning(
                "the intake batch takes too long; abandoning it, its records are read again"
            )
        self._membership.close()
        if self._session is not None:
            with suppress(Py4JError, OSError):  # its JVM may have ended
                self._session.stop()
        self._oscillator.join()

    def is_live(self) -> bool:
        """Always true: a driver that cannot go on ends by itself, see `SparkWatch`."""
        return True

    def is_ready(self) -> bool:
        """Whether every shard that the group gave to this driver is open and being read."""
        return self._membership.has_joined and not self.not_open()

    def stuck(self) -> list[Shard]:
        """The shards without progress, or without a report, for about a minute; see `DispatchWindows.stuck`."""
        return sorted(self._windows.stuck()) if self._windows is not None else []

    def not_open(self) -> list[Shard]:
        """The shards of this driver that no task has open, or that are not being read."""
        owned = self._membership.owned()
        missing: set[Shard] = set()
        if self._windows is not None:
            missing |= owned - self._windows.open_shards()
        if self._stream is not None:
            missing |= owned - self._stream.reading()
        return sorted(missing)

    def why_not_open(self) -> dict[Shard, str]:
        """The last reason for each shard that could not be opened, or is not read."""
        unread = self._stream.why_not_read() if self._stream is not None else {}
        return unread | (self._windows.why_not_open() if self._windows is not None else {})

    def _gained(self, shard: Shard) -> None:
        with self._lock:
            self._shards.add(shard)
            self._assign()

    def _lost(self, shards: Sequence[Shard]) -> None:
        with self._lock:
            self._shards.difference_update(shards)
            self._assign()
        for shard in shards:
            self.metrics.given_up(shard, OF_DRIVER)
        # The group gives the shards to another member when this returns.
        if self._windows is not None and not self._windows.wait_given_up(shards, STOP_S):
            logger.warning("some shards are still busy; the next owner will fence them")

    def _assign(self) -> None:
        if self._windows is not None:
            self._windows.assign(self._shards, self._groups())
        if self._stream is not None:
            self._stream.assign(self._shards)

    def _groups(self) -> int:
        return slots_for("dispatch", self._slots, self.only)

    def _grow_receipts(self) -> None:
        self._topics.grow_receipts(self._membership.owned())

    def _renew(self) -> None:
        """Renew the lease of dispatch, and look whether Spark still runs its windows; calls no JVM, which may hang."""
        # While Redis is away, no window can be heard.
        can_hear = self._windows is not None and self._windows.renew()
        unheard = self._windows.unheard() if self._windows is not None and can_hear else ()
        try:
            self._watch.look(unheard, has_work=self._stream is None or self._stream.is_in_batch)
        except EngineFailed as reason:
            self._fail(reason)

    def _fail(self, reason: EngineFailed) -> None:
        if not self._is_stopping:
            self.failed(reason)

    def _look_at_slots(self) -> None:
        """A job of its own: a slow Redis must not look like a JVM that does not answer."""
        try:
            slots = self._count_slots()
        except EngineFailed as reason:
            self._fail(reason)
            return
        self._watch.answered(slots)
        if slots != self._slots:
            logger.info("Spark has %d slots now, %d before", slots, self._slots)
            with self._lock:
                self._slots = slots
                self._assign()

    def _check_every_second(self) -> None:
        self._monitor.check()
        self._note_positions()

    def _note_positions(self) -> None:
        try:
            positions = {
                shard: self._inspector.positions(shard) for shard in self._membership.owned()
            }
        except RecoveryRequired:  # the task that opens or reads the shard reports it
            return
        self._membership.commit_later(
            {shard: found.requests for shard, found in positions.items() if found is not None}
        )

    def _count_slots(self) -> int:
        assert self._session is not None
        try:
            context = self._session.sparkContext._jsc.sc()
            # The master may have ended the application while the JVM still runs.
            if context.isStopped():
                raise EngineFailed(
                    f"Spark's master {self.settings.spark_master} ended this application"
                )
            # Not defaultParallelism: an operator may set that, and a task may need several cores.
            profile = context.resourceProfileManager().defaultResourceProfile()
            return int(context.maxNumConcurrentTasks(profile))
        except (Py4JError, OSError, AttributeError) as error:
            raise EngineFailed(f"Spark's JVM is gone: {error}") from error


def slots_for(half: Half, slots: int, only: Half | None) -> int:
    """How many of Spark's slots one half of the work gets: half of them, or all if it runs alone."""
    # None until the first executor has registered: one for each half then waits for it.
    if only is not None:
        return max(1, slots) if half == only else 0
    slots = max(2, slots)
    return slots // 2 if half == "dispatch" else slots - slots // 2
