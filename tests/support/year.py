"""A world whose clock the test sets: months pass in seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import redis
from confluent_kafka import OFFSET_END, Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import NewTopic

from blackbox.config.wiring import formats, kafka
from blackbox.core.dispatch import Dispatch
from blackbox.core.follow_ups import FollowUps
from blackbox.core.intake import Intake
from blackbox.core.lost_payload import reread
from blackbox.core.low_water import LowWater
from blackbox.core.promotion import Promoted
from blackbox.core.recovery import Recovered, Recovery
from blackbox.core.triage import Triage
from blackbox.engine.promoter import Promoter
from blackbox.index.connection import pool
from blackbox.index.inspector import Inspector
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.own_topics import OwnTopics
from blackbox.journal.partition_reader import PartitionReader
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.shard_writer import ShardWriter
from blackbox.journal.target_topics import TargetTopics
from blackbox.journal.topics import receipts_topic
from blackbox.journal.trim import Trimmer
from blackbox.records.errors import RecoveryRequired
from blackbox.records.request import Headers, Shard
from tests.support.world import World, each_of, read_all, until

HORIZON_S = 3600
HOUR_MS = 3_600_000
YEARS_S = 315_360_000
"""No request is renewed because of its age, unless Kafka would remove it."""

DAY_MS = 24 * HOUR_MS


class Year:
    """A world whose clock the test sets: its shards are opened, filled and emptied at any simulated time."""

    written_ms = 0
    """When requests are written; 0: at the actual time."""

    def __init__(
        self, world: World, horizon_s: int = HORIZON_S, renew_after_s: int | None = YEARS_S
    ) -> None:
        self.world = world
        kept = {"hot_horizon_s": horizon_s}
        if renew_after_s is not None:
            kept["renew_after_s"] = renew_after_s
        self.environment = world.environment(**kept)
        self.settings = world.settings(**kept)
        self.access = kafka(self.settings)
        self.client = redis.Redis.from_url(world.redis.url)
        self.shards = [Shard(world.requests, 0)]
        self.began_ms = time.time_ns() // 1_000_000
        receipts = receipts_topic(world.requests)
        # Kafka does not know the simulated time, and must not be asked for its own.
        world.create(NewTopic(receipts, world.partitions, config=PAST))
        topics = OwnTopics(self.access, [world.requests], world.dead_letters)
        topics.ensure()
        until("its shard has a leader", self._has_leader)

    def _has_leader(self) -> bool:
        journal = ShardJournal(self.shards[0], self.access)
        try:
            return journal.request_bounds().end == journal.receipt_bounds().end == 0
        except RecoveryRequired:
            return False
        finally:
            journal.close()

    def ask(
        self, body: str, due_ms: int, *, id: str | None = None, partition: int = 0, **more: object
    ) -> None:
        request: dict[str, object] = {"topic": self.world.targets[0], "message": body, "at": due_ms}
        named = {"id": id} if id else {}
        self._send(request | named | more, partition)

    def cancel(self, id: str, partition: int = 0) -> None:
        self._send({"id": id, "cancel": True}, partition)

    def _send(self, request: dict[str, object], partition: int) -> None:
        value = json.dumps(request)
        self.world.send_raw(value, [], partition, timestamp_ms=self.written_ms)

    def pass_to(self, now_ms: int) -> None:
        """Open every shard at that time and deliver all due requests."""
        self.world.flush()
        for shard in self.shards:
            self._live(shard, now_ms)

    def _live(self, shard: Shard, now_ms: int) -> None:
        connections = pool(self.world.redis.url)
        index = ShardIndex(shard, connections, grace_s=self.settings.grace_s)
        journal = ShardJournal(shard, self.access)
        uncommitted = ShardJournal(shard, self.access, isolation="read_uncommitted")
        writer = ShardWriter(shard, self.access, exactly_once=True)
        intake = Intake(formats(self.settings)[shard.topic], index, self.settings.horizon_ms)
        try:
            recovered = Recovery(
                shard=shard,
                group=self.settings.group_id,
                index=index,
                journal=journal,
                writer=writer,
                confirm=lambda: None,
                apply=lambda batch, opening: intake.parse_and_store(batch, now_ms, opening),
                upcoming=lambda batch: intake.upcoming(batch, now_ms),
                now_ms=lambda: now_ms,
            ).open()
            triage = Triage(
                shard=shard,
                targets=TargetTopics(self.access),
                journal=journal,
                reread=partial(reread, intake.format),
                dead_letter_topic=self.world.dead_letters,
                follow_ups=FollowUps(shard, formats(self.settings)[shard.topic], uncommitted),
            )
            dispatch = Dispatch(index, writer, triage)
            while dispatch.tick(now_ms).is_full:
                pass
            self._look_after(shard, index, writer, recovered, now_ms)
        finally:
            for part in (index, journal, writer, uncommitted):
                part.close()
            connections.disconnect()

    def _look_after(
        self,
        shard: Shard,
        index: ShardIndex,
        writer: ShardWriter,
        recovered: Recovered,
        now_ms: int,
    ) -> None:
        """Work beside deliveries: none."""

    def promote(self, now_ms: int) -> int:
        """How many requests were promoted."""
        return sum(done.promoted for done in self.promoted(now_ms))

    def promoted(self, now_ms: int) -> list[Promoted]:
        """The results of promotion in each shard."""
        self.world.flush()
        promoter = Promoter(self.settings, self.access)
        try:
            return [promoter.promote(shard, now_ms) for shard in self.shards]
        finally:
            promoter.close()

    def promote_killed(self, now_ms: int, after_s: float) -> None:
        """A promotion that may be killed halfway."""
        command = [sys.executable, "-m", "tests.support.promoting", str(now_ms)]
        with (self.world.folder / "promoting.log").open("ab") as log:
            running = subprocess.Popen(
                command, env=os.environ | self.environment, stdout=log, stderr=log
            )
        try:
            running.wait(after_s)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()

    def standing(self, shard: int = 0) -> tuple[int, int]:
        """Entries in Redis, and requests in the cold tier."""
        with closing(Inspector.of(self.world.redis.url)) as inspector:
            found = inspector.shard_stats(self.shards[shard], 0)
            assert len(inspector.cold(self.shards[shard])[1]) == found.cold
        return found.pending, found.cold

    def forget(self) -> None:
        for key in self.client.scan_iter(f"blackbox:{{{self.world.requests}-*"):
            self.client.delete(key)

    def delivered(self) -> list[str]:
        return sorted((m.value() or b"").decode() for m in self.messages())

    def counts(self, most: int) -> bytearray:
        """How often each number below `most` was delivered."""
        counts = bytearray(most)
        for message in each_of(self.world.kafka.bootstrap_servers, self.world.targets[0]):
            counts[int(message.value() or b"")] += 1
        return counts

    def redis_bytes(self) -> int:
        memory: Any = self.client.info("memory")
        return int(memory["used_memory"])

    def messages(self, topic: str | None = None) -> list[Message]:
        return read_all(self.world.kafka.bootstrap_servers, topic or self.world.targets[0])


class PastYear(Year):
    """A year that ends now: ages of records are measured by its clock, and its journals are trimmed.

    It must be in the past, because brokers refuse future timestamps. It has the product's own horizon, age
    of renewal and retention; the world's broker and topics are those of `past_broker` and `PAST`.
    """

    def __init__(self, world: World, days: int) -> None:
        super().__init__(world, DAY_MS // 1000, renew_after_s=None)
        self.began_ms -= days * DAY_MS
        self.written_ms = self.began_ms
        known = self.access
        self.access = _PastAccess(
            known.bootstrap_servers, known.group_id, known.settings, lambda: self.written_ms
        )

    def ask_in(self, body: str, countdown_s: int, *, id: str | None = None) -> None:
        request: dict[str, object] = {"topic": self.world.targets[0], "message": body}
        named = {"id": id} if id else {}
        self._send(request | {"countdown": countdown_s} | named, 0)

    def live(self, now_ms: int) -> list[Promoted]:
        """The work of a service at that time: promote and renew, deliver, and trim."""
        self.written_ms = now_ms
        promoted = self.promoted(now_ms)
        self.pass_to(now_ms)
        return promoted

    def live_without_redis(self, now_ms: int) -> list[Promoted]:
        """The same after Redis lost everything."""
        self.forget()
        self.written_ms = now_ms
        self.pass_to(now_ms)
        return self.live(now_ms)

    def _look_after(
        self,
        shard: Shard,
        index: ShardIndex,
        writer: ShardWriter,
        recovered: Recovered,
        now_ms: int,
    ) -> None:
        """As the caretaker does, without its pauses."""
        topic_id = recovered.binding.topic_id
        low_water = LowWater(shard, index, writer, lambda: now_ms, topic_id, recovered.mark)
        with closing(index.walk()) as walk:
            while walk.slice():
                pass
            mark = low_water.write(walk.positions, walk.lowest)
        Trimmer(self.access, self.settings.retention_s * 1000).trim(shard, mark, now_ms)

    def journals(self, shard: int = 0) -> tuple[Held, Held]:
        """The records of a shard's requests and receipts that Kafka keeps."""
        journal = ShardJournal(self.shards[shard], self.access)
        try:
            bounds = journal.request_bounds(), journal.receipt_bounds()
        finally:
            journal.close()
        topics = self.world.requests, receipts_topic(self.world.requests)
        folders = [
            self.world.kafka.folder / "data" / f"{topic}-{self.shards[shard].partition}"
            for topic in topics
        ]
        requests, receipts = (
            Held(start, end, _bytes_in(folder))
            for (start, end), folder in zip(bounds, folders, strict=True)
        )
        return requests, receipts


