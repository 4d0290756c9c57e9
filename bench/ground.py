"""The environment of all contestants: one request topic full of requests, one target, one Redis."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import redis
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from blackbox.embedded import EmbeddedStack
from blackbox.journal.topics import receipts_topic
from blackbox.records.request import Shard

MESSAGE_BYTES = 200
TARGET = "out"
TARGET_PARTITIONS = 4
HEADERS: list[tuple[str, str | bytes | None]] = [("CALLER_SERVICE", b"bench"), ("trace", b"0af7651916cd43dd")]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ground:
    """Servers, and a shard whose request topic holds `count` requests that are due at once."""

    stack: EmbeddedStack
    shard: Shard
    count: int

    def empty_redis(self) -> redis.Redis:
        client = redis.Redis.from_url(self.stack.redis_url)
        client.flushall()
        return client


def prepare(stack: EmbeddedStack, count: int) -> Ground:
    shard = Shard("TB", 0)
    bootstrap: dict[str, Any] = {"bootstrap.servers": stack.bootstrap_servers}
    topics = [
        NewTopic("TB", 1, config={"message.timestamp.type": "LogAppendTime"}),
        NewTopic(receipts_topic("TB"), 1),
        NewTopic(TARGET, TARGET_PARTITIONS),
        NewTopic("blackbox.dead-letters", 1),
    ]
    admin = AdminClient(bootstrap)
    for future in admin.create_topics(topics).values():
        future.result()
    producer = Producer(
        bootstrap
        | {
            "linger.ms": 20,
            # All at once, because the loop below never polls.
            "queue.buffering.max.messages": count + 1,
            "enable.idempotence": True,
            # With several, librdkafka may report a record that a new leader refused as delivered.
            "max.in.flight": 1,
        }
    )
    for number in range(count):
        body = f"{number:07d}".ljust(MESSAGE_BYTES, ".")
        request = {"topic": TARGET, "message": body, "countdown": 0}
        producer.produce("TB", json.dumps(request), headers=HEADERS)
    if producer.flush(120):
        raise SystemExit("Kafka did not take the requests within 120 s")
    return Ground(stack, shard, count)


class Stopwatch:
    """Seconds of wall time since its creation."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def read_s(self) -> float:
        return time.perf_counter() - self._began
