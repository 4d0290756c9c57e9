"""The ranges that the Kafka source plans and its tasks read, on a real broker; without Spark where possible."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    NewPartitions,
    NewTopic,
)
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.streaming.query import StreamingQuery

from blackbox.embedded import EmbeddedStack
from blackbox.engine.spark import kafka_source as source
from blackbox.engine.spark.kafka_source import (
    FORMAT,
    RANGES,
    Ranges,
    Reading,
    StreamReader,
    for_spark,
    kafka_source,
    packed,
    reachable,
)
from blackbox.engine.spark.read_plan import ReadPlan, ShardStart, read_plan_from
from blackbox.journal import ranges, readable_bounds
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.ranges import CHUNK_BYTES, CHUNK_RECORDS, Chunk, Range, read_ranges
from blackbox.journal.readable_bounds import ReadableBounds
from blackbox.records.errors import JournalLost
from blackbox.records.request import Shard
from tests.support.world import until

pytestmark = pytest.mark.service

ALL = ReadAllAvailable()
SECRET = "not-for-any-page"

Row = dict[str, Any]
Offsets = dict[str, dict[str, list[int]]]


class Topic:
    """A topic of the test, with ways to write to it and to read it."""

    def __init__(self, servers: str, folder: Path, partitions: int = 1, **config: str) -> None:
        self.name = f"source.{uuid.uuid4().hex[:8]}"
        self.servers = servers
        self.read_plan = ReadPlan(folder / f"{self.name}.json", tasks=4)
        self.admin = AdminClient({"bootstrap.servers": self.servers})
        self.create(partitions, **config)
        self._producer = Producer(
            {
                "bootstrap.servers": self.servers,
                "linger.ms": 1,
                "enable.idempotence": True,
                "max.in.flight": 1,
            }
        )
        self._last = -1
        self._ends = Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": "ends",
                "isolation.level": "read_uncommitted",
            }
        )

    def create(self, partitions: int = 1, **config: str) -> None:
        def created() -> bool:
            asked = self.admin.create_topics([NewTopic(self.name, partitions, config=config)])
            return all(one.exception(30) is None for one in asked.values())

        until("it is created", created)
        until("the topic is known", lambda: self.name in self.admin.list_topics().topics)

    def delete(self) -> None:
        for future in self.admin.delete_topics([self.name]).values():
            future.result(30)

    @property
    def access(self) -> KafkaAccess:
        # Has no effect, but may be in an operator's file.
        return KafkaAccess(self.servers, "source", {"sasl.password": SECRET})

    def write(self, *values: str | bytes | None, partition: int = 0, **more: Any) -> None:
        for value in values:
            write(self._producer, self.name, value, partition, **more)
        assert self._producer.flush(30) == 0

    def write_at_once(self, *values: bytes) -> None:
        """All in one compressed batch, which a consumer then gets at once."""
        producer = Producer(
            {
                "bootstrap.servers": self.servers,
                "compression.type": "lz4",
                "enable.idempotence": True,
                "max.in.flight": 1,
                "linger.ms": 60_000,
                "batch.size": 64 << 20,
                "batch.num.messages": 100_000,
                "message.max.bytes": 64 << 20,
            }
        )
        for value in values:
            write(producer, self.name, value, 0)
        assert producer.flush(30) == 0

    def transaction(self) -> Producer:
        """An open transaction of its own producer."""
        producer = Producer(
            {"bootstrap.servers": self.servers, "transactional.id": f"{self.name}-{time.time_ns()}"}
        )
        producer.init_transactions(30)
        producer.begin_transaction()
        return producer

    def write_in(self, producer: Producer, *values: str, partition: int = 0) -> None:
        for value in values:
            write(producer, self.name, value, partition, self._wrote)
        assert producer.flush(30) == 0

    def _wrote(self, message: Message) -> None:
        self._last = message.offset() or 0

    def commit(self, *values: str, partition: int = 0) -> None:
        """Write in one transaction: a marker follows the records."""
        producer = self.transaction()
        self.write_in(producer, *values, partition=partition)
        producer.commit_transaction(30)
        self._wait_for_marker(partition)

    def abort(self, *values: str, partition: int = 0) -> None:
        producer = self.transaction()
        self.write_in(producer, *values, partition=partition)
        producer.abort_transaction(30)
        self._wait_for_marker(partition)

    def _wait_for_marker(self, partition: int) -> None:
        """The broker writes the marker after its answer; the next record must come after it."""
        end = TopicPartition(self.name, partition)
        until("the marker", lambda: self._ends.get_watermark_offsets(end)[1] == self._last + 2)

    def cut(self, offset: int, partition: int = 0) -> None:
        """Remove everything below `offset`, as retention does."""
        admin = AdminClient({"bootstrap.servers": self.servers})
        deleted = admin.delete_records([TopicPartition(self.name, partition, offset)])
        for future in deleted.values():
            future.result(30)

    def grow(self, partitions: int) -> None:
        for future in self.admin.create_partitions([NewPartitions(self.name, partitions)]).values():
            future.result(30)
        self._producer = Producer(
            {
                "bootstrap.servers": self.servers,
                "linger.ms": 1,
                "enable.idempotence": True,
                "max.in.flight": 1,
            }
        )
        until(
            "they are known",
            lambda: (
                len(self._producer.list_topics(self.name).topics[self.name].partitions)
                == partitions
            ),
        )

    def options(self, most: int = 1_000_000) -> dict[str, str]:
        return {
            "maxOffsetsPerTrigger": str(most),
            "read_plan": str(self.read_plan.path),
            "costs": "/nonexistent",
        }

    def begin(self, *starts: int, tasks: int = 4) -> None:
        """Have the partitions 0, 1, … read from these offsets on."""
        self.read_plan.use(tasks)
        self.read_plan.end(self.read_plan.shards())
        for number, start in enumerate(starts):
            self.read_plan.begin({Shard(self.name, number): start})

    def stream(self, *starts: int, tasks: int = 4, most: int = 1_000_000) -> StreamReader:
        self.begin(*starts or (0,), tasks=tasks)
        return self.reader(most)

    def reader(self, most: int = 1_000_000) -> StreamReader:
        made = kafka_source(self.access)(self.options(most))
        return cast(StreamReader, made.streamReader(RANGES))

    def chunks(self, *wanted: tuple[int, int]) -> list[Chunk]:
        """The chunks read from these ranges of partition 0."""
        return list(read_ranges(self.access, [Range(self.name, 0, *each) for each in wanted]))

    def at(self, *offsets: int) -> Offsets:
        """These offsets of the partitions 0, 1, …, as the stream writes them."""
        told = read_plan_from(self.read_plan.path).begun
        plan = {
            (self.name, number): Reading(told.get((self.name, number), ShardStart(0, 0)), offset)
            for number, offset in enumerate(offsets)
        }
        return for_spark(plan)


def write(
    producer: Producer,
    topic: str,
    value: str | bytes | None,
    partition: int,
    wrote: Callable[[Message], None] = lambda _: None,
    **more: Any,
) -> None:
    def acknowledged(error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        wrote(message)

    producer.produce(topic, value, partition=partition, on_delivery=acknowledged, **more)


def planned(reader: StreamReader, start: Offsets, end: Offsets) -> list[Row]:
    """The ranges that tasks get as rows."""
    tasks = reader.partitions(start, end)
    return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


def between(topic: Topic, start: Offsets, end: Offsets, tasks: int = 4) -> list[Message]:
    """The records that tasks read from their ranges."""
    topic.read_plan.use(tasks)
    rows = planned(topic.reader(), start, end)
    chunks = read_ranges(topic.access, [Range(**row) for row in rows])
    return [message for chunk in chunks for message in chunk.messages]


def values(found: Sequence[Message]) -> list[str]:
    return [(message.value() or b"").decode() for message in found]


def offsets(found: Sequence[Message]) -> list[int | None]:
    return [message.offset() for message in found]


@pytest.fixture
def topic(stack: EmbeddedStack, tmp_path: Path) -> Topic:
    return Topic(stack.kafka.bootstrap_servers, tmp_path)


@pytest.fixture
def make(stack: EmbeddedStack, tmp_path: Path) -> Callable[..., Topic]:
    return partial(Topic, stack.kafka.bootstrap_servers, tmp_path)


# Exact ranges


def test_transaction_markers_and_aborted_records_are_skipped(topic: Topic) -> None:
    topic.commit("a", "b")  # offsets 0, 1; marker 2
    topic.abort("no", "no")  # 3, 4; marker 5
    topic.commit("c")  # 6; marker 7
    topic.abort("no")  # 8; marker 9
    reader = topic.stream()

    assert reader.latestOffset(topic.at(0), ALL) == topic.at(10)
    for start in range(11):
        for end in range(start, 11):
            found = between(topic, topic.at(start), topic.at(end)) if start < end else []
            wanted = [offset for offset in (0, 1, 6) if start <= offset < end]
            assert offsets(found) == wanted, (start, end)


def test_an_open_transaction_is_read_only_after_it_commits(
    topic: Topic,
) -> None:
    topic.write("a")
    stranger = topic.transaction()
    topic.write_in(stranger, "b", "c")
    topic.write("d")
    reader = topic.stream()

    first = reader.latestOffset(topic.at(0), ALL)
    assert first == topic.at(1)
    assert values(between(topic, topic.at(0), first)) == ["a"]
    assert reader.latestOffset(first, ALL) == first

    stranger.commit_transaction(30)
    second = until("the commit is seen", lambda: moved(reader, first))
    assert values(between(topic, first, second)) == ["b", "c", "d"]


def moved(reader: StreamReader, start: Offsets) -> Offsets | None:
    latest = reader.latestOffset(start, ALL)
    return latest if latest != start else None


def test_a_range_that_ends_inside_a_fetched_batch_ends_there(topic: Topic) -> None:
    topic.write(*map(str, range(10_000)))

    for start, end in ((0, 1), (1, 2), (3, 5000), (9_998, 9_999), (4_999, 10_000)):
        found = between(topic, topic.at(start), topic.at(end))
        assert values(found) == [str(number) for number in range(start, end)]


def test_a_range_read_again_is_the_same(topic: Topic) -> None:
    topic.commit(*map(str, range(500)))
    topic.write(*map(str, range(500)), headers=[("a", b"1")])

    def read() -> list[tuple[Any, ...]]:
        found = between(topic, topic.at(100), topic.at(900))
        return [(m.offset(), m.value(), m.timestamp(), m.headers()) for m in found]

    once = read()
    assert len(once) == 799  # without the marker
    assert read() == once


def test_many_ranges_of_one_task_are_never_mixed_up(make: Callable[..., Topic]) -> None:
    topic = make(6)
    for number in range(6):
        topic.write(*(f"{number}:{offset}" for offset in range(3000)), partition=number)
    steps = [0, 1, 700, 2900, 3000]

    for start, end in pairwise(steps):
        found = between(topic, topic.at(*[start] * 6), topic.at(*[end] * 6), tasks=1)
        assert sorted(values(found)) == sorted(
            f"{n}:{o}" for n in range(6) for o in range(start, end)
        )
        for message in found:
            assert message.value() == f"{message.partition()}:{message.offset()}".encode()
        assert offsets([m for m in found if m.partition() == 3]) == list(range(start, end))


def test_gaps_of_compaction_are_skipped(make: Callable[..., Topic], quick_cleaner: None) -> None:
    topic = make(
        **{
            "cleanup.policy": "compact",
            "segment.ms": "50",
            "min.cleanable.dirty.ratio": "0.01",
            "max.compaction.lag.ms": "50",
        }
    )
    for number in range(20):
        topic.write(f"a{number}", key="a")
    later_ms = int(time.time() * 1000) + 1000  # by its time, the next record needs a new segment
    topic.write("b", key="b", timestamp=later_ms)

    def compacted() -> list[Message] | None:
        found = between(topic, topic.at(0), topic.at(21))
        return found if len(found) == 2 else None  # it takes the cleaner more than one pass

    found = until("the topic is compacted", compacted, 30)
    kept = [offset or 0 for offset in offsets(found)]
    assert values(found) == ["a19", "b"]
    for start, end in ((0, 21), (0, 10), (0, kept[0]), (5, 20), (kept[0], 21)):
        assert offsets(between(topic, topic.at(start), topic.at(end))) == [
            offset for offset in kept if start <= offset < end
        ]


# Retention


def test_a_read_of_offsets_removed_by_retention_fails_with_the_remedy(topic: Topic) -> None:
    topic.write("a", "b", "c", "d")
    topic.cut(2)

    with pytest.raises(JournalLost) as raised:
        between(topic, topic.at(1), topic.at(4))

    for part in (
        f"{topic.name}/0",
        "cannot read offset 1",
        "first available one is 2",
        "retention.ms",
    ):
        assert part in str(raised.value)


def test_a_read_that_may_skip_what_retention_removed_continues_after_it(topic: Topic) -> None:
    topic.write("a", "b", "c", "d")
    topic.cut(2)
    wanted = [Range(topic.name, 0, *each) for each in ((0, 1), (1, 3), (3, 4))]

    chunks = list(read_ranges(topic.access, wanted, skip_removed=True))

    assert [message.value() for chunk in chunks for message in chunk.messages] == [b"c", b"d"]


def test_the_kept_offsets_of_a_cut_partition_are_read(topic: Topic) -> None:
    topic.write("a", "b", "c", "d")
    topic.cut(2)

    assert values(between(topic, topic.at(2), topic.at(4))) == ["c", "d"]


def test_a_shortened_partition_does_not_stop_the_others(
    make: Callable[..., Topic],
) -> None:
    topic = make(2)
    topic.write("a")
    topic.write("a", "b", partition=1)

    assert topic.stream(5, 0).latestOffset(topic.at(5, 0), ALL) == topic.at(5, 2)
    with closing(ReadableBounds(topic.access)) as ends:
        found, lost = reachable(ends, {(topic.name, 0): 5, (topic.name, 1): 0})
    assert found == {(topic.name, 1): 2}
    assert re.search(r"/0: read up to 5, but it ends at 1; .*created again", lost[topic.name, 0])
    with pytest.raises(JournalLost, match=r"cannot read offset 5, because it ends at 1;"):
        between(topic, topic.at(5), topic.at(9))


def test_a_missing_topic_or_partition_is_named_and_does_not_stop_the_others(
    topic: Topic,
) -> None:
    nowhere = f"{topic.name}.nowhere"
    topic.write("a")
    reader = topic.stream()
    topic.read_plan.begin({Shard(nowhere, 0): 3, Shard(topic.name, 7): 4})

    planned = reader.latestOffset({}, ALL)
    assert ends_of(planned) == {topic.name: {"0": 1, "7": 4}, nowhere: {"0": 3}}

    topic.write("b")
    until("reading continues", lambda: moved_on(reader, planned, {topic.name: 2}))
    with closing(ReadableBounds(topic.access)) as ends:
        _, lost = reachable(ends, {(nowhere, 0): 3, (topic.name, 7): 4, (topic.name, 0): 0})
    assert lost.keys() == {(nowhere, 0), (topic.name, 7)}
    assert f"{nowhere}/0" in lost[nowhere, 0]
    assert f"{topic.name}/7 does not exist: {topic.name} has 1 partitions" in lost[topic.name, 7]


def test_a_recreated_topic_is_read_again(topic: Topic, make: Callable[..., Topic]) -> None:
    topic.write("a")
    other = make()
    reader = topic.stream()
    topic.read_plan.begin({Shard(other.name, 0): 0})
    planned = until("both are planned", lambda: moved_on(reader, {}, {topic.name: 1}))
    other.delete()
    topic.write("b")
    planned = until("reading continues", lambda: moved_on(reader, planned, {topic.name: 2}))
    other.create()
    other.write("c")
    until("it is read again", lambda: moved_on(reader, planned, {other.name: 1}))


def moved_on(reader: StreamReader, start: Offsets, wanted: dict[str, int]) -> Offsets | None:
    found = reader.latestOffset(start, ALL)
    return found if all(ends_of(found)[name]["0"] == end for name, end in wanted.items()) else None


def ends_of(plan: Offsets) -> dict[str, dict[str, int]]:
    return {
        name: {number: end for number, (_, _, end) in places.items()}
        for name, places in plan.items()
    }


# Where a stream starts and how far a batch goes


def test_a_partition_is_read_from_where_it_was_begun_last(make: Callable[..., Topic]) -> None:
    topic = make(2)
    topic.write("a", "b", "c")
    topic.write("d", partition=1)
    reader = topic.stream(1)
    assert reader.initialOffset() == {}

    first = reader.latestOffset({}, ALL)
    assert planned(reader, {}, first) == [row_of(topic, 0, 1, 3)]

    topic.read_plan.begin({Shard(topic.name, 1): 0})
    second = reader.latestOffset(first, ALL)
    assert planned(reader, first, second) == [row_of(topic, 1, 0, 1)]

    topic.read_plan.begin({Shard(topic.name, 0): 0})
    third = reader.latestOffset(second, ALL)
    assert planned(reader, second, third) == [row_of(topic, 0, 0, 3)]

    topic.read_plan.end([Shard(topic.name, 0)])
    fourth = reader.latestOffset(third, ALL)
    assert ends_of(fourth) == {topic.name: {"1": 1}}
    assert reader.partitions(third, fourth) == [Ranges(())]

    topic.read_plan.begin({Shard(topic.name, 0): 2})
    fifth = reader.latestOffset(fourth, ALL)
    assert planned(reader, fourth, fifth) == [row_of(topic, 0, 2, 3)]


def test_a_partition_that_is_begun_ends_the_wait_for_records(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "AWAITED_S", 60.0)
    reader = topic.reader()
    topic.read_plan.use(3)
    nothing = reader.latestOffset({}, ALL)
    assert nothing == {}
    assert reader.partitions({}, nothing) == [Ranges(())] * 3  # which warms up the workers

    with ThreadPoolExecutor(1) as planning:
        waiting = planning.submit(reader.latestOffset, nothing, ALL)
        topic.begin(0)
        assert waiting.result(30) == topic.at(0)


def test_a_batch_is_limited_and_contains_small_backlogs_completely(
    make: Callable[..., Topic],
) -> None:
    topic = make(4)
    for number, count in enumerate((1000, 500, 4, 0)):
        topic.write(*map(str, range(count)), partition=number)
    reader = topic.stream(0, 0, 0, 0, most=300)

    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(300)
    assert reader.latestOffset(topic.at(0, 0, 0, 0), limit) == topic.at(148, 148, 4, 0)
    assert reader.latestOffset(topic.at(0, 0, 0, 0), ALL) == topic.at(1000, 500, 4, 0)
    assert reader.latestOffset(topic.at(900, 400, 4, 0), limit) == topic.at(1000, 500, 4, 0)


def test_whole_partitions_are_packed_into_tasks_of_similar_size() -> None:
    ranges = [Range("t", number, 0, size) for number, size in enumerate((10, 9, 8, 1, 1, 1))]

    tasks = packed(ranges, 3, {})

    assert sorted(r for task in tasks for r in task.ranges) == ranges
    assert [sum(r.end for r in task.ranges) for task in tasks] == [10, 10, 10]
    assert [r.end for r in packed(ranges, 1, {})[0].ranges] == [1, 1, 1, 8, 9, 10]
    assert len(packed(ranges, 100, {})) == 6
    assert packed([], 3, {}) == []


def test_a_partition_of_large_records_has_a_task_of_its_own() -> None:
    ranges = [Range("t", number, 0, 100) for number in range(4)]

    tasks = packed(ranges, 2, {("t", 2): 0.1})

    assert [[r.partition for r in task.ranges] for task in tasks] == [[2], [3, 1, 0]]


def test_a_new_record_ends_the_wait_at_once(topic: Topic) -> None:
    topic.write("a")
    reader = topic.stream()
    start = reader.latestOffset(topic.at(0), ALL)
    reader.latestOffset(start, ALL)  # all connections are made

    began_s = time.monotonic()
    assert reader.latestOffset(start, ALL) == start
    assert 0.4 < time.monotonic() - began_s < 2
    with ThreadPoolExecutor(1) as planning:
        waiting = planning.submit(
            lambda: until("a new record is noticed", lambda: moved(reader, start))
        )
        topic.write("b")
        assert waiting.result() == topic.at(2)


def test_the_wait_ends_for_a_new_record_in_any_partition(make: Callable[..., Topic]) -> None:
    topic = make(2)
    ends = ReadableBounds(topic.access)
    position = {(topic.name, 0): 0, (topic.name, 1): 0}

    assert not ends.wait_for_records(position, 0.2)
    for count in range(1, 4):
        for number in (0, 1):
            topic.write("x", partition=number)
            until("a new record is noticed", lambda: ends.wait_for_records(position, 0.2), 10)
            position[topic.name, number] = count
            assert not ends.wait_for_records(position, 0.2)
    ends.close()


def test_a_client_that_waits_for_nothing_is_closed(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One that is not polled keeps its statistics in memory, hundreds of kB a minute.
    with closing(ReadableBounds(topic.access)) as ends:
        assert not ends.wait_for_records({(topic.name, 0): 0}, 0.01)
        assert ends._watcher is not None
        assert not ends.wait_for_records({}, 0.01)
        assert ends._watcher is None

        monkeypatch.setattr(readable_bounds, "UNUSED_S", 0.2)
        assert not ends.wait_for_records({(topic.name, 0): 0}, 0.01)
        until("the unused client is closed", lambda: ends._watcher is None)
        assert not ends.wait_for_records({(topic.name, 0): 0}, 0.01)


# Rows of ranges


def test_a_range_is_a_row_of_four_columns_without_records(
    make: Callable[..., Topic],
) -> None:
    topic = make(3)
    topic.commit("a", "b", partition=0)
    topic.abort("no", "no", partition=2)

    found = planned(topic.stream(0, 0, 1, tasks=1), topic.at(0, 0, 1), topic.at(2, 0, 3))

    assert RANGES.simpleString() == "struct<topic:string,partition:int,start:bigint,end:bigint>"
    assert by_place(found) == [row_of(topic, 0, 0, 2), row_of(topic, 2, 1, 3)]
    assert kafka_source(topic.access)(topic.options()).schema() == RANGES


def test_the_first_batch_names_all_ranges_and_the_next_waits_for_records(
    make: Callable[..., Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "AWAITED_S", 60.0)
    topic = make(2)
    topic.abort("no", partition=1)
    reader = topic.stream(0, 2, most=10)
    limit = reader.getDefaultReadLimit()
    began_s = time.monotonic()

    first = reader.latestOffset({}, limit)

    assert time.monotonic() - began_s < 30
    assert first == topic.at(0, 2)
    assert by_place(planned(reader, {}, first)) == [
        row_of(topic, 0, 0, 0),
        row_of(topic, 1, 2, 2),
    ]
    with ThreadPoolExecutor(1) as planning:
        waiting = planning.submit(reader.latestOffset, first, limit)
        topic.write("a")
        second = waiting.result(30)
    assert second == topic.at(1, 2)
    assert planned(reader, first, second) == [row_of(topic, 0, 0, 1)]
    assert reader.reportLatestOffset() == ends_of(second)

    monkeypatch.setattr(source, "AWAITED_S", 0.2)
    began_s = time.monotonic()
    assert reader.latestOffset(second, limit) == second
    assert time.monotonic() - began_s >= 0.2


def row_of(topic: Topic, partition: int, start: int, end: int) -> Row:
    return Range(topic.name, partition, start, end)._asdict()


def by_place(found: Sequence[Row]) -> list[Row]:
    return sorted(found, key=lambda row: row["partition"])


# Chunks


def test_no_chunk_has_more_than_4000_records(topic: Topic) -> None:
    topic.write_at_once(*(b"%d" % number for number in range(10_000)))

    chunks = topic.chunks((7, 9_993))

    assert_cover(chunks, 7, 9_993)
    counts = [len(chunk.messages) for chunk in chunks]
    assert max(counts) == CHUNK_RECORDS == 4000
    assert [message.offset() for chunk in chunks for message in chunk.messages] == list(
        range(7, 9_993)
    )


def test_no_chunk_has_more_than_8_mib_of_records(topic: Topic) -> None:
    lengths = [900_000] * 25 + [1, 2, 3]
    topic.write_at_once(*(b"x" * length for length in lengths))

    chunks = topic.chunks((0, len(lengths)))

    assert_cover(chunks, 0, len(lengths))
    sizes = [sum(map(len, chunk.messages)) for chunk in chunks]
    assert CHUNK_BYTES == 8 << 20
    assert CHUNK_BYTES - 900_000 < max(sizes) <= CHUNK_BYTES
    assert [len(message) for chunk in chunks for message in chunk.messages] == lengths


def test_a_record_larger_than_a_chunk_is_a_chunk_of_its_own(make: Callable[..., Topic]) -> None:
    topic = make(**{"max.message.bytes": str(64 << 20)})
    lengths = [10, CHUNK_BYTES + 1, 20, CHUNK_BYTES, 0, 1]
    topic.write_at_once(*(b"x" * length for length in lengths))

    chunks = topic.chunks((0, 6))

    assert_cover(chunks, 0, 6)
    assert [[len(message) for message in chunk.messages] for chunk in chunks] == [
        [10], [CHUNK_BYTES + 1], [20], [CHUNK_BYTES, 0], [1],
    ]  # fmt: skip


def test_a_range_without_records_is_one_empty_chunk(topic: Topic) -> None:
    topic.abort("no", "no")
    topic.commit("a")

    assert [chunk[1:] for chunk in topic.chunks((0, 3), (1, 2), (2, 2), (4, 5), (9, 9))] == [
        (0, 3, []), (1, 2, []), (2, 2, []), (4, 5, []), (9, 9, []),
    ]  # fmt: skip
    assert topic.chunks() == []


def test_chunks_of_any_size_cover_their_ranges_in_order(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.abort("no")  # offset 0; marker 1
    topic.commit("a", "bb", "ccc")  # 2, 3, 4; marker 5
    topic.write("", "f" * 9, None, "h")  # 6, 7, 8, 9
    topic.abort("no")  # 10; marker 11
    kept = [2, 3, 4, 6, 7, 8, 9]
    wanted = [(start, end) for start in range(0, 12, 2) for end in range(start, 13)]

    for records, size in ((1, 100), (2, 100), (3, 5), (100, 4)):
        monkeypatch.setattr(ranges, "CHUNK_RECORDS", records)
        monkeypatch.setattr(ranges, "CHUNK_BYTES", size)
        chunks = topic.chunks(*wanted)
        for start, end in wanted:
            own = [chunk for chunk in chunks if chunk.range == Range(topic.name, 0, start, end)]
            assert_cover(own, start, end)
            assert [message.offset() for chunk in own for message in chunk.messages] == [
                offset for offset in kept if start <= offset < end
            ]
        for chunk in chunks:
            assert len(chunk.messages) <= records
            assert len(chunk.messages) == 1 or sum(map(len, chunk.messages)) <= size
        assert list(dict.fromkeys(chunk.range[2:] for chunk in chunks)) == wanted


def assert_cover(chunks: Sequence[Chunk], start: int, end: int) -> None:
    """Each chunk starts where the previous one ends, and contains only records of its range."""
    assert (chunks[0].start, chunks[-1].end) == (start, end)
    assert all(before.end == after.start for before, after in pairwise(chunks))
    for chunk in chunks:
        assert all(chunk.start <= (message.offset() or 0) < chunk.end for message in chunk.messages)


# Secrets


def test_secrets_reach_the_tasks_and_are_never_printed(topic: Topic) -> None:
    made = kafka_source(topic.access)(topic.options())
    reader = topic.stream()

    assert SECRET not in repr(made) + repr(reader) + repr(vars(reader)) + str(topic.access)

    def copy(what: Any) -> Any:
        return cloudpickle.loads(cloudpickle.dumps(what))  # type: ignore[no-untyped-call]

    copied = copy(made)
    assert copied.access.settings == {"sasl.password": SECRET}
    assert copy(reader).latestOffset({}, ALL) == topic.at(0)


# Inside Spark


@pytest.mark.proof
def test_spark_runs_a_batch_for_empty_ranges_at_once_without_showing_secrets(
    make: Callable[..., Topic], spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = make(2)
    spark.dataSource.register(kafka_source(topic.access))
    topic.begin(0, 0, tasks=2)
    frame = spark.readStream.format(FORMAT).options(**topic.options()).load()
    frame.explain("extended")
    read: list[list[Row]] = []

    def keep(batch: DataFrame, _: int) -> None:
        read.append(by_place([row.asDict() for row in batch.collect()]))

    query = frame.writeStream.foreachBatch(keep).trigger(processingTime="0 seconds").start()
    until("the first batch", lambda: going(query) and read)
    assert read == [[row_of(topic, 0, 0, 0), row_of(topic, 1, 0, 0)]]
    topic.commit("a", "b", partition=1)
    until("everything is planned", lambda: going(query) and read[-1][-1]["end"] == 3)
    with suppress(Exception):
        query.stop()

    assert frame.schema == RANGES
    plan = capsys.readouterr().out
    assert FORMAT in plan
    assert SECRET not in plan
    [first, *others] = [row for batch in read[1:] for row in batch]
    assert (first["partition"], first["start"]) == (1, 0)
    assert all(before["end"] == after["start"] for before, after in pairwise([first, *others]))


def going(query: StreamingQuery) -> bool:
    """Fails with the error that ended the query, if any."""
    failure = query.exception()
    if failure is not None:
        raise failure
    return True
