"""What the Kafka source reads for Spark, on a real broker; below Spark where that says the same."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.streaming.query import StreamingQuery

from blackbox.doubt import JournalLost
from blackbox.embedded import EmbeddedStack
from blackbox.journal import ranges
from blackbox.journal.access import KafkaAccess
from blackbox.journal.ranges import CHUNK_BYTES, CHUNK_RECORDS, Chunk, Ends, Range, read_ranges
from blackbox.pipeline import source
from blackbox.pipeline.source import (
    FORMAT,
    RANGES,
    SCHEMA,
    StreamReader,
    TableReader,
    fair,
    kafka_source,
    packed,
)
from tests.raw_record import write_with_header
from tests.world import until

pytestmark = pytest.mark.service

ALL = ReadAllAvailable()
SECRET = "not-for-any-page"

Row = dict[str, Any]
Offsets = dict[str, dict[str, int]]


class Topic:
    """A topic of the test's own, and ways to write to it and to read it back."""

    def __init__(self, servers: str, partitions: int = 1, **config: str) -> None:
        self.name = f"source.{uuid.uuid4().hex[:8]}"
        self.servers = servers
        self.admin = AdminClient({"bootstrap.servers": self.servers})
        for future in self.admin.create_topics(
            [NewTopic(self.name, partitions, config=config)]
        ).values():
            future.result(30)
        until("the topic is known", lambda: self.name in self.admin.list_topics().topics)
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

    @property
    def access(self) -> KafkaAccess:
        # Takes part in nothing, but is what an operator's file may hold.
        return KafkaAccess(self.servers, "source", {"sasl.password": SECRET})

    def write(self, *values: str | bytes | None, partition: int = 0, **more: Any) -> None:
        for value in values:
            write(self._producer, self.name, value, partition, **more)
        assert self._producer.flush(30) == 0

    def write_at_once(self, *values: bytes) -> None:
        """All in one compressed batch, which a consumer then has all at once."""
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
        """Write in a transaction of their own: a marker follows them."""
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
        """The broker writes it after it has answered; what is written next has to come behind it."""
        end = TopicPartition(self.name, partition)
        until("the marker", lambda: self._ends.get_watermark_offsets(end)[1] == self._last + 2)

    def cut(self, offset: int, partition: int = 0) -> None:
        """What retention does: everything below `offset` is gone."""
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

    def stream(self, **options: str) -> StreamReader:
        made = kafka_source(self.access)({"subscribe": self.name} | options)
        return cast(StreamReader, made.streamReader(SCHEMA))

    def table(self, **options: str) -> TableReader:
        made = kafka_source(self.access)({"subscribe": self.name} | options)
        return cast(TableReader, made.reader(SCHEMA))

    def chunks(self, *wanted: tuple[int, int]) -> list[Chunk]:
        """What is read of these ranges of partition 0."""
        return list(read_ranges(self.access, [Range(self.name, 0, *each) for each in wanted]))

    def at(self, *offsets: int) -> Offsets:
        """These offsets of the partitions 0, 1, …, as the stream spells them."""
        return {self.name: {str(number): offset for number, offset in enumerate(offsets)}}


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


def rows(reader: StreamReader | TableReader, tasks: Sequence[Any]) -> list[Row]:
    return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


def between(reader: StreamReader, start: Offsets, end: Offsets) -> list[Row]:
    return rows(reader, reader.partitions(start, end))


def values(found: Sequence[Row]) -> list[str]:
    return [row["value"].decode() for row in found]


@pytest.fixture
def topic(stack: EmbeddedStack) -> Topic:
    return Topic(stack.kafka.bootstrap_servers)


@pytest.fixture
def make(stack: EmbeddedStack) -> Callable[..., Topic]:
    return partial(Topic, stack.kafka.bootstrap_servers)


# What a row is


def test_the_columns_are_those_of_sparks_own_kafka_source() -> None:
    assert SCHEMA.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )


def test_null_and_empty_are_told_apart(topic: Topic) -> None:
    topic.write(None, b"", b"x")
    topic.write(b"x", key=b"")
    topic.write(b"x", key=b"\xff\x00")

    found = rows(topic.table(), topic.table().partitions())

    assert [row["value"] for row in found] == [None, b"", b"x", b"x", b"x"]
    assert [row["key"] for row in found] == [None, None, None, b"", b"\xff\x00"]
    assert [(row["topic"], row["partition"], row["offset"]) for row in found] == [
        (topic.name, 0, offset) for offset in range(5)
    ]


def test_headers_are_null_without_any_and_else_in_order_with_repeats(topic: Topic) -> None:
    pairs = [("a", b"1"), ("b", None), ("a", b""), ("ä", b"\xff")]
    topic.write("none")
    topic.write("some", headers=pairs)

    found = rows(topic.table(), topic.table().partitions())

    assert found[0]["headers"] is None
    assert found[1]["headers"] == [{"key": key, "value": value} for key, value in pairs]


def test_a_record_with_an_unreadable_header_name_is_kept_and_says_so(topic: Topic) -> None:
    topic.write("before", headers=[("a", b"1")])
    write_with_header(topic.servers, topic.name, b"\xff\xfe", b"odd")
    topic.write("after", headers=[("a", b"2")])

    found = rows(topic.table(), topic.table().partitions())

    assert values(found) == ["before", "odd", "after"]
    assert found[0]["headers"] == [{"key": "a", "value": b"1"}]
    assert [header["key"] for header in found[1]["headers"]] == [None]
    assert found[1]["headers"][0]["value"].startswith(b"a header name is not UTF-8: ")
    assert found[2]["headers"] == [{"key": "a", "value": b"2"}]


@pytest.mark.parametrize(("stamped", "kind"), [("CreateTime", 0), ("LogAppendTime", 1)])
def test_timestamps_say_whose_clock_they_are_of(
    make: Callable[..., Topic], stamped: str, kind: int
) -> None:
    topic = make(**{"message.timestamp.type": stamped})
    asked_ms = 1_700_000_000_123
    before_ms = int(time.time() * 1000)
    topic.write("x", timestamp=asked_ms)

    [found] = rows(topic.table(), topic.table().partitions())

    found_ms = int(found["timestamp"].timestamp() * 1000 + 0.5)
    assert found["timestampType"] == kind
    assert found_ms == asked_ms if kind == 0 else before_ms <= found_ms <= time.time() * 1000


def test_a_time_that_spark_cannot_hold_does_not_stop_the_stream(
    make: Callable[..., Topic],
) -> None:
    topic = make(**{"message.timestamp.after.max.ms": str((1 << 63) - 1)})
    topic.write("x", timestamp=(1 << 62))
    topic.write("y")

    reader = topic.table()
    found = [b for task in reader.partitions() for b in reader.read(task)]

    assert [value.as_py() for batch in found for value in batch["value"]] == [b"x", b"y"]


# Exact ranges


def test_transaction_markers_and_aborted_records_are_passed_over(topic: Topic) -> None:
    topic.commit("a", "b")  # offsets 0, 1; marker 2
    topic.abort("no", "no")  # 3, 4; marker 5
    topic.commit("c")  # 6; marker 7
    topic.abort("no")  # 8; marker 9
    reader = topic.stream()

    assert reader.latestOffset(topic.at(0), ALL) == topic.at(10)
    for start in range(11):
        for end in range(start, 11):
            found = between(reader, topic.at(start), topic.at(end))
            wanted = [offset for offset in (0, 1, 6) if start <= offset < end]
            assert [row["offset"] for row in found] == wanted, (start, end)


