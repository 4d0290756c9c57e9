"""Requests at an even rate, and a consumer that reads each message at its target."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Event
from types import TracebackType
from typing import Any

import numpy as np
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from numpy.typing import NDArray

MESSAGE_BYTES = 200
HEADERS: list[tuple[str, str | bytes | None]] = [("CALLER_SERVICE", b"soak")]
SHORTEST_S, LONGEST_S = 2.0, 6.0
NUMBER_DIGITS = 10
BODY = b"." * (MESSAGE_BYTES - NUMBER_DIGITS)
READ = 5000


class Traffic:
    """Room for `most` requests. Due times are derived from Kafka's timestamps."""

    def __init__(self, bootstrap_servers: str, requests: str, target: str, most: int) -> None:
        self._requests, self._target = requests, target
        self._bootstrap: dict[str, Any] = {
            "bootstrap.servers": bootstrap_servers,
            "log_level": 0,
            "topic.metadata.refresh.interval.ms": 5_000,
        }
        self._producer = Producer(
            self._bootstrap
            | {
                "linger.ms": 5,
                "enable.idempotence": True,
                "max.in.flight": 1,
                "queue.buffering.max.messages": 1_000_000,
                "queue.buffering.max.kbytes": 2_000_000,
            }
        )
        self.due_ms: NDArray[np.int64] = np.zeros(most, np.int64)
        self.delivered_ms: NDArray[np.int64] = np.zeros(most, np.int64)
        self.times: NDArray[np.uint8] = np.zeros(most, np.uint8)
        self.partitions: NDArray[np.uint8] = np.zeros(most, np.uint8)
        """The partition of the request topic that each was written to."""
        self.sent = self.seen = 0
        self._over = Event()
        self._threads = ThreadPoolExecutor(2)

    def __enter__(self) -> Traffic:
        self._watching = self._threads.submit(self._watch)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._threads.shutdown()
        if error is None:
            self._watching.result()

    def flood(self, count: int) -> None:
        """Requests due at once, as fast as Kafka takes them."""
        for _ in range(count):
            self._send(0)
        self.flush()

    @contextmanager
    def flowing(self, per_s: int) -> Iterator[None]:
        """Send requests with countdowns of 2 to 6 s during the context, as long as there is room."""
        over = Event()
        flow = self._threads.submit(self._flow, per_s, over)
        try:
            yield
        finally:
            over.set()
            flow.result()

    def _flow(self, per_s: int, over: Event) -> None:
        began, first = time.monotonic(), self.sent
        while not over.is_set():
            due = first + int((time.monotonic() - began) * per_s)
            for number in range(self.sent, min(due, len(self.times))):
                share = (number * 7919 % 1000) / 1000
                self._send(int(1000 * (SHORTEST_S + share * (LONGEST_S - SHORTEST_S))))
            self._producer.poll(0.005)
        self.flush()

    def flush(self) -> None:
        assert self._producer.flush(120) == 0

    def _send(self, countdown_ms: int) -> None:
        number = self.sent
        value = b'{"topic":"%s","message":"%010d%s","countdown":%d.%03d}' % (
            self._target.encode(), number, BODY, *divmod(countdown_ms, 1000),
        )  # fmt: skip
        report = partial(self._acknowledged, number, countdown_ms)
        while True:
            try:
                self._producer.produce(self._requests, value, headers=HEADERS, on_delivery=report)
                break
            except BufferError:
                self._producer.poll(0.05)
        self.sent += 1

    def _acknowledged(
        self, number: int, countdown_ms: int, error: KafkaError | None, message: Message
    ) -> None:
        assert error is None, error
        self.due_ms[number] = message.timestamp()[1] + countdown_ms
        self.partitions[number] = message.partition() or 0

    def _watch(self) -> None:
        consumer = Consumer(
            self._bootstrap
            | {
                "group.id": "soak",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
            }
        )
        found = consumer.list_topics(self._target, 10).topics[self._target].partitions
        consumer.assign([TopicPartition(self._target, partition, 0) for partition in found])
        while not self._over.is_set():
            for message in consumer.consume(READ, 0.2):
                assert message.error() is None, message.error()
                number = int((message.value() or b"")[:NUMBER_DIGITS])
                self.delivered_ms[number] = message.timestamp()[1]
                self.times[number] += 1
                self.seen += 1
        consumer.close()
