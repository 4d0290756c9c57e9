"""Kafka for Spark: topics as a stream or a table, read by the same client as everything else.

The columns are those of Spark's own `format("kafka")` with `includeHeaders`.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from blackbox import interpreter
from blackbox.doubt import JournalLost
from blackbox.journal.access import KafkaAccess
from blackbox.journal.ranges import (
    Chunk,
    Ends,
    Partition,
    Positions,
    Range,
    read_ranges,
)
from blackbox.journal.records import columns
from blackbox.request import is_topic_name

FORMAT = "blackbox-kafka"

SCHEMA = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
        StructField(
            "headers",
            ArrayType(
                StructType([StructField("key", StringType()), StructField("value", BinaryType())])
            ),
        ),
    ]
)
RANGES = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("start", LongType()),
        StructField("end", LongType()),
    ]
)
"""With the option `ranges`: what is to be read, `start` to `end` - 1 of a partition, as one row.

For a task that reads its ranges itself (`blackbox.journal.ranges`), where it uses them: records
then need not pass through Spark, which costs more than all that intake does with them.
"""

NEWS_S = 0.5
PARTITIONS_LOOK_S = 1.0
FIRST, LATEST = -2, -1
"""Offsets in `startingOffsets` and `endingOffsets` that stand for the two ends of a partition."""

_ARROW = to_arrow_schema(SCHEMA, timezone="UTC")
_ARROW_RANGES = to_arrow_schema(RANGES)
_TIMESTAMP = _ARROW.field("timestamp").type
_HEADERS = _ARROW.field("headers").type
_LAST_MS = (1 << 63) // 1000 - 1


def kafka_source(access: KafkaAccess) -> type[DataSource]:
    """The format `blackbox-kafka` for these brokers, to be registered with a Spark session.

    The access travels inside the class, so that no secret is ever among the options, which Spark
    shows in plans and on its page.
    """
    return type("BlackboxKafka", (KafkaSource,), {"access": access})


class KafkaSource(DataSource):
    """Committed records of topics, as a table or a stream."""

    access: ClassVar[KafkaAccess]

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return RANGES if Wanted.of(self.options).in_ranges else SCHEMA

    def reader(self, schema: StructType) -> TableReader:
        return TableReader(self.access, Wanted.of(self.options).for_table())

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
        return StreamReader(self.access, Wanted.of(self.options).for_stream())


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of one read. ValueError names the option, its value and what is wanted."""

    topics: tuple[str, ...]
    assigned: tuple[Partition, ...]
    starting: int | Positions = FIRST
    ending: int | Positions = LATEST
    has_ending: bool = False
    most_offsets: int | None = None
    most_tasks: int | None = None
    in_ranges: bool = False

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Wanted:
        given = {name.lower(): value for name, value in options.items()}
        unknown = given.keys() - {name.lower() for name in _OPTIONS}
        if unknown:
            name = sorted(unknown)[0]
            raise _bad(name, given[name], f"no such option, but one of {', '.join(_OPTIONS)}")
        topics = _topics(given.get("subscribe"))
        assigned = _partitions(given.get("assign"))
        if bool(topics) == bool(assigned):
            raise _bad("subscribe", given.get("subscribe"), "either it or assign, and not both")
        names = set(topics) | {topic for topic, _ in assigned}
        return cls(
            topics=topics,
            assigned=assigned,
            starting=_offsets("startingOffsets", given, "earliest", names),
            ending=_offsets("endingOffsets", given, "latest", names),
            has_ending="endingoffsets" in given,
            most_offsets=_count("maxOffsetsPerTrigger", given),
            most_tasks=_count("tasks", given),
            in_ranges=_flag("ranges", given),
        )

    def for_stream(self) -> Wanted:
        if self.has_ending:
            raise _bad("endingOffsets", "given", "none, because a stream has no end")
        return self

    def for_table(self) -> Wanted:
        if self.most_offsets is not None:
            raise _bad("maxOffsetsPerTrigger", str(self.most_offsets), "none, as this is no stream")
        if self.starting == LATEST:
            raise _bad("startingOffsets", "latest", '"earliest" or JSON, as this is no stream')
        if self.ending == FIRST:
            raise _bad("endingOffsets", "earliest", '"latest" or JSON')
        return self

    def partitions(self, ends: Ends) -> list[Partition]:
        """Those that are to be read, as far as they exist now."""
        return ends.partitions(self.topics) if self.topics else list(self.assigned)

    def starts(self, ends: Ends, partitions: Sequence[Partition]) -> Positions:
        """Where each of these partitions is read from."""
        if isinstance(self.starting, int):
            return ends.last(partitions) if self.starting == LATEST else ends.first(partitions)
        return _resolved("startingOffsets", self.starting, ends, partitions, FIRST)

    def stops(self, ends: Ends, partitions: Sequence[Partition]) -> Positions:
        """Up to where each of these partitions is read."""
        last = ends.last(partitions)
        if isinstance(self.ending, int):
            return last
        named = _resolved("endingOffsets", self.ending, ends, partitions, LATEST)
        for (topic, partition), end in named.items():
            if end > last[topic, partition]:
                raise _bad(
                    "endingOffsets", f"{topic}/{partition}: {end}",
                    f"at most {last[topic, partition]}, up to where it can be read now",
                )  # fmt: skip
        return named