def test_nothing_of_an_open_transaction_is_read_and_nothing_skipped_when_it_commits(
    topic: Topic,
) -> None:
    topic.write("a")
    stranger = topic.transaction()
    topic.write_in(stranger, "b", "c")
    topic.write("d")
    reader = topic.stream()

    first = reader.latestOffset(topic.at(0), ALL)
    assert first == topic.at(1)
    assert values(between(reader, topic.at(0), first)) == ["a"]
    assert reader.latestOffset(first, ALL) == first

    stranger.commit_transaction(30)
    second = until("the commit is seen", lambda: moved(reader, first))
    assert values(between(reader, first, second)) == ["b", "c", "d"]


def moved(reader: StreamReader, start: Offsets) -> Offsets | None:
    latest = reader.latestOffset(start, ALL)
    return latest if latest != start else None


def test_a_range_that_ends_inside_a_fetched_batch_ends_there(topic: Topic) -> None:
    topic.write(*map(str, range(10_000)))
    reader = topic.stream()

    for start, end in ((0, 1), (1, 2), (3, 5000), (9_998, 9_999), (4_999, 10_000)):
        found = between(reader, topic.at(start), topic.at(end))
        assert values(found) == [str(number) for number in range(start, end)]


def test_a_range_read_again_is_the_same(topic: Topic) -> None:
    topic.commit(*map(str, range(500)))
    topic.write(*map(str, range(500)), headers=[("a", b"1")])
    reader = topic.stream()

    once = between(reader, topic.at(100), topic.at(900))
    assert between(reader, topic.at(100), topic.at(900)) == once
    assert between(topic.stream(), topic.at(100), topic.at(900)) == once


def test_many_ranges_of_one_task_are_never_mixed_up(make: Callable[..., Topic]) -> None:
    topic = make(6)
    for number in range(6):
        topic.write(*(f"{number}:{offset}" for offset in range(3000)), partition=number)
    reader = topic.stream(tasks="1")
    steps = [0, 1, 700, 2900, 3000]

    for start, end in pairwise(steps):
        found = between(reader, topic.at(*[start] * 6), topic.at(*[end] * 6))
        assert sorted(values(found)) == sorted(
            f"{n}:{o}" for n in range(6) for o in range(start, end)
        )
        for row in found:
            assert row["value"] == f"{row['partition']}:{row['offset']}".encode()
        assert [r["offset"] for r in found if r["partition"] == 3] == list(range(start, end))


def test_holes_of_compaction_are_passed_over(
    make: Callable[..., Topic], quick_cleaner: None
) -> None:
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

    def compacted() -> list[Row] | None:
        found = rows(topic.table(), topic.table().partitions())
        return found if len(found) < 21 else None

    found = until("the topic is compacted", compacted, 30)
    kept = [row["offset"] for row in found]
    reader = topic.stream()
    assert values(found)[-2:] == ["a19", "b"]
    for start, end in ((0, 21), (0, 10), (0, kept[0]), (5, 20), (kept[0], 21)):
        assert [row["offset"] for row in between(reader, topic.at(start), topic.at(end))] == [
            offset for offset in kept if start <= offset < end
        ]


@pytest.fixture
def quick_cleaner(stack: EmbeddedStack) -> Iterator[None]:
    """A broker that looks for something to compact all the time, instead of every 15 s."""
    admin = AdminClient({"bootstrap.servers": stack.kafka.bootstrap_servers})
    [broker] = admin.list_topics(timeout=10).brokers

    def change(operation: AlterConfigOpType) -> None:
        entry = ConfigEntry("log.cleaner.backoff.ms", "50", incremental_operation=operation)
        whole = ConfigResource(ResourceType.BROKER, str(broker), incremental_configs=[entry])
        for future in admin.incremental_alter_configs([whole]).values():
            future.result(30)

    change(AlterConfigOpType.SET)
    yield
    change(AlterConfigOpType.DELETE)


# Retention


def test_offsets_that_retention_removed_stop_the_read_and_it_says_what_to_do(topic: Topic) -> None:
    topic.write("a", "b", "c", "d")
    topic.cut(2)

    with pytest.raises(JournalLost) as raised:
        between(topic.stream(), topic.at(1), topic.at(4))

    for part in (f"{topic.name}/0", "offset 1 is wanted", "first one kept is 2", "retention.ms"):
        assert part in str(raised.value)


