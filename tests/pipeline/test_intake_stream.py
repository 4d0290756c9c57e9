"""The complete intake stream, on Spark: a delayed shard does not delay the others, and catches up."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Event

import pytest
import redis
from confluent_kafka import Producer
from confluent_kafka.admin import NewTopic
from prometheus_client import generate_latest
from pyspark.sql import SparkSession

from blackbox.config.wiring import kafka
from blackbox.core.plan import Positions
from blackbox.embedded import EmbeddedStack
from blackbox.engine.metrics import Metrics
from blackbox.engine.spark.intake_stream import IntakeStream
from blackbox.index.connection import pool
from blackbox.index.inspector import Inspector
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.ranges import Range, read_ranges
from blackbox.records.clock import Clock
from blackbox.records.request import Shard
from tests.chaos.faults.network import FETCH
from tests.chaos.proxy import KafkaWire, Proxies, Proxy
from tests.servers.two_brokers import PlacedWorld, TwoBrokers
from tests.support.world import World, until

pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]


class Read:
    """Four shards that a stream reads, without dispatch."""

    def __init__(self, world: World, spark: SparkSession) -> None:
        self.world = world
        self.shards = [Shard(world.requests, partition) for partition in range(world.partitions)]
        self.settings = world.settings()
        self.inspector = Inspector.of(world.redis.url)
        self.client = redis.Redis.from_url(world.redis.url)
        self.has_room = Event()
        self.has_room.set()
        self.metrics = Metrics()
        self.stream = IntakeStream(
            spark, self.settings, kafka(self.settings), self.metrics, uuid.uuid4().hex,
            has_room=self.has_room, tasks=lambda: 2, pause_intake=print,
        )  # fmt: skip

    def begin(self, *shards: Shard) -> None:
        """Open a shard, as dispatch does."""
        connections = pool(self.world.redis.url)
        for shard in shards:
            with closing(ShardIndex(shard, connections, grace_s=3600)) as index:
                index.begin(Positions(0, 0))
        connections.disconnect()

    def lose(self, shard: Shard) -> None:
        for key in self.client.scan_iter(f"blackbox:{{{shard}}}:*"):
            self.client.delete(key)

    def ask(self, count: int) -> None:
        """Write so many requests to each shard."""
        asked = {"topic": self.world.targets[0], "message": "m", "countdown": 3600}
        for shard in self.shards * count:
            self.world.send_raw(json.dumps(asked), partition=shard.partition)
        self.world.flush()

    def pending(self, shard: Shard) -> int:
        return self.inspector.shard_stats(shard, Clock().earliest_ms()).pending

    def have(self, shards: Iterable[Shard], count: int) -> bool:
        return all(self.pending(shard) == count for shard in shards)

    def close(self) -> None:
        assert self.stream.stop(30)
        self.client.close()
        self.inspector.close()


@contextmanager
def reading(world: World, spark: SparkSession) -> Iterator[Read]:
    read = Read(world, spark)
    read.begin(*read.shards)
    read.stream.assign(read.shards)
    read.stream.start()
    until("all are read", lambda: read.stream.reading() == set(read.shards), 60)
    yield read
    read.close()


def test_a_stream_without_shards_warms_up_though_redis_is_full(
    world: World, spark: SparkSession
) -> None:
    read = Read(world, spark)
    read.has_room.clear()

    read.stream.start()
    until("it is warm", lambda: read.stream.is_warm, 60)
    assert read.stream.reading() == set()

    read.begin(*read.shards)
    read.stream.assign(read.shards)
    read.has_room.set()
    until("all are read", lambda: read.stream.reading() == set(read.shards), 60)
    read.close()


@pytest.fixture
def read(world: World, spark: SparkSession) -> Iterator[Read]:
    with reading(world, spark) as read:
        yield read


def test_shards_come_and_go_in_one_query(read: Read, spark: SparkSession) -> None:
    [query] = spark.streams.active
    gone, *others = read.shards
    read.stream.assign(others)
    read.ask(5)
    until("the others are read", partial(read.have, others, 5))
    assert read.stream.reading() == set(others)
    assert read.pending(gone) == 0

    read.stream.assign(read.shards)
    until("it is read again", partial(read.have, read.shards, 5))
    until("all are read", lambda: read.stream.reading() == set(read.shards))

    assert [other.id for other in spark.streams.active] == [query.id]


@pytest.mark.proof
@pytest.mark.parametrize("count", [5, 4100])
def test_a_shard_catches_up_without_delaying_the_others(read: Read, count: int) -> None:
    lost, *others = read.shards
    read.lose(lost)

    read.ask(count)

    until("the others are read", partial(read.have, others, count))
    until("it is named", lambda: "the index is empty" in read.stream.why_not_read().get(lost, ""))
    assert read.stream.reading() == set(others)
    read.begin(lost)
    until("the shard has caught up", lambda: read.pending(lost) == count, 60)
    until("all are read again", lambda: read.stream.reading() == set(read.shards), 60)


class OneElsewhere(PlacedWorld):
    """The last partition of its request topic is on the second broker."""

    def request_topic(self) -> NewTopic:
        made = super().request_topic()
        places = [[1]] * (self.partitions - 1) + [[2]]
        return NewTopic(made.topic, self.partitions, replica_assignment=places, config=made.config)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxies = Proxies()
    proxy = Proxy(proxies, 0, KafkaWire)
    yield proxy
    proxy.close()
    proxies.close()


@pytest.fixture
def apart(proxy: Proxy, stack: EmbeddedStack, tmp_path: Path) -> Iterator[World]:
    def behind(port: int) -> int:
        proxy.to_port = port
        return proxy.port

    brokers = TwoBrokers(tmp_path, behind)
    brokers.start()
    with OneElsewhere(brokers.first, stack.redis, tmp_path, "spark") as world:
        yield world
    brokers.stop()


@pytest.mark.proof
@pytest.mark.alone
def test_a_partition_with_hanging_fetches_delays_one_batch_only(
    apart: World, proxy: Proxy, spark: SparkSession
) -> None:
    with reading(apart, spark) as read:
        *others, hanging = read.shards
        proxy.hang(FETCH)

        read.ask(5)
        until(
            "it is named", lambda: "nothing read" in read.stream.why_not_read().get(hanging, ""), 30
        )
        until("the others are read", lambda: read.stream.reading() == set(others), 60)
        until("they are stored", partial(read.have, others, 5), 30)
        for count in range(6, 16):  # while it is retried
            began = time.monotonic()
            read.ask(1)
            until("they are stored", partial(read.have, others, count))
            assert time.monotonic() - began < 4
        shown = generate_latest(read.metrics.registry).decode()
        assert f'blackbox_shard_unread{{shard="{hanging}"}} 1.0' in shown

        proxy.mend()
        until("the shard has caught up", lambda: read.pending(hanging) == 15, 90)
        until("all are read again", lambda: read.stream.reading() == set(read.shards), 60)


@pytest.mark.proof
def test_many_silent_partitions_delay_a_read_hardly_longer_than_one(
    apart: World, proxy: Proxy
) -> None:
    topic = f"{apart.name}.far"
    apart.create(NewTopic(topic, 8, replica_assignment=[[2]] * 8))
    producer = Producer({"bootstrap.servers": apart.kafka.bootstrap_servers})
    for partition in range(8):
        producer.produce(topic, "x", partition=partition)
    assert producer.flush(10) == 0
    proxy.hang(FETCH)
    lost = list[int]()
    began = time.monotonic()

    read = read_ranges(
        KafkaAccess(apart.kafka.bootstrap_servers, apart.name),
        [Range(topic, partition, 0, 1) for partition in range(8)],
        lambda wanted, why: lost.append(wanted.partition),
        silence_s=1.0,
    )

    assert list(read) == []
    assert lost == list(range(8))
    assert time.monotonic() - began < 12
