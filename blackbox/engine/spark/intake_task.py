"""One Spark task of intake: stores the ranges that the Kafka source planned in their shards' indexes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import pyarrow as pa

from blackbox.config.settings import Settings
from blackbox.config.wiring import admission, check_log, formats
from blackbox.core.intake import Intake, Taken
from blackbox.core.parsing import Parsed, parse_batch
from blackbox.core.plan import Batch
from blackbox.engine.spark.read_costs import Stopwatch
from blackbox.engine.spark.shard_result import NOTHING_TAKEN, ShardResult, sum_of
from blackbox.index.bus import Bus
from blackbox.index.connection import pool
from blackbox.index.redis_servers import RedisServers
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.message_conversion import leader_epochs, read_records
from blackbox.journal.partition_reader import PartitionReader
from blackbox.journal.ranges import Range, read_ranges
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import TopicIds
from blackbox.records.clock import Clock
from blackbox.records.errors import (
    IndexFull,
    IndexLost,
    PositionsMoved,
    RecordsRemoved,
    RecoveryRequired,
)
from blackbox.records.request import Shard
from blackbox.spark.task_io import as_reports
from blackbox.support import interpreter, logs

logger = logging.getLogger("blackbox.spark.intake")

CLOCK_S = 1.0
# All other shards of a batch wait for missing records. If there are more, the next query has them.
MOST_MISSING = 4000

# Two clients in turn wait this long for a silent shard, and so do all other shards of the batch.
SILENCE_S = 2.5


class _Unread(NamedTuple):
    """A range, from `start` on, that Kafka did not return in full."""

    start: int
    why: RecoveryRequired


@dataclass(frozen=True, slots=True)
class IntakeTask:
    """The parameters of a task. `run` names the application."""

    run: str
    settings: Settings
    access: KafkaAccess

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return as_reports(_intakes_for(self).take_in(rows))


class _Intakes:
    """The intakes of the shards that this Python worker has seen, kept from task to task."""

    def __init__(self, task: IntakeTask) -> None:
        self.run = task.run
        self._access = task.access
        self._settings = task.settings
        self._formats = formats(task.settings)
        self._admission = admission(task.settings, task.access)
        url = task.settings.redis_url.get_secret_value()
        self._connections = pool(url)
        self._redis = RedisServers(url)
        self._bus = Bus(url, task.settings.group_id)
        self._clock = Clock()
        self._observed_s = 0.0
        self._ids = TopicIds(task.access)
        self._known_ids: dict[str, str] = {}
        self._identified_s = float("-inf")
        self._open_shards: dict[Shard, tuple[ShardIndex, Intake]] = {}

    def take_in(self, rows: Iterator[pa.RecordBatch]) -> list[ShardResult]:
        """Store the ranges in these rows; while Redis is busy with one batch, read and parse the next."""
        done: dict[Shard, ShardResult] = {}
        watch, stored_now = Stopwatch(), None
        coming = self._parsed(rows, watch)
        next_one: list[tuple[Shard, Parsed | _Unread] | Exception] = []

        def read_ahead() -> None:
            if not next_one:
                watch.charge(stored_now)
                try:
                    next_one.extend(islice(coming, 1))
                except Exception as failure:  # it must not fail the store in progress
                    next_one.append(failure)

        read_ahead()
        while next_one:
            found = next_one.pop()
            if isinstance(found, Exception):
                raise found
            shard, batch = found
            so_far = done.setdefault(shard, ShardResult(shard, NOTHING_TAKEN, batch.start))
            if so_far.problem is not None:
                pass  # it would leave a gap: the next batch reads on from the position
            elif isinstance(batch, _Unread):
                done[shard] = self._stopped(so_far, batch.why)
            else:
                stored_now = shard
                done[shard] = self._store(so_far, batch, read_ahead)
                watch.charge(shard)
            read_ahead()
        return [one._replace(seconds=watch.seconds(one.shard)) for one in done.values()]

    def close(self) -> None:
        for shard in list(self._open_shards):
            self._drop(shard)
        self._connections.disconnect()
        self._redis.close()
        self._bus.close()

    def _parsed(
        self, rows: Iterator[pa.RecordBatch], watch: Stopwatch
    ) -> Iterator[tuple[Shard, Parsed | _Unread]]:
        ranges = [Range(**row) for some in rows for row in some.to_pylist()]
        unread: list[tuple[Shard, _Unread]] = []

        def lost(wanted: Range, why: RecoveryRequired) -> None:
            shard = Shard(wanted.topic, wanted.partition)
            unread.append((shard, _Unread(wanted.start, why)))

        for chunk in read_ranges(self._access, ranges, lost, SILENCE_S):
            self._observe()
            shard = Shard(chunk.range.topic, chunk.range.partition)
            batch = Batch(
                chunk.start, chunk.end, read_records(chunk.messages), leader_epochs(chunk.messages)
            )
            format, latest_ms = self._formats[shard.topic], self._clock.latest_ms()
            rulings = None if self._admission is None else self._admission.rulings()
            horizon_ms = self._settings.horizon_ms_of(shard.topic)
            parsed = parse_batch(format, batch, latest_ms, horizon_ms, rulings)
            watch.charge(shard)
            yield shard, parsed
        yield from unread

    def _store(
        self, so_far: ShardResult, parsed: Parsed, while_busy: Callable[[], None]
    ) -> ShardResult:
        shard = so_far.shard
        was_open = shard in self._open_shards
        try:
            try:
                taken, position = self._store_in_order(shard, parsed, while_busy)
            except IndexLost:
                if not was_open:
                    raise
                self._drop(shard)  # a connection that was kept may have been closed since
                taken, position = self._store_in_order(shard, parsed, while_busy)
            self._announce(shard, taken)
            return so_far.with_more(taken, position, parsed.end - parsed.start)
        except (RecoveryRequired, IndexFull) as reason:
            self._drop(shard)
            return self._stopped(so_far, reason)

    def _stopped(self, so_far: ShardResult, reason: RecoveryRequired | IndexFull) -> ShardResult:
        if isinstance(reason, RecordsRemoved):
            # Only an opening moves the position past them. The owner does not read the topic, so it needs a note.
            with suppress(IndexLost):
                self._bus.send("removed", (*so_far.shard, reason.first, str(reason)))
        return so_far.stopped_by(reason)

    def _store_in_order(
        self, shard: Shard, parsed: Parsed, while_busy: Callable[[], None]
    ) -> tuple[Taken, int]:
        """Store a batch, after what is missing before it; returns what was taken and how far Redis is at least."""
        index, intake = self._open_shard(shard)
        try:
            taken = intake.store(parsed, self._clock.latest_ms(), while_busy)
        except PositionsMoved:  # Redis was rolled back, or an earlier batch was not stored
            before = self._read_up_to(parsed.start, shard, index, intake)
            taken = sum_of(before, intake.store(parsed, self._clock.latest_ms()))
        # Not the index's position: this worker may remember one from before the topic was recreated.
        return taken, parsed.end

    def _read_up_to(self, start: int, shard: Shard, index: ShardIndex, intake: Intake) -> Taken:
        """Read again what is missing before `start`."""
        taken = NOTHING_TAKEN
        kept = index.load()
        if kept is None:
            raise PositionsMoved(f"{shard}: the index is empty; dispatch rebuilds it")
        positions = kept.positions
        if start - positions.requests > MOST_MISSING:
            raise PositionsMoved(
                f"{shard}: its index lacks requests {positions.requests} to {start - 1}"
            )
        logger.info("%s: reading %d to %d again", shard, positions.requests, start - 1)
        reader = PartitionReader(self._access, silence_s=SILENCE_S)
        with closing(ShardJournal(shard, self._access, reader=reader)) as journal:
            for batch in journal.requests(positions.requests, start):
                taken = sum_of(taken, intake.parse_and_store(batch, self._clock.latest_ms()))
        return taken

    def _announce(self, shard: Shard, taken: Taken) -> None:
        """Notify dispatch of a request that may be due before its next poll."""
        first_ms = taken.first_due_ms
        if (
            first_ms is not None
            and first_ms <= self._clock.latest_ms() + self._settings.poll_interval_ms
        ):
            with suppress(IndexLost):
                self._bus.send("soon", (shard.topic, shard.partition, first_ms))

    def _observe(self) -> None:
        if time.monotonic() - self._observed_s > CLOCK_S:
            with suppress(IndexLost):
                self._clock.observe(self._redis.now_ms())
                self._observed_s = time.monotonic()

    def _open_shard(self, shard: Shard) -> tuple[ShardIndex, Intake]:
        if shard not in self._open_shards:
            # Another process dispatches: this one sees a rollback or a new topic only by these two.
            index = ShardIndex(
                shard, self._connections, grace_s=self._settings.grace_s,
                is_behind=partial(self._has_receipt_since, shard),
                topic_id=partial(self._topic_id, shard.topic),
            )  # fmt: skip
            intake = Intake(
                self._formats[shard.topic], index, self._settings.horizon_ms_of(shard.topic),
                self._admission, check_log=partial(check_log, shard, self._access),
            )  # fmt: skip
            self._open_shards[shard] = index, intake
        return self._open_shards[shard]

    def _topic_id(self, topic: str) -> str | None:
        """The topic's id, as of the last second; None while the brokers do not answer."""
        if time.monotonic() - self._identified_s > CLOCK_S:
            self._known_ids = self._ids.of(list(self._formats))
            self._identified_s = time.monotonic()
        return self._known_ids.get(topic)

    def _has_receipt_since(self, shard: Shard, offset: int) -> bool:
        with closing(ShardJournal(shard, self._access, prefetched=1)) as journal:
            end = journal.receipt_bounds().end
            return next(iter(journal.receipts(offset, end)), None) is not None

    def _drop(self, shard: Shard) -> None:
        held = self._open_shards.pop(shard, None)
        if held is not None:
            held[0].close()


# A Python worker runs many tasks, so its connections are kept. It ends after 60 s without a task: a
# later worker must be able to create all of this again.
_intakes_of_worker: _Intakes | None = None


def _intakes_for(task: IntakeTask) -> _Intakes:
    global _intakes_of_worker
    if _intakes_of_worker is None or _intakes_of_worker.run != task.run:
        interpreter.tune()
        logs.to_stderr()
        if _intakes_of_worker is not None:
            _intakes_of_worker.close()
        _intakes_of_worker = _Intakes(task)
    return _intakes_of_worker
