"""The stream of intake as a whole, on Spark: what holds up one shard holds up no other, and it is made up for."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import closing
from threading import Event

import pytest
import redis
from pyspark.sql import SparkSession

from blackbox.clock import Clock
from blackbox.connect import kafka
from blackbox.index.connection import pool
from blackbox.index.inspector import Inspector
from blackbox.index.shard_index import ShardIndex
from blackbox.metrics import Metrics
from blackbox.pipeline import intake_stream
from blackbox.pipeline.intake_stream import IntakeStream
from blackbox.plan import Labels
from blackbox.request import Shard
from tests.world import World, until

pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]


class Read:
    """Four shards that a stream reads, and no dispatch beside it."""

    def __init__(self, world: World, spark: SparkSession) -> None:
        self.world = world
        self.shards = [Shard(world.requests, partition) for partition in range(world.partitions)]
        self.settings = world.settings()
        self.inspector = Inspector.of(world.redis.url)
        self.client = redis.Redis.from_url(world.redis.url)
        has_room = Event()
        has_room.set()
        self.stream = IntakeStream(
            spark, self.settings, kafka(self.settings), Metrics(), uuid.uuid4().hex,
            has_room=has_room, tasks=lambda: 2, tell_full=print,
        )  # fmt: skip

    def begin(self, *shards: Shard) -> None:
        """What dispatch does when it opens a shard."""
        connections = pool(self.world.redis.url)
        for shard in shards:
            with closing(ShardIndex(shard, connections, grace_s=3600)) as index:
                index.begin(Labels(0, 0))
        connections.disconnect()

    def lose(self, shard: Shard) -> None:
        for key in self.client.scan_iter(f"blackbox:{{{shard}}}:*"):
            self.client.delete(key)

    def ask(self, count: int) -> None:
        """So many of each shard."""
        asked = {"topic": self.world.targets[0], "message": "m", "countdown": 3600}
        for shard in self.shards * count:
            self.world.send_raw(json.dumps(asked), partition=shard.partition)
        self.world.flush()

    def pending(self, shard: Shard) -> int:
        return self.inspector.standing(shard, Clock().earliest_ms()).pending

    def close(self) -> None:
        assert self.stream.stop(30)
        self.client.close()
        self.inspector.close()


@pytest.fixture
def read(world: World, spark: SparkSession) -> Iterator[Read]:
    read = Read(world, spark)
    read.begin(*read.shards)
    read.stream.assign(read.shards)
    read.stream.start()
    until("all are read", lambda: read.stream.reading() == set(read.shards), 60)
    yield read
    read.close()


@pytest.mark.parametrize("at_once", [4000, 2])
def test_what_one_shard_missed_is_made_up_for_and_the_others_do_not_wait(
    read: Read, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(intake_stream, "TRIED_RECORDS", at_once)
    lost, *others = read.shards
    read.lose(lost)

    read.ask(5)

    until("the others are read", lambda: all(read.pending(shard) == 5 for shard in others))
    until("it is named", lambda: "the index is empty" in read.stream.why_not_read().get(lost, ""))
    assert read.stream.reading() == set(others)
    read.begin(lost)
    until("it is made up for", lambda: read.pending(lost) == 5, 60)
    until("all are read again", lambda: read.stream.reading() == set(read.shards), 60)