@dataclass(frozen=True)
class Ranges(InputPartition):
    """What one task reads, one range after the other."""

    ranges: tuple[Range, ...]


class _RangesReader:
    """What tasks do, whoever planned them."""

    def __init__(self, access: KafkaAccess, wanted: Wanted) -> None:
        self._access = access
        self._wanted = wanted

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task as Arrow batches."""
        _tune_once()
        ranges = partition.ranges if isinstance(partition, Ranges) else ()
        if self._wanted.in_ranges:
            if ranges:
                yield _as_rows(ranges)
            return
        for chunk in read_ranges(self._access, ranges):
            if chunk.messages:
                yield _batch(chunk)

    def _planned(
        self, start: Positions, end: Positions, *, also_empty: bool = False
    ) -> list[Ranges]:
        ranges = [
            Range(topic, partition, begin, stop)
            for (topic, partition), stop in end.items()
            if (begin := start.get((topic, partition), stop)) < stop or also_empty
        ]
        return packed(ranges, self._wanted.most_tasks)


class TableReader(_RangesReader, DataSourceReader):
    """Reads up to where the topics can be read when the query is planned, or to `endingOffsets`."""

    def partitions(self) -> list[Ranges]:
        ends = Ends(self._access)
        at = self._wanted.partitions(ends)
        start, end = self._wanted.starts(ends, at), self._wanted.stops(ends, at)
        for (topic, partition), stop in end.items():
            if start[topic, partition] > stop:
                raise ValueError(
                    f"{topic}/{partition}: starts at {start[topic, partition]}, behind its end {stop}"
                )
        return self._planned(start, end)


class StreamReader(_RangesReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the micro-batches of a stream. Offsets are spelled `{"TB": {"0": 23}}`, as Spark does."""

    def __init__(self, access: KafkaAccess, wanted: Wanted) -> None:
        super().__init__(access, wanted)
        self._planner: _Planner | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return spelled(self._plan().begin())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Where the next batch ends; waits up to 0.5 s when there is nothing for it yet."""
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return spelled(self._plan().next(unspelled(start), most))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._wanted.most_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._plan().stop_here()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return spelled(self._planner.latest) if self._planner and self._planner.latest else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Ranges]:
        # The first batch of a query, which says from where it reads and makes everything warm.
        is_first = self._wanted.in_ranges and start == end
        return self._planned(unspelled(start), unspelled(end), also_empty=is_first)

    def stop(self) -> None:
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def _plan(self) -> _Planner:
        # Made late: the reader itself is pickled for the tasks, and clients cannot be.
        self._planner = self._planner or _Planner(self._access, self._wanted)
        return self._planner


class _Planner:
    """Says how far the next batch of a stream goes."""

    def __init__(self, access: KafkaAccess, wanted: Wanted) -> None:
        self._ends = Ends(access)
        self._wanted = wanted
        self._until: Positions | None = None
        self._look_s = -math.inf
        self._is_first = wanted.in_ranges
        self.latest: Positions = {}

    def begin(self) -> Positions:
        return self._wanted.starts(self._ends, self._wanted.partitions(self._ends))

    def next(self, start: Positions, most: int | None) -> Positions:
        added = self._added(start)
        reachable = self._reachable(start)
        waits = self._until is None and not self._is_first
        self._is_first = False
        if reachable == start and not added and waits:
            if not self._ends.wait_for_news(start, NEWS_S):
                return start
            reachable = self._reachable(start)
        return (reachable if most is None else fair(start, reachable, most)) | added

    def stop_here(self) -> None:
        self._until = self._ends.last(self._wanted.partitions(self._ends))

    def close(self) -> None:
        self._ends.close()

    def _reachable(self, start: Positions) -> Positions:
        self.latest = latest = self._ends.last(start)
        for (topic, partition), offset in start.items():
            if latest[topic, partition] < offset:
                raise JournalLost(
                    f"{topic}/{partition}: was read up to {offset}, but ends at "
                    f"{latest[topic, partition]}; it was truncated, or deleted and created again"
                )
        if self._until is None:
            return latest
        # A transaction that was open at `stop_here` may have hidden what is below it by then.
        return {at: max(start[at], min(end, self._until.get(at, 0))) for at, end in latest.items()}

    def _added(self, start: Positions) -> Positions:
        """Partitions that are new, at their first offset; the batch after this one reads them."""
        if self._until is not None:
            return self._ends.first(self._until.keys() - start.keys())
        if time.monotonic() < self._look_s:
            return {}
        self._look_s = time.monotonic() + PARTITIONS_LOOK_S
        return self._ends.first(set(self._wanted.partitions(self._ends)) - start.keys())


# Headers are tuples by the thousand: without this, reading them takes twice as long.
_tune_once = cache(interpreter.tune)


def packed(ranges: Sequence[Range], most_tasks: int | None) -> list[Ranges]:
    """Whole ranges packed into at most so many tasks of similar size, the largest task first."""
    count = len(ranges) if most_tasks is None else min(most_tasks, len(ranges))
    tasks: list[list[Range]] = [[] for _ in range(count)]
    sizes = [0] * count
    for wanted in sorted(ranges, key=_size, reverse=True):
        lightest = sizes.index(min(sizes))
        tasks[lightest].append(wanted)
        sizes[lightest] += max(1, _size(wanted))
    return [Ranges(tuple(task)) for task in sorted(tasks, key=lambda t: sum(map(_size, t)))[::-1]]


def fair(start: Positions, end: Positions, most: int) -> Positions:
    """Ends at most so many offsets away, each partition's share in proportion to what waits in it.

    At least one offset of each partition that has any, as Spark's own source does it.
    """
    total = sum(end[at] - start[at] for at in end)
    if total <= most:
        return end
    return {
        at: start[at] + min(offset - start[at], max(1, most * (offset - start[at]) // total))
        for at, offset in end.items()
    }


def spelled(positions: Positions) -> dict[str, Any]:
    """Positions as Spark's Kafka source spells them; equal positions are spelled alike."""
    found: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(positions.items()):
        found.setdefault(topic, {})[str(partition)] = offset
    return found