@dataclass(frozen=True, slots=True)
class Held:
    """Offsets from `start` to `end` - 1, with their size on disk."""

    start: int
    end: int
    bytes: int

    @property
    def count(self) -> int:
        return self.end - self.start


def _bytes_in(folder: Path) -> int:
    """Of the segments that are not removed yet: as Kafka reports its log directories."""
    found = 0
    for segment in folder.glob("*.log"):
        with suppress(FileNotFoundError):  # removed between the two reads
            found += segment.stat().st_size
    return found


PAST = {"retention.ms": "-1", "message.timestamp.type": "CreateTime"}
"""Settings of topics with timestamps that differ from Kafka's clock."""


def past_broker(segment_bytes: int) -> dict[str, str]:
    """Settings of a broker that removes trimmed records at once, and none because of their age."""
    return {
        "log.segment.bytes": str(segment_bytes),
        "log.retention.ms": "-1",
        "log.retention.check.interval.ms": "200",
        "log.initial.task.delay.ms": "0",
        "log.segment.delete.delay.ms": "0",
        # Otherwise it would forget producers with old last records, and would not fence them.
        "producer.id.expiration.check.interval.ms": str(24 * DAY_MS),
    }


@dataclass(frozen=True)
class _PastAccess(KafkaAccess):
    """Clients that write at a simulated time."""

    now_ms: Callable[[], int] = lambda: 0

    def producer(self, transactional_id: str | None, *, in_flight: int = 1) -> Producer:
        producer = super().producer(transactional_id, in_flight=in_flight)
        return cast(Producer, _PastProducer(producer, self.now_ms))

    def consumer(self, **own: Any) -> Consumer:
        plain = KafkaAccess(self.bootstrap_servers, self.group_id, self.settings)
        return cast(Consumer, _PastConsumer(plain.consumer(**own), plain))