def test_the_kept_offsets_of_a_cut_partition_are_read(topic: Topic) -> None:
    topic.write("a", "b", "c", "d")
    topic.cut(2)
    reader = topic.stream()

    assert reader.initialOffset() == topic.at(2)
    assert values(between(reader, topic.at(2), topic.at(4))) == ["c", "d"]


def test_a_partition_that_became_shorter_stops_the_stream(topic: Topic) -> None:
    topic.write("a")

    with pytest.raises(JournalLost, match=r"was read up to 5, but ends at 1; .*created again"):
        topic.stream().latestOffset(topic.at(5), ALL)
    with pytest.raises(JournalLost, match=r"offset 5 is wanted, but it ends at 1;"):
        between(topic.stream(), topic.at(5), topic.at(9))


def test_a_topic_that_does_not_exist_is_named(topic: Topic) -> None:
    with pytest.raises(JournalLost, match=f"{topic.name}.nowhere"):
        topic.stream(subscribe=f"{topic.name}.nowhere").initialOffset()


# Where a stream starts and how far a batch goes


def test_a_stream_starts_where_it_is_told(make: Callable[..., Topic]) -> None:
    topic = make(3)
    for number in range(3):
        topic.write("a", "b", "c", partition=number)
    topic.cut(1, partition=2)

    def start(offsets: str) -> Offsets:
        return topic.stream(startingOffsets=offsets).initialOffset()

    assert topic.stream().initialOffset() == topic.at(0, 0, 1)
    assert start("earliest") == topic.at(0, 0, 1)
    assert start("latest") == topic.at(3, 3, 3)
    assert start(json.dumps({topic.name: {"1": 2}})) == topic.at(0, 2, 1)
    assert start(json.dumps({topic.name: {"0": -1, "1": -2, "2": 3}})) == topic.at(3, 0, 3)


def test_only_assigned_partitions_are_read(make: Callable[..., Topic]) -> None:
    topic = make(3)
    made = kafka_source(topic.access)({"assign": json.dumps({topic.name: [2, 0]})})
    reader = made.streamReader(SCHEMA)

    assert reader.initialOffset() == {topic.name: {"0": 0, "2": 0}}


def test_a_batch_is_limited_and_shared_in_proportion_to_what_waits(
    make: Callable[..., Topic],
) -> None:
    topic = make(4)
    for number, count in enumerate((1000, 500, 4, 0)):
        topic.write(*map(str, range(count)), partition=number)
    reader = topic.stream(maxOffsetsPerTrigger="300")

    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(300)
    assert reader.latestOffset(topic.at(0, 0, 0, 0), limit) == topic.at(199, 99, 1, 0)
    assert reader.latestOffset(topic.at(0, 0, 0, 0), ALL) == topic.at(1000, 500, 4, 0)
    assert reader.latestOffset(topic.at(900, 400, 4, 0), limit) == topic.at(1000, 500, 4, 0)
    assert topic.stream().getDefaultReadLimit() == ALL


def test_every_partition_moves_however_small_the_limit() -> None:
    start = {("t", 0): 0, ("t", 1): 0, ("t", 2): 7}
    end = {("t", 0): 1_000_000, ("t", 1): 1, ("t", 2): 7}

    assert fair(start, end, 1) == {("t", 0): 1, ("t", 1): 1, ("t", 2): 7}


def test_whole_partitions_are_packed_into_tasks_of_similar_size() -> None:
    ranges = [Range("t", number, 0, size) for number, size in enumerate((10, 9, 8, 1, 1, 1))]

    tasks = packed(ranges, 3)

    assert sorted(r for task in tasks for r in task.ranges) == ranges
    assert [sum(r.end for r in task.ranges) for task in tasks] == [10, 10, 10]
    assert len(packed(ranges, None)) == 6
    assert len(packed(ranges, 100)) == 6
    assert packed([], 3) == []


