"""The ranges of request topics to be read next, as a stream for Spark.

A row is a range of offsets, not a record: the task that gets it reads the range itself
(`blackbox.journal.ranges`). So records do not pass through Spark, which costs more than all that
intake does with them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from blackbox.engine.spark.batch_size import FIRST_COST_S, Costs, batch_ends
from blackbox.engine.spark.read_costs import costs_in
from blackbox.engine.spark.read_plan import ShardStart, read_plan_from
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.ranges import Range
from blackbox.journal.readable_bounds import Offsets, Partition, ReadableBounds

FORMAT = "blackbox-kafka"

RANGES = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("start", LongType()),
        StructField("end", LongType()),
    ]
)
"""A range to be read: the offsets `start` to `end` - 1 of a partition."""

# How long one plan waits for records. The broker does the waiting, so it costs almost nothing.
AWAITED_S = 0.5
LOOK_S = 0.1


def kafka_source(access: KafkaAccess) -> type[DataSource]:
    """The format `blackbox-kafka` for these brokers, to be registered with a Spark session."""
    # An attribute of the class, not an option: Spark shows options, and so secrets, in its web UI.
    return type("BlackboxKafka", (KafkaSource,), {"access": access})


class KafkaSource(DataSource):
    access: ClassVar[KafkaAccess]

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return RANGES

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
        given = {name.lower(): value for name, value in self.options.items()}
        most_offsets = int(given["maxoffsetspertrigger"])
        return StreamReader(
            self.access, most_offsets, Path(given["read_plan"]), Path(given["costs"])
        )


class Reading(NamedTuple):
    """How far a partition is planned, from where it was begun."""

    begun: ShardStart
    end: int


Plan = dict[Partition, Reading]
"""A stream's offset: what is planned of each partition that is read."""


@dataclass(frozen=True)
class Ranges(InputPartition):
    ranges: tuple[Range, ...]


@dataclass(eq=False, repr=False)
class StreamReader(DataSourceStreamReader):
    """Plans the micro-batches of a stream, of the partitions that are in the file `read_plan` at that time."""

    access: KafkaAccess
    most_offsets: int
    read_plan: Path
    costs: Path

    def __post_init__(self) -> None:
        self._ends: ReadableBounds | None = None
        self._is_first = True
        self._latest: Offsets = {}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return {}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Where the next batch ends; waits up to 0.5 s when there is nothing for it yet."""
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return for_spark(self._next(from_spark(start), most))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self.most_offsets)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        found: dict[str, dict[str, int]] = {}
        for (topic, partition), offset in self._latest.items():
            found.setdefault(topic, {})[str(partition)] = offset
        return found or None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Ranges]:
        before = from_spark(start)
        ranges: list[Range] = []
        for at, (begun, stop) in from_spark(end).items():
            is_new = at not in before or before[at].begun != begun
            first = begun.start if is_new else before[at].end
            # The first batch of a partition has a row for it, also without records: all gets warm.
            if is_new or first < stop:
                ranges.append(Range(*at, first, stop))
        tasks = read_plan_from(self.read_plan).tasks
        if not ranges:
            # A query begins without shards, and so warms up the workers.
            return [Ranges(())] * (1 if before else tasks)
        return packed(ranges, tasks, costs_in(self.costs))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Ranges)
        rows = [wanted._asdict() for wanted in partition.ranges]
        yield pa.RecordBatch.from_pylist(rows, schema=to_arrow_schema(RANGES))

    def stop(self) -> None:
        if self._ends is not None:
            self._ends.close()
            self._ends = None

    def _next(self, before: Plan, most: int | None) -> Plan:
        # Created late: the reader is pickled for the tasks, and clients cannot be.
        self._ends = self._ends or ReadableBounds(self.access)
        was_first, self._is_first = self._is_first, False
        begun = read_plan_from(self.read_plan).begun
        start = _continued(before, begun)
        end = self._reachable(self._ends, start)
        if end == start and _begun(before) == begun and not was_first:
            until_s = time.monotonic() + AWAITED_S
            while not self._ends.wait_for_records(start, LOOK_S):
                if (begun := read_plan_from(self.read_plan).begun) != _begun(before):
                    break
                if time.monotonic() > until_s:
                    return before
            start = _continued(before, begun)
            end = self._reachable(self._ends, start)
        if most is not None:
            tasks = read_plan_from(self.read_plan).tasks
            end = batch_ends(start, end, most, costs_in(self.costs), tasks)
        return {at: Reading(begun[at], stop) for at, stop in end.items()}

    def _reachable(self, ends: ReadableBounds, start: Offsets) -> Offsets:
        """How far to read. Partitions that cannot be read stay where they are; IntakeStream reports them."""
        self._latest, _ = reachable(ends, start)
        return start | self._latest


def _begun(plan: Plan) -> dict[Partition, ShardStart]:
    return {at: reading.begun for at, reading in plan.items()}


def _continued(before: Plan, begun: Mapping[Partition, ShardStart]) -> Offsets:
    """Where to read on what is still read, and where to begin the rest."""
    return {
        at: before[at].end if at in before and before[at].begun == now else now.start
        for at, now in begun.items()
    }


def reachable(ends: ReadableBounds, start: Offsets) -> tuple[Offsets, dict[Partition, str]]:
    """How far each partition can be read now, and why some cannot."""
    found, silent = ends.last_of_each(start)
    lost = {at: str(why) for at, why in silent.items()}
    for at, end in found.items():
        if end < start[at]:
            lost[at] = (
                f"{at[0]}/{at[1]}: read up to {start[at]}, but it ends at {end}; it was truncated, "
                "or deleted and created again"
            )
    return {at: end for at, end in found.items() if at not in lost}, lost


def packed(ranges: Sequence[Range], most_tasks: int, costs: Costs) -> list[Ranges]:
    """Pack whole ranges into at most `most_tasks` tasks that take about the same time."""

    def seconds(wanted: Range) -> float:
        cost_s = costs.get((wanted.topic, wanted.partition), FIRST_COST_S)
        return max(1, wanted.end - wanted.start) * cost_s

    count = min(most_tasks, len(ranges))
    tasks: list[list[Range]] = [[] for _ in range(count)]
    sizes = [0.0] * count
    for wanted in sorted(ranges, key=seconds, reverse=True):
        shortest = sizes.index(min(sizes))
        tasks[shortest].append(wanted)
        sizes[shortest] += seconds(wanted)
    # The longest task starts first. In a task, the shortest range goes first: it waits least.
    longest_first = sorted(tasks, key=lambda task: sum(map(seconds, task)), reverse=True)
    return [Ranges(tuple(reversed(task))) for task in longest_first]


def for_spark(plan: Plan) -> dict[str, Any]:
    """The plan as JSON, `{"TB": {"0": [number, start, end]}}`; equal plans give equal results."""
    # Sorted: Spark compares offsets as JSON, and plans no batch if start and end are equal.
    found: dict[str, dict[str, list[int]]] = {}
    for (topic, partition), (begun, end) in sorted(plan.items()):
        found.setdefault(topic, {})[str(partition)] = [*begun, end]
    return found


def from_spark(found: Mapping[str, Mapping[str, Sequence[int]]]) -> Plan:
    return {
        (topic, int(partition)): Reading(ShardStart(number, start), end)
        for topic, places in found.items()
        for partition, (number, start, end) in places.items()
    }
