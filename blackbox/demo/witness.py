"""The demo's independent consumer: it reads from Kafka without blackbox's own access code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic

from blackbox.demo.verdict import Seen
from blackbox.embedded import EmbeddedError

ANSWER_S = 10.0
AT_ONCE = 10_000


class Witness:
    """Reads topics from their beginning, read_committed. Use it from one thread only."""

    def __init__(self, bootstrap_servers: str, topics: Sequence[str]) -> None:
        self._consumer: Consumer = Consumer(
            {
                "bootstrap.servers": bootstrap_servers,
                "group.id": "demo-witness",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                # EOF alone shows the end: transaction markers take offsets without being records.
                "enable.partition.eof": True,
                "log_level": 0,
            }
        )
        described = self._consumer.list_topics(timeout=ANSWER_S).topics
        self._partitions = [
            TopicPartition(topic, partition, OFFSET_BEGINNING)
            for topic in topics
            for partition in described[topic].partitions
        ]
        # Not subscribe: joining a group takes time, and another member would get a share.
        self._consumer.assign(self._partitions)
        self._ended: set[tuple[str | None, int | None]] = set()

    def read(self, timeout_s: float) -> list[Seen]:
        """The records that have arrived, after waiting up to `timeout_s` for the first one."""
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        records: list[Seen] = []
        for message in (first, *self._consumer.consume(AT_ONCE, timeout=0)):
            error = message.error()
            if error is None:
                records.append(_seen(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                self._ended.add((message.topic(), message.partition()))
            else:
                raise KafkaException(error)
        return records

    def read_to_end(self) -> list[Seen]:
        """All records up to the current end. Raises EmbeddedError when nothing arrives for 10 s."""
        records: list[Seen] = []
        while len(self._ended) < len(self._partitions):
            ended = len(self._ended)
            found = self.read(ANSWER_S)
            if not found and len(self._ended) == ended:
                why = "the host may be overloaded; try again"
                raise EmbeddedError(f"nothing read from Kafka for {ANSWER_S:g} s; {why}")
            records += found
        return records

    def close(self) -> None:
        self._consumer.close()


def create_topics(bootstrap_servers: str, topics: Sequence[str], partitions: int) -> None:
    """Create topics whose timestamps are set by the broker."""
    # Otherwise the service under test would itself say when it delivered.
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    stamped = {"message.timestamp.type": "LogAppendTime"}
    asked = admin.create_topics([NewTopic(topic, partitions, config=stamped) for topic in topics])
    for created in asked.values():
        created.result(ANSWER_S)


def _seen(message: Message) -> Seen:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    headers: Any = message.headers() or []
    stamp_ms = message.timestamp()[1]
    return Seen(topic, partition, offset, stamp_ms, message.key(), message.value(), headers)