def test_news_ends_the_wait_for_it_at_once(topic: Topic) -> None:
    topic.write("a")
    reader = topic.stream()
    start = reader.latestOffset(topic.at(0), ALL)
    reader.latestOffset(start, ALL)  # all connections are made

    began_s = time.monotonic()
    assert reader.latestOffset(start, ALL) == start
    assert 0.4 < time.monotonic() - began_s < 2
    with ThreadPoolExecutor(1) as planning:
        waiting = planning.submit(lambda: until("news", lambda: moved(reader, start)))
        topic.write("b")
        assert waiting.result() == topic.at(2)


def test_news_is_waited_for_from_every_position(make: Callable[..., Topic]) -> None:
    topic = make(2)
    ends = Ends(topic.access)
    position = {(topic.name, 0): 0, (topic.name, 1): 0}

    assert not ends.wait_for_news(position, 0.2)
    for count in range(1, 4):
        for number in (0, 1):
            topic.write("x", partition=number)
            until("news", lambda: ends.wait_for_news(position, 0.2), 10)
            position[topic.name, number] = count
            assert not ends.wait_for_news(position, 0.2)
    ends.close()


def test_partitions_that_are_added_are_read_from_their_first_offset(topic: Topic) -> None:
    topic.write("a")
    reader = topic.stream()
    start = reader.latestOffset(reader.initialOffset(), ALL)
    topic.grow(3)
    topic.write("b", "c", partition=2)

    found: list[Row] = []
    position = start
    while len(found) < 2:
        end = until("news", lambda at=position: moved(reader, at))  # type: ignore[misc]
        found += between(reader, position, end)
        position = end

    assert [(row["partition"], row["value"]) for row in found] == [(2, b"b"), (2, b"c")]
    assert position == topic.at(1, 0, 2)


def test_what_is_available_now_is_fixed_when_the_query_starts(topic: Topic) -> None:
    topic.write("a", "b", "c")
    reader = topic.stream(maxOffsetsPerTrigger="2")
    reader.prepareForTriggerAvailableNow()
    topic.write("too late")

    first = reader.latestOffset(reader.initialOffset(), ReadMaxRows(2))
    second = reader.latestOffset(first, ReadMaxRows(2))

    assert (first, second) == (topic.at(2), topic.at(3))
    assert reader.latestOffset(second, ReadMaxRows(2)) == second
    assert reader.reportLatestOffset() == topic.at(4)


# Ranges that a task reads itself


def test_a_range_is_a_row_of_four_columns_and_none_holds_a_record(
    make: Callable[..., Topic],
) -> None:
    topic = make(3)
    topic.commit("a", "b", partition=0)
    topic.abort("no", "no", partition=2)
    reader = topic.stream(ranges="true", tasks="1")

    found = between(reader, topic.at(0, 0, 1), topic.at(2, 0, 3))

    assert RANGES.simpleString() == "struct<topic:string,partition:int,start:bigint,end:bigint>"
    assert found == [row_of(topic, 0, 0, 2), row_of(topic, 2, 1, 3)]
    for options, schema in (({"ranges": "true"}, RANGES), ({"ranges": "false"}, SCHEMA)):
        made = kafka_source(topic.access)({"subscribe": topic.name} | options)
        assert made.schema() == schema


def test_reading_the_ranges_gives_the_records_that_the_source_gives(
    make: Callable[..., Topic],
) -> None:
    topic = make(3)
    for number in range(3):
        topic.commit(*(f"{number}:{n}" for n in range(5)), partition=number)
        topic.abort("no", partition=number)
    start, end = topic.at(1, 0, 8), topic.at(6, 8, 8)

    planned = between(topic.stream(ranges="true", tasks="2"), start, end)
    read = [m for c in read_ranges(topic.access, [Range(**r) for r in planned]) for m in c.messages]

    assert sorted((m.partition(), m.offset(), m.value()) for m in read) == sorted(
        (r["partition"], r["offset"], r["value"]) for r in between(topic.stream(), start, end)
    )
    assert len(read) == 4 + 5


