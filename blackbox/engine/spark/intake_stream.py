"""The driver's side of intake: a streaming query from the request topics into the indexes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from threading import Event, Lock, Thread

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from blackbox.config.settings import Settings
from blackbox.engine.metrics import Metrics
from blackbox.engine.spark.checkpoint import Checkpoint
from blackbox.engine.spark.intake_task import IntakeTask
from blackbox.engine.spark.kafka_source import FORMAT, kafka_source, reachable
from blackbox.engine.spark.read_costs import ReadCosts
from blackbox.engine.spark.read_plan import ReadPlan
from blackbox.engine.spark.shard_result import ShardResult
from blackbox.engine.spark.silent_shards import SilentShards
from blackbox.engine.spark.start_positions import StartPositions
from blackbox.engine.spark.unread_shards import UnreadShards
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.readable_bounds import ReadableBounds
from blackbox.records.request import Shard
from blackbox.spark.job_failures import in_one_line
from blackbox.spark.task_io import REPORT, reports

logger = logging.getLogger("blackbox.spark.intake")

BATCH_RECORDS = 500_000

LOOK_S = 0.25  # at the query it is a call of the JVM
CHECK_S = 1.0  # whether shards can still be read

TRIES = 4
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0


@dataclass(eq=False, repr=False)
class IntakeStream:
    """Reads the assigned shards, each from its position in Redis on, until `stop`.

    One query reads them all, and goes on when they change. A shard that has no index yet, or whose index
    is being rebuilt, is read once dispatch has opened it. A shard that cannot be read from Kafka is left
    out, and the others go on; it is begun again at its position. While `has_room` is not set no batch is
    started.
    """

    session: SparkSession
    settings: Settings
    access: KafkaAccess
    metrics: Metrics
    run: str
    _: KW_ONLY
    has_room: Event
    tasks: Callable[[], int]
    pause_intake: Callable[[str], None]

    def __post_init__(self) -> None:
        self._task = IntakeTask(self.run, self.settings, self.access)
        self._wanted: frozenset[Shard] = frozenset()
        self._in_query: frozenset[Shard] = frozenset()
        self._reached: dict[Shard, int] = {}
        silent = SilentShards(self.access)
        self._unread = UnreadShards(silent, self.metrics)
        self._positions = StartPositions(self.settings.redis_url.get_secret_value(), silent)
        self._ends = ReadableBounds(self.access)
        self._stopping = Event()
        self._changed = Event()
        self._has_run = Event()
        self._lock = Lock()  # for what a batch changes as well
        self._in_batch = Lock()
        self._is_ending = False
        self._thread = Thread(target=self._run, name="intake", daemon=True)
        self.session.dataSource.register(kafka_source(self.access))

    def start(self) -> None:
        self._thread.start()

    @property
    def is_warm(self) -> bool:
        """Whether a query has run: the first one takes most of a minute on busy processors."""
        return self._has_run.is_set()

    @property
    def is_in_batch(self) -> bool:
        """Whether a batch is running, or waits for an executor."""
        return self._in_batch.locked()

    def assign(self, shards: Iterable[Shard]) -> None:
        """Read these shards from now on, and no others."""
        self._wanted = frozenset(shards)
        self._changed.set()

    def reading(self) -> frozenset[Shard]:
        return self._in_query - self.why_not_read().keys()

    def why_not_read(self) -> dict[Shard, str]:
        """The reason for each shard that is to be read and cannot be."""
        return self._unread.why()

    def stop(self, timeout_s: float) -> bool:
        """Finish the batch in flight, then end; False when that takes longer."""
        self._stopping.set()
        self._changed.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                with self._query() as (query, read_plan):
                    self._follow(query, read_plan)
            except Exception as failure:
                if self._stopping.is_set():
                    break
                if time.monotonic() - began > LONGEST_PAUSE_S:
                    pause_s = FIRST_PAUSE_S
                logger.warning(
                    "intake failed: %s; retrying in %.1f s", in_one_line(failure), pause_s
                )
                self._stopping.wait(pause_s)
                pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
            finally:
                self._in_query = frozenset()
        self._ends.close()

    def _follow(self, query: StreamingQuery, read_plan: ReadPlan) -> None:
        """Let the query read the shards that are assigned and can be read."""
        checked_s = float("-inf")
        while query.isActive and not self._stopping.is_set():
            self._changed.clear()
            wanted = self._wanted
            read_plan.use(self.tasks())
            self._retain_only(wanted, read_plan)
            if time.monotonic() - checked_s > CHECK_S:
                self._look(wanted, read_plan)
                checked_s = time.monotonic()
            else:
                self._look(wanted - read_plan.shards() - self._unread.unreachable(), read_plan)
            self._unread.show(self._wanted)
            self._changed.wait(LOOK_S)
        failure = query.exception()
        if failure is not None:
            raise failure

    def _retain_only(self, wanted: frozenset[Shard], read_plan: ReadPlan) -> None:
        self._unread.retain_only(wanted)
        with self._lock:
            self._end(read_plan.shards() - wanted, read_plan)

    def _look(self, shards: frozenset[Shard], read_plan: ReadPlan) -> None:
        """Begin those of these shards that can be read, and end those that cannot be read any more."""
        reached = self._reached  # before the positions are asked for
        found = self._positions.of_each(shards)
        positions = {shard: at for shard, at in found.items() if isinstance(at, int)}
        can, cannot = self._reachable(positions)
        self._unread.looked_at(positions.keys(), cannot)
        # Redis was rolled back: the plan is ahead, and would wait for a new record.
        back = {shard for shard, at in positions.items() if at < reached.get(shard, 0)}
        with self._lock:
            self._end(cannot.keys() | back, read_plan)
        starts = self._positions.readable({at: found[at] for at in shards - read_plan.shards()})
        with self._lock:  # a batch may have left some behind since
            begun = (starts.keys() & can) - self._unread.waiting()
            if begun:
                read_plan.begin({shard: starts[shard] for shard in begun})

    def _reachable(
        self, positions: Mapping[Shard, int]
    ) -> tuple[frozenset[Shard], dict[Shard, str]]:
        """Which shards can be read from there on, and why some cannot."""
        starts = {(*shard,): at for shard, at in positions.items()}
        ends, silent = reachable(self._ends, starts) if starts else ({}, {})
        return frozenset(Shard(*at) for at in ends), {Shard(*at): why for at, why in silent.items()}

    def _end(self, shards: Collection[Shard], read_plan: ReadPlan) -> None:
        if shards:
            read_plan.end(shards)
            self._in_query -= frozenset(shards)
            self._reached = {at: to for at, to in self._reached.items() if at not in shards}

    @contextmanager
    def _query(self) -> Iterator[tuple[StreamingQuery, ReadPlan]]:
        """A query, at first without shards."""
        self._is_ending = False
        self.session.sparkContext.setLocalProperty("spark.scheduler.pool", "intake")
        with closing(Checkpoint()) as checkpoint:
            read_plan = ReadPlan(checkpoint.folder / "read-plan.json", self.tasks())
            costs = ReadCosts(checkpoint.folder / "costs.json")
            ranges = (
                self.session.readStream.format(FORMAT)
                .option("maxOffsetsPerTrigger", BATCH_RECORDS)
                .option("read_plan", str(read_plan.path))
                .option("costs", str(costs.path))
                .load()
            )
            query = (
                ranges.mapInArrow(self._task, REPORT)
                .writeStream.foreachBatch(partial(self._run_batch, read_plan, costs))
                .option("checkpointLocation", checkpoint.folder.as_uri())
                # At a trigger of 1 s, the median request would be in Redis after 0.8 s, not 0.33 s.
                .trigger(processingTime="0 seconds")
                .start()
            )
            try:
                yield query, read_plan
            finally:
                self._is_ending = True
                # Waits for the batch in flight, because `query.stop()` kills its tasks.
                with self._in_batch:
                    pass
                query.stop()

    def _run_batch(
        self, read_plan: ReadPlan, costs: ReadCosts, batch: DataFrame, number: int
    ) -> None:
        """Run a batch until every shard has all of it or is left behind."""
        for attempt in range(TRIES):
            # without shards there is nothing to store, and the full Redis needs this process
            while read_plan.shards() and not self.has_room.wait(LOOK_S):
                if self._is_over():
                    return
            if not read_plan.shards() and (attempt > 0 or self.is_warm):
                return  # all were lost by now; those that come back begin at their positions
            with self._in_batch:
                if self._is_over():
                    return
                began = time.monotonic()
                # Each try runs all tasks again: records below the position change nothing.
                done: list[ShardResult] = reports(batch.collect())
                self._record_stored(done, read_plan)
                costs.note(done)
                records = sum(stored.taken.accepted + stored.taken.invalid for stored in done)
                self.metrics.batch(records, time.monotonic() - began)
            if all(stored.problem is None or stored.is_behind for stored in done):
                # It may have been empty, but everything is warm now.
                self._has_run.set()
                self._note_read(frozenset(stored.shard for stored in done), read_plan)
                return
            self._stopping.wait(FIRST_PAUSE_S * 2**attempt)
        raise RuntimeError(f"batch {number} is still incomplete after {TRIES} tries")

    def _is_over(self) -> bool:
        return self._is_ending or self._stopping.is_set()

    def _note_read(self, shards: frozenset[Shard], read_plan: ReadPlan) -> None:
        with self._lock:
            before = self._in_query
            self._in_query = (before | shards) & read_plan.shards()
        if self._in_query != before:
            logger.info("reading %d shards", len(self._in_query))

    def _record_stored(self, done: list[ShardResult], read_plan: ReadPlan) -> None:
        for stored in done:
            shard, problem = stored.shard, stored.problem
            self.metrics.taken(shard, stored.taken)
            if problem is None:
                self._unread.took(shard)
                with self._lock:
                    self._reached = self._reached | {shard: stored.position}
            elif stored.is_silent or stored.is_behind:
                self._unread.leave_out(stored, problem)
                with self._lock:
                    self._end([shard], read_plan)
            elif stored.is_full:
                self.pause_intake(f"{problem}; requests wait in Kafka until it has room")
            else:
                logger.warning("%s: %s; reading it again", shard, problem)
