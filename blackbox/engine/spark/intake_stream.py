"""The driver's side of intake: a streaming query from the request topics into the indexes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass
from threading import Event, Lock, Thread

import orjson
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from blackbox.config.settings import Settings
from blackbox.engine.metrics import Metrics
from blackbox.engine.spark.checkpoint import Checkpoint
from blackbox.engine.spark.intake_task import IntakeTask
from blackbox.engine.spark.kafka_source import FORMAT, RANGES, for_spark, kafka_source, reachable
from blackbox.engine.spark.read_costs import ReadCosts
from blackbox.engine.spark.silent_shards import SilentShards, log_changes
from blackbox.engine.spark.start_positions import StartPositions
from blackbox.engine.spark.stored import Stored
from blackbox.journal.ends import Ends
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.ranges import Range
from blackbox.records.request import Shard
from blackbox.spark.job_failures import in_one_line
from blackbox.spark.task_io import REPORT, reports

logger = logging.getLogger("blackbox.spark.intake")

BATCH_RECORDS = 500_000

LOOK_S, SLOW_LOOK_S = 0.1, 0.5  # at a running query it is a call of the JVM
SETTLE_S = 0.3  # shards come one by one, and a query takes a second to start
# How often the shards that are not read are tried while others are read.
MISSING_S = 1.0
# A shard that was left behind is tried outside the query; with more records, all others would wait.
CAUGHT_UP_RECORDS = 4000

TRIES = 4
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0


@dataclass(eq=False, repr=False)
class IntakeStream:
    """Reads the assigned shards, each from its position in Redis on, until `stop`.

    A shard that has no index yet, or whose index is being rebuilt, is read once dispatch has opened it.
    A shard that cannot be read from Kafka is left behind, and the others go on. A shard for which Kafka
    does not answer is left out of the query (`SilentShards`). While `has_room` is not set no batch is started.
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
        self._assigned: frozenset[Shard] = frozenset()
        self._in_query: frozenset[Shard] = frozenset()
        self._why_behind: dict[Shard, str] = {}
        self._why_silent: dict[Shard, str] = {}
        self._silent = SilentShards(self.access)
        self._positions = StartPositions(self.settings.redis_url.get_secret_value(), self._silent)
        self._ends = Ends(self.access)
        self._stopping = Event()
        self._changed = Event()
        self._has_run = Event()
        self._is_to_warm_up = False
        self._in_batch = Lock()
        self._is_ending = False
        self._thread = Thread(target=self._run, name="intake", daemon=True)
        self.session.dataSource.register(kafka_source(self.access))

    def start(self) -> None:
        self._thread.start()

    def warm_up(self) -> None:
        """Run a query without shards if none is assigned and none has run."""
        self._is_to_warm_up = True

    @property
    def is_warm(self) -> bool:
        """Whether a query has run: the first one takes most of a minute on busy processors."""
        return self._has_run.is_set()

    def assign(self, shards: Iterable[Shard]) -> None:
        """Read these shards from now on, and no others."""
        self._wanted = frozenset(shards)
        self._changed.set()

    def reading(self) -> frozenset[Shard]:
        return self._in_query - self.why_not_read().keys()

    def why_not_read(self) -> dict[Shard, str]:
        """The reason for each shard that is to be read and cannot be."""
        return self._why_silent | self._why_behind | self._silent.why()

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
                self._read_until_changed()
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

    def _read_until_changed(self) -> None:
        while self._changed.is_set():
            self._changed.clear()
            self._changed.wait(SETTLE_S)
        wanted = self._wanted
        self._silent.retain_only(wanted)
        starts = self._positions.of(wanted)
        self._why_behind = {}
        self._show_unread(wanted)
        # Not unasked: a query that is stopped again at once delays the first one with shards by seconds.
        warms_up = self._is_to_warm_up and not self.is_warm and not wanted
        if not starts and not warms_up:
            self._changed.wait(LOOK_S)
            return
        missing = wanted - starts.keys()
        until_s = time.monotonic() + MISSING_S
        with self._query(starts) as query:
            while query.isActive and not self._stopping.is_set() and self._wanted == wanted:
                if warms_up and self.is_warm:
                    break
                if self._silent.why().keys() & starts.keys():
                    break
                # A query has fixed shards and start offsets: any change needs a new query.
                if time.monotonic() > until_s:
                    if self._positions.may_read(missing) or (
                        self._in_query and self._must_go_back()
                    ):
                        break
                    until_s = time.monotonic() + MISSING_S
                self._changed.wait(SLOW_LOOK_S)
            failure = query.exception()
            if failure is not None:
                raise failure

    def _must_go_back(self) -> bool:
        """Whether a shard that was left behind can be read again, and has more records than were tried."""
        positions = {shard: self._positions.one(shard) for shard in self._in_query}
        starts = {(t, p): at for (t, p), at in positions.items() if isinstance(at, int)}
        ends, silent = reachable(self._ends, starts)
        before, self._why_silent = self._why_silent, {Shard(*at): w for at, w in silent.items()}
        log_changes(before, self._why_silent)
        self._show_unread(self._in_query)
        tried = [
            Range(*at, start, min(ends[at], start + CAUGHT_UP_RECORDS))
            for at, start in starts.items()
            if at in ends and Shard(*at) in self._why_behind
        ]
        if not tried:
            return False
        # Not beside a batch: the `WATCH` of one would make the other fail.
        with self._in_batch:
            rows = self.session.createDataFrame(tried, RANGES)
            self._record_stored(reports(rows.mapInArrow(self._task, REPORT).collect()))
        return any(
            Shard(one.topic, one.partition) not in self._why_behind
            and one.end < ends[one.topic, one.partition]
            for one in tried
        )

    def _show_unread(self, shards: Iterable[Shard]) -> None:
        why_not = self.why_not_read()
        for shard in shards:
            self.metrics.show(shard, shard_unread=shard in why_not)

    @contextmanager
    def _query(self, starts: Mapping[Shard, int]) -> Iterator[StreamingQuery]:
        """A query from these offsets on."""
        self._assigned = frozenset(starts)
        self._is_ending = False
        self.session.sparkContext.setLocalProperty("spark.scheduler.pool", "intake")
        with closing(Checkpoint()) as checkpoint:
            self._costs = ReadCosts(checkpoint.folder / "costs.json")
            ranges = (
                self.session.readStream.format(FORMAT)
                .option("startingOffsets", orjson.dumps(for_spark(starts)).decode())
                .option("maxOffsetsPerTrigger", BATCH_RECORDS)
                .option("tasks", self.tasks())
                .option("costs", str(self._costs.path))
                .load()
            )
            query = (
                ranges.mapInArrow(self._task, REPORT)
                .writeStream.foreachBatch(self._run_batch)
                .option("checkpointLocation", checkpoint.folder.as_uri())
                # At a trigger of 1 s, the median request would be in Redis after 0.8 s, not 0.33 s.
                .trigger(processingTime="0 seconds")
                .start()
            )
            try:
                yield query
            finally:
                self._is_ending = True
                # Waits for the batch in flight, because `query.stop()` kills its tasks.
                with self._in_batch:
                    pass
                query.stop()

    def _run_batch(self, batch: DataFrame, number: int) -> None:
        """Run a batch until every shard has all of it or is left behind."""
        for attempt in range(TRIES):
            # without shards there is nothing to store, and the full Redis needs this process
            while self._assigned and not self.has_room.wait(LOOK_S):
                if self._is_ending:
                    return
            with self._in_batch:
                if self._is_ending:
                    return
                began = time.monotonic()
                # Each try runs all tasks again: records below the position change nothing.
                done: list[Stored] = reports(batch.collect())
                self._record_stored(done)
                records = sum(stored.taken.accepted + stored.taken.invalid for stored in done)
                self.metrics.batch(records, time.monotonic() - began)
            if all(stored.problem is None or stored.is_behind for stored in done):
                # A query's first batch may be empty, but everything is warm now: ready.
                self._has_run.set()
                if self._in_query != self._assigned:
                    self._in_query = self._assigned
                    logger.info("reading %d shards", len(self._in_query))
                return
            self._stopping.wait(FIRST_PAUSE_S * 2**attempt)
        raise RuntimeError(f"batch {number} is still incomplete after {TRIES} tries")

    def _record_stored(self, done: list[Stored]) -> None:
        behind = dict(self._why_behind)
        for stored in done:
            shard, problem = stored.shard, stored.problem
            self.metrics.taken(shard, stored.taken)
            if problem is None:
                if behind.pop(shard, None) is not None:
                    logger.info("%s is read again", shard)
            elif stored.is_silent:
                self._silent.leave(shard, problem)
            elif stored.is_behind:
                if shard not in behind:
                    logger.warning(
                        "%s cannot take the batch: %s; the other shards continue", shard, problem
                    )
                behind[shard] = problem
            elif stored.is_full:
                self.pause_intake(f"{problem}; requests wait in Kafka until it has room")
            else:
                logger.warning("%s: %s; reading it again", shard, problem)
        self._why_behind = behind
        self._costs.note(done)