def test_the_first_batch_of_ranges_names_them_all_at_once_and_the_next_waits_for_news(
    make: Callable[..., Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "NEWS_S", 60.0)
    topic = make(2)
    topic.abort("no", partition=1)
    reader = topic.stream(ranges="true", startingOffsets="latest", maxOffsetsPerTrigger="10")
    limit = reader.getDefaultReadLimit()
    began_s = time.monotonic()

    start = reader.initialOffset()
    first = reader.latestOffset(start, limit)

    assert time.monotonic() - began_s < 30
    assert start == first == topic.at(0, 2)
    assert by_place(between(reader, start, first)) == [
        row_of(topic, 0, 0, 0),
        row_of(topic, 1, 2, 2),
    ]
    with ThreadPoolExecutor(1) as planning:
        waiting = planning.submit(reader.latestOffset, first, limit)
        topic.write("a")
        second = waiting.result(30)
    assert second == topic.at(1, 2)
    assert between(reader, first, second) == [row_of(topic, 0, 0, 1)]

    monkeypatch.setattr(source, "NEWS_S", 0.2)
    began_s = time.monotonic()
    assert reader.latestOffset(second, limit) == second
    assert time.monotonic() - began_s >= 0.2


def test_a_stream_of_records_plans_nothing_where_there_is_nothing(topic: Topic) -> None:
    reader = topic.stream()

    assert reader.latestOffset(topic.at(0), ALL) == topic.at(0)
    assert reader.partitions(topic.at(0), topic.at(0)) == []


def test_ranges_of_a_new_partition_start_at_its_first_offset(topic: Topic) -> None:
    reader = topic.stream(ranges="true")

    assert between(reader, topic.at(0), topic.at(0, 0)) == []
    assert between(reader, topic.at(0, 0), topic.at(0, 4)) == [row_of(topic, 1, 0, 4)]


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


def test_a_range_without_records_is_one_chunk_without_any(topic: Topic) -> None:
    topic.abort("no", "no")
    topic.commit("a")

    assert [chunk[1:] for chunk in topic.chunks((0, 3), (1, 2), (2, 2), (4, 5), (9, 9))] == [
        (0, 3, []), (1, 2, []), (2, 2, []), (4, 5, []), (9, 9, []),
    ]  # fmt: skip
    assert topic.chunks() == []


def test_however_small_the_chunks_those_of_each_range_cover_it_in_order(
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
    """Each chunk begins where the one before it ends, and holds nothing from elsewhere."""
    assert (chunks[0].start, chunks[-1].end) == (start, end)
    assert all(before.end == after.start for before, after in pairwise(chunks))
    for chunk in chunks:
        assert all(chunk.start <= (message.offset() or 0) < chunk.end for message in chunk.messages)


# Tables


def test_a_table_is_read_between_the_offsets_asked_for(make: Callable[..., Topic]) -> None:
    topic = make(2)
    topic.write("a", "b", "c", partition=0)
    topic.write("d", "e", partition=1)

    def read(**options: str) -> list[str]:
        reader = topic.table(**options)
        return sorted(values(rows(reader, reader.partitions())))

    one = json.dumps({topic.name: {"0": 1}})
    assert read() == ["a", "b", "c", "d", "e"]
    assert read(startingOffsets=one) == ["b", "c", "d", "e"]
    assert read(endingOffsets=one) == ["a", "d", "e"]
    assert read(startingOffsets=one, endingOffsets=json.dumps({topic.name: {"0": 2, "1": 0}})) == ["b"]  # fmt: skip
    assert read(startingOffsets=one, endingOffsets=json.dumps({topic.name: {"0": 1, "1": 0}})) == []
    with pytest.raises(ValueError, match=r"endingOffsets=.*/0: 9: wanted: at most 3"):
        read(endingOffsets=json.dumps({topic.name: {"0": 9}}))
    with pytest.raises(ValueError, match=r"/0: starts at 9, behind its end 3"):
        read(startingOffsets=json.dumps({topic.name: {"0": 9}}))
    table = topic.table(startingOffsets=one, ranges="true")
    assert by_place(rows(table, table.partitions())) == [
        row_of(topic, 0, 1, 3), row_of(topic, 1, 0, 2),
    ]  # fmt: skip


# Options and secrets


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "subscribe"),
        ({"subscribe": "a", "assign": '{"a":[0]}'}, "subscribe"),
        ({"subscribe": "a,,b"}, "subscribe=a,,b"),
        ({"subscribe": "a b"}, "subscribe=a b"),
        ({"assign": '{"a":0}'}, 'assign={"a":0}'),
        ({"assign": "a"}, "assign=a"),
        ({"assign": '{"a":["0"]}'}, 'assign={"a":["0"]}'),
        ({"subscribe": "a", "startingOffsets": "first"}, "startingOffsets=first"),
        ({"subscribe": "a", "startingOffsets": '{"a":{"0":-3}}'}, "startingOffsets={"),
        ({"subscribe": "a", "startingOffsets": '{"a":{"x":3}}'}, "startingOffsets={"),
        ({"subscribe": "a", "startingOffsets": '{"b":{"0":3}}'}, "startingOffsets={"),
        ({"subscribe": "a", "endingOffsets": "5"}, "endingOffsets=5"),
        ({"subscribe": "a", "maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger=0"),
        ({"subscribe": "a", "tasks": "many"}, "tasks=many"),
        ({"subscribe": "a", "ranges": "yes"}, "ranges=yes"),
        ({"subscribe": "a", "positions": "true"}, "positions=true"),
        ({"subscribe": "a", "kafka.bootstrap.servers": "b:9092"}, "kafka.bootstrap.servers="),
    ],
)
def test_a_bad_option_is_named_with_its_value(options: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match="wanted: ") as raised:
        kafka_source(KafkaAccess("nowhere:1", "g"))(options).schema()
    assert str(raised.value).startswith(f"option {named}")


