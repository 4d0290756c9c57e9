"""Write jobs to Kafka, and read back what was delivered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from bench.peers.contestant import Plan, Scheduled
from bench.peers.jobs import schedule
from bench.peers.results import Executions
from blackbox.embedded import EmbeddedStack

QUIET_S = 5.0


class Record(NamedTuple):
    """One request: its key, value and headers."""

    key: bytes | None
    value: bytes
    headers: list[tuple[str, str | bytes | None]]


Encode = Callable[[int, str, int], Record]
"""A request for this number, message and due time."""


def create(stack: EmbeddedStack, topics: dict[str, dict[str, str]], partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
    new = [NewTopic(name, partitions, config=config) for name, config in topics.items()]
    for future in admin.create_topics(new).values():
        future.result()


def write(stack: EmbeddedStack, topic: str, plan: Plan, encode: Encode) -> Scheduled:
    """Returns when Kafka has acknowledged all requests."""
    producer = Producer(
        {
            "bootstrap.servers": stack.bootstrap_servers,
            "linger.ms": 10,
            "queue.buffering.max.messages": 2_000_000,
            "enable.idempotence": True,
            "max.in.flight": 1,
        }
    )
    began, began_cpu = time.monotonic(), time.process_time()
    for jobs in _jobs(plan):
        for message, due_ms in jobs:
            one = encode(int(message[:7]), message, due_ms)
            producer.produce(topic, one.value, one.key, headers=one.headers)
        producer.poll(0)
    if producer.flush(120):
        raise SystemExit("Kafka did not take the requests within 120 s")
    return Scheduled(time.monotonic() - began, time.process_time() - began_cpu)


def _jobs(plan: Plan) -> Iterator[schedule.Jobs]:
    if plan.per_s:
        return schedule.paced(plan.first, plan.count, plan.per_s)
    return schedule.at(plan.first, plan.count, plan.due_ms)


class Target:
    """A target topic, from its beginning. Its timestamps are those of the broker."""

    def __init__(self, stack: EmbeddedStack, topic: str, partitions: int) -> None:
        self._topic, self._partitions = topic, range(partitions)
        settings: dict[str, Any] = {
            "bootstrap.servers": stack.bootstrap_servers,
            "group.id": "bench",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 20,
        }
        self._consumer = Consumer(settings)
        self._consumer.assign([TopicPartition(topic, p, 0) for p in self._partitions])
        self._read: list[tuple[int, int, int]] = []
        self._reached = dict.fromkeys(self._partitions, 0)

    def ends(self) -> dict[int, int]:
        return {
            p: self._consumer.get_watermark_offsets(TopicPartition(self._topic, p), timeout=10)[1]
            for p in self._partitions
        }

    def executions(self) -> Executions:
        """All that were delivered until now. Each record is read once."""
        ends, deadline = self.ends(), time.monotonic() + QUIET_S
        # The last offsets can be those of markers of transactions, which are not records.
        while any(self._reached[p] < ends[p] - 1 for p in ends) and time.monotonic() < deadline:
            messages = self._consumer.consume(10_000, timeout=0.2)
            if messages:
                deadline = time.monotonic() + QUIET_S
            for message in messages:
                self._reached[message.partition() or 0] = (message.offset() or 0) + 1
                value = message.value() or b""
                self._read.append((int(value[:7]), int(value[8:21]), message.timestamp()[1]))
            if not messages and all(self._reached[p] >= ends[p] - 2 for p in ends):
                break
        read = np.array(self._read, np.int64).reshape(-1, 3)
        return Executions(read[:, 0], read[:, 1], read[:, 2])

    def close(self) -> None:
        self._consumer.close()