class _PastProducer:
    """Sets the timestamps of its records."""

    def __init__(self, producer: Producer, now_ms: Callable[[], int]) -> None:
        self._producer = producer
        self._now_ms = now_ms

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def produce(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | str | None = None,
        partition: int = -1,
        on_delivery: Callable[..., None] | None = None,
        callback: None = None,
        timestamp: int = 0,
        headers: Headers | None = None,
    ) -> None:
        stamp_ms = timestamp or self._now_ms()
        self._producer.produce(
            topic,
            value,
            key,
            partition,
            on_delivery,
            callback,
            stamp_ms,
            headers,  # type: ignore[arg-type]
        )


class _PastConsumer:
    """Uses only timestamps of records: brokers stamp the ends of transactions with their own clock."""

    def __init__(self, consumer: Consumer, access: KafkaAccess) -> None:
        self._consumer = consumer
        self._access = access

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def offsets_for_times(
        self, asked: Sequence[TopicPartition], timeout: float
    ) -> list[TopicPartition]:
        with closing(PartitionReader(self._access)) as reader:
            return [
                TopicPartition(at.topic, at.partition, self._first_since(reader, at))
                for at in asked
            ]

    def _first_since(self, reader: PartitionReader, at: TopicPartition) -> int:
        bounds = reader.bounds(at.topic, at.partition)
        for messages, _ in reader.read(at.topic, at.partition, *bounds):
            for message in messages:
                if message.timestamp()[1] >= at.offset:
                    return message.offset() or 0
        return OFFSET_END
