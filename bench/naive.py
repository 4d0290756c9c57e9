"""Contestant: a simple loop with two redis-py calls per message for intake, and three and a flush for the drain."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

import redis
from confluent_kafka import Consumer, Producer, TopicPartition

from bench.ground import Ground, Stopwatch


def run(ground: Ground, count: int) -> tuple[float, float]:
    """Seconds to store `count` requests, and to deliver them at least once."""
    client = ground.empty_redis()
    return _intake(ground, client, count), _drain(ground, client, count)


def _intake(ground: Ground, client: redis.Redis, count: int) -> float:
    consumer = Consumer(
        {
            "bootstrap.servers": ground.stack.bootstrap_servers,
            "group.id": "naive",
            "enable.auto.commit": False,
        }
    )
    watch = Stopwatch()
    consumer.assign([TopicPartition("TB", 0, 0)])
    for _ in range(count):
        message = consumer.poll(10)
        assert message is not None
        request = json.loads(message.value() or b"")
        name = str(uuid.uuid4())
        due_s = message.timestamp()[1] / 1000 + request["countdown"]
        client.set(f"msg:{name}", message.value() or b"", ex=604_800)
        client.zadd("due", {name: due_s})
    seconds = watch.read_s()
    consumer.close()
    return seconds


def _drain(ground: Ground, client: redis.Redis, count: int) -> float:
    producer = Producer({"bootstrap.servers": ground.stack.bootstrap_servers})
    watch = Stopwatch()
    delivered = 0
    while delivered < count:
        due: Any = client.zrangebyscore("due", "-inf", time.time(), start=0, num=1000)
        for name in due:
            request = json.loads(client.get(b"msg:" + name) or b"{}")
            producer.produce(request["topic"], request["message"])
            # Without it, a crash would lose requests that were removed from Redis and not sent.
            producer.flush()
            client.zrem("due", name)
            client.delete(b"msg:" + name)
            delivered += 1
    return watch.read_s()