def unspelled(offsets: Mapping[str, Mapping[str, int]]) -> Positions:
    return {
        (topic, int(partition)): offset
        for topic, places in offsets.items()
        for partition, offset in places.items()
    }


def _size(wanted: Range) -> int:
    return wanted.end - wanted.start


_OPTIONS = (
    "subscribe", "assign", "startingOffsets", "endingOffsets", "maxOffsetsPerTrigger", "tasks",
    "ranges",
)  # fmt: skip


def _bad(name: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"option {name}={value}: wanted: {wanted}")


def _topics(value: str | None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(",")) if value is not None else ()
    if not all(map(is_topic_name, names)):
        raise _bad("subscribe", value, "topic names with commas between them")
    return tuple(dict.fromkeys(names))


def _partitions(value: str | None) -> tuple[Partition, ...]:
    if value is None:
        return ()
    try:
        found = {
            (topic, partition)
            for topic, partitions in json.loads(value).items()
            for partition in partitions
        }
    except (ValueError, AttributeError, TypeError):
        found = set()
    if not found or not all(
        is_topic_name(topic) and type(partition) is int and partition >= 0
        for topic, partition in found
    ):
        raise _bad("assign", value, 'JSON like {"TB":[0,1]}')
    return tuple(sorted(found))


def _offsets(
    name: str, given: Mapping[str, str], default: str, topics: set[str]
) -> int | Positions:
    value = given.get(name.lower(), default)
    if value.lower() in ("earliest", "latest"):
        return FIRST if value.lower() == "earliest" else LATEST
    wanted = (
        '"earliest", "latest" or JSON like {"TB":{"0":23}}, in it -2 for earliest, -1 for latest'
    )
    try:
        found = unspelled(json.loads(value))
    except (ValueError, AttributeError, TypeError):
        raise _bad(name, value, wanted) from None
    if not all(type(offset) is int and offset >= FIRST for offset in found.values()):
        raise _bad(name, value, wanted)
    for topic, _ in found:
        if topic not in topics:
            raise _bad(name, value, f"only topics that are read, and {topic} is not")
    return found