def test_options_that_only_a_stream_or_only_a_table_has() -> None:
    made = kafka_source(KafkaAccess("nowhere:1", "g"))
    for options in ({"endingOffsets": "latest"}, {"endingOffsets": '{"a":{"0":1}}'}):
        with pytest.raises(ValueError, match="endingOffsets"):
            made({"subscribe": "a"} | options).streamReader(SCHEMA)
    for options in (
        {"maxOffsetsPerTrigger": "1"}, {"startingOffsets": "latest"}, {"endingOffsets": "earliest"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(options))):
            made({"subscribe": "a"} | options).reader(SCHEMA)


def test_a_partition_that_is_not_read_cannot_be_given_an_offset(topic: Topic) -> None:
    with pytest.raises(ValueError, match=f"startingOffsets={topic.name}/9"):
        topic.stream(startingOffsets=json.dumps({topic.name: {"9": 1}})).initialOffset()


def test_secrets_travel_to_the_tasks_and_never_print(topic: Topic) -> None:
    made = kafka_source(topic.access)({"subscribe": topic.name})
    reader = topic.stream()

    assert SECRET not in repr(made) + repr(reader) + repr(vars(reader)) + str(topic.access)

    def copy(what: Any) -> Any:
        return cloudpickle.loads(cloudpickle.dumps(what))  # type: ignore[no-untyped-call]

    copied = copy(made)
    assert copied.access.settings == {"sasl.password": SECRET}
    assert copy(reader).initialOffset() == topic.at(0)


# Inside Spark


