"""The ranges of request topics to be read next, as a stream for Spark.

A row is a range of offsets, not a record: the task that gets it reads the range itself
(`blackbox.journal.ranges`). So records do not pass through Spark, which costs more than all that
intake does with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from blackbox.engine.spark.batch_size import FIRST_COST_S, Costs, batch_ends
from blackbox.engine.spark.read_costs import costs_in
from blackbox.journal.ends import Ends, Offsets, Partition
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.ranges import Range
from blackbox.records.request import Shard

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
        starts = from_spark(json.loads(given["startingoffsets"]))
        most_offsets, most_tasks = int(given["maxoffsetspertrigger"]), int(given["tasks"])
        return StreamReader(self.access, starts, most_offsets, most_tasks, Path(given["costs"]))


@dataclass(frozen=True)
class Ranges(InputPartition):
    ranges: tuple[Range, ...]


@dataclass(eq=False, repr=False)
class StreamReader(DataSourceStreamReader):
    """Plans the micro-batches of a stream. Offsets are written `{"TB": {"0": 23}}`, as Spark does."""

    access: KafkaAccess
    starts: Offsets
    most_offsets: int
    most_tasks: int
    costs: Path

    def __post_init__(self) -> None:
        self._ends: Ends | None = None
        self._is_first = True
        self._latest: Offsets = {}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return for_spark(self.starts)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Where the next batch ends; waits up to 0.5 s when there is nothing for it yet."""
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return for_spark(self._next(from_spark(start), most))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self.most_offsets)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return for_spark(self._latest) if self._latest else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Ranges]:
        # A query's first batch has a row per partition, also without records: all gets warm.
        also_empty = start == end
        begins = from_spark(start)
        ranges = [
            Range(*at, begins.get(at, stop), stop)
            for at, stop in from_spark(end).items()
            if begins.get(at, stop) < stop or also_empty
        ]
        if not ranges:
            return [Ranges(())]  # a query without shards warms up one worker
        return packed(ranges, self.most_tasks, costs_in(self.costs))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Ranges)
        rows = [wanted._asdict() for wanted in partition.ranges]
        yield pa.RecordBatch.from_pylist(rows, schema=to_arrow_schema(RANGES))

    def stop(self) -> None:
        if self._ends is not None:
            self._ends.close()
            self._ends = None

    def _next(self, start: Offsets, most: int | None) -> Offsets:
        # Created late: the reader is pickled for the tasks, and clients cannot be.
        self._ends = self._ends or Ends(self.access)
        reachable = self._reachable(self._ends, start)
        was_first, self._is_first = self._is_first, False
        if reachable == start and not was_first:
            if not self._ends.wait_for_records(start, AWAITED_S):
                return start
            reachable = self._reachable(self._ends, start)
        if most is None:
            return reachable
        return batch_ends(start, reachable, most, costs_in(self.costs), self.most_tasks)

    def _reachable(self, ends: Ends, start: Offsets) -> Offsets:
        """How far to read. Partitions that cannot be read stay where they are; IntakeStream reports them."""
        self._latest, _ = reachable(ends, start)
        return start | self._latest


def reachable(ends: Ends, start: Offsets) -> tuple[Offsets, dict[Partition, str]]:
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


def for_spark(positions: Offsets | Mapping[Shard, int]) -> dict[str, Any]:
    """Offsets in the notation of Spark's Kafka source; equal offsets give equal results."""
    # Sorted: Spark compares offsets as JSON, and plans no batch if start and end are equal.
    found: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(positions.items()):
        found.setdefault(topic, {})[str(partition)] = offset
    return found


def from_spark(offsets: Mapping[str, Mapping[str, int]]) -> Offsets:
    return {
        (topic, int(partition)): offset
        for topic, places in offsets.items()
        for partition, offset in places.items()
    }