def _resolved(
    name: str, named: Positions, ends: Ends, partitions: Sequence[Partition], default: int
) -> Positions:
    missing = sorted(named.keys() - set(partitions))
    if missing:
        raise _bad(name, f"{missing[0][0]}/{missing[0][1]}", "only partitions that are read")
    wanted = {at: named.get(at, default) for at in partitions}
    first = ends.first([at for at, offset in wanted.items() if offset == FIRST])
    last = ends.last([at for at, offset in wanted.items() if offset == LATEST])
    return wanted | first | last


def _count(name: str, given: Mapping[str, str]) -> int | None:
    value = given.get(name.lower())
    if value is None:
        return None
    if not re.fullmatch("[0-9]{1,18}", value) or int(value) == 0:
        raise _bad(name, value, "a whole number above 0")
    return int(value)


def _flag(name: str, given: Mapping[str, str]) -> bool:
    value = given.get(name.lower(), "false")
    if value.lower() not in ("true", "false"):
        raise _bad(name, value, "true or false")
    return value.lower() == "true"


def _batch(chunk: Chunk) -> pa.RecordBatch:
    """The records of a chunk as Arrow. Times beyond what Spark can hold become the last it can."""
    found, count = columns(chunk.messages), len(chunk.messages)
    # Without a time of its own (0), a record counts as stamped by its producer.
    kinds = [kind - 1 if kind else 0 for kind, _ in found.stamps]
    times_ms = pa.array([time_ms for _, time_ms in found.stamps], pa.int64())
    return pa.RecordBatch.from_arrays(
        [
            pa.array(found.keys, pa.binary()),
            pa.array(found.values, pa.binary()),
            pa.repeat(chunk.range.topic, count),
            pa.repeat(pa.scalar(chunk.range.partition, pa.int32()), count),
            pa.array(found.offsets, pa.int64()),
            pc.multiply(pc.min_element_wise(times_ms, _LAST_MS), 1000).view(_TIMESTAMP),
            pa.array(kinds, pa.int32()),
            # Arrow converts lists of tuples faster than Python can flatten them.
            pa.array([headers or None for headers in found.headers], _HEADERS)
            if any(found.headers)
            else pa.nulls(count, _HEADERS),
        ],
        schema=_ARROW,
    )


def _as_rows(ranges: Sequence[Range]) -> pa.RecordBatch:
    columns = zip(*ranges, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(held, field.type) for held, field in zip(columns, _ARROW_RANGES, strict=True)],
        schema=_ARROW_RANGES,
    )