def test_spark_reads_a_topic_as_a_table_without_showing_secrets(
    make: Callable[..., Topic], spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = make(2)
    topic.write("a", "b", partition=0, headers=[("h", b"1")], key="k")
    topic.write("c", None, partition=1)
    spark.dataSource.register(kafka_source(topic.access))

    frame = spark.read.format(FORMAT).option("subscribe", topic.name).load()
    found = {(r.partition, r.offset): r for r in frame.collect()}
    frame.explain("extended")

    assert frame.schema == SCHEMA
    assert {at: row.value for at, row in found.items()} == {
        (0, 0): b"a", (0, 1): b"b", (1, 0): b"c", (1, 1): None,
    }  # fmt: skip
    assert found[0, 0].headers[0].asDict() == {"key": "h", "value": b"1"}
    assert found[1, 0].headers is None
    plan = capsys.readouterr().out
    assert FORMAT in plan
    assert SECRET not in plan


def test_spark_reads_what_is_available_goes_on_from_there_and_stops_on_lost_records(
    make: Callable[..., Topic], spark: SparkSession, tmp_path: Path
) -> None:
    topic = make(4)
    for number in range(4):
        topic.commit(*(f"{number}:{n}" for n in range(100)), partition=number)
    spark.dataSource.register(kafka_source(topic.access))
    options = {"subscribe": topic.name, "maxOffsetsPerTrigger": "250", "tasks": "2"}
    frame = spark.readStream.format(FORMAT).options(**options).load()
    read: list[list[str]] = []

    def keep(batch: DataFrame, _: int) -> None:
        found = [row.value.decode() for row in batch.collect()]
        if found:  # a batch may only say that there is a new partition
            read.append(found)

    writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", tmp_path.as_uri())
    assert writer.trigger(availableNow=True).start().awaitTermination(60)
    assert sorted(value for batch in read for value in batch) == sorted(
        f"{number}:{n}" for number in range(4) for n in range(100)
    )
    assert list(map(len, read)) == [4 * (250 // 4), 400 - 4 * (250 // 4)]

    query = writer.trigger(processingTime="0 seconds").start()
    topic.write("more", partition=3)
    until("it goes on where it ended", lambda: going(query) and read[2:] == [["more"]])
    topic.grow(5)
    topic.write("new", partition=4)
    until("the new partition is read", lambda: going(query) and read[3:] == [["new"]])

    stranger = topic.transaction()
    topic.write_in(stranger, "lost", "lost", partition=4)
    topic.cut(3, partition=4)
    stranger.commit_transaction(30)
    until("the query has stopped", lambda: not query.isActive)
    assert "retention.ms" in str(query.exception())
    assert f"{topic.name}/4: offset 1 is wanted" in str(query.exception())
    assert len(read) == 4


def test_spark_runs_a_batch_for_empty_ranges_at_once(
    make: Callable[..., Topic], spark: SparkSession
) -> None:
    topic = make(2)
    spark.dataSource.register(kafka_source(topic.access))
    options = {"subscribe": topic.name, "ranges": "true", "tasks": "2"}
    frame = spark.readStream.format(FORMAT).options(**options).load()
    read: list[list[Row]] = []

    def keep(batch: DataFrame, _: int) -> None:
        read.append(by_place([row.asDict() for row in batch.collect()]))

    query = frame.writeStream.foreachBatch(keep).trigger(processingTime="0 seconds").start()
    until("the first batch", lambda: going(query) and read)
    assert read == [[row_of(topic, 0, 0, 0), row_of(topic, 1, 0, 0)]]
    topic.commit("a", "b", partition=1)
    until("all is planned", lambda: going(query) and read[-1][-1]["end"] == 3)
    with suppress(Exception):
        query.stop()

    assert frame.schema == RANGES
    [first, *others] = [row for batch in read[1:] for row in batch]
    assert (first["partition"], first["start"]) == (1, 0)
    assert all(before["end"] == after["start"] for before, after in pairwise([first, *others]))


def going(query: StreamingQuery) -> bool:
    """Fails with what ended the query, if something did."""
    failure = query.exception()
    if failure is not None:
        raise failure
    return True
