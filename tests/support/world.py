"""A world for one test: its own topics, services as processes, and the bookkeeping of its requests.

The books use only what was sent and what a plain read_committed consumer reads.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

import psutil
import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic

from blackbox.config.settings import Settings, load
from blackbox.embedded import EmbeddedKafka, EmbeddedRedis
from tests.support.forked import Forked

T = TypeVar("T")

both_engines = pytest.mark.parametrize("engine", ["process", "spark"], indirect=True)
"""Runs a test that has a world once on each engine."""

AT_LENGTH = bool(os.environ.get("BLACKBOX_TEST_AT_LENGTH"))
"""Whether tests use more requests, faults and rows than a quick run needs."""

both_engines_at_length = both_engines if AT_LENGTH else pytest.mark.usefixtures("engine")
"""Like `both_engines`, for code that the engines share: on Spark only at length."""

both_engines_in_proof = pytest.mark.parametrize(
    "engine", ["process", pytest.param("spark", marks=pytest.mark.proof)], indirect=True
)
"""Like `both_engines`, for tests that take long on Spark: there only in `make proof`."""

DAEMON = "blackbox.engine.spark.daemon"
SESSION_S = 1.5
READY_S = 180.0
PARTITIONS = 4
LARGEST_BYTES = 5_000_000
APPENDED = {"message.timestamp.type": "LogAppendTime"}
LISTENS = re.compile(r"health and metrics on (http://\S+)")


def until(
    what: str, ask: Callable[[], T | None], timeout_s: float = 60.0, *, every_s: float = 0.02
) -> T:
    """Wait for a condition of a real server; fails at the deadline."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answer = ask()
        if answer:
            return answer
        time.sleep(every_s)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def _must_be_there(error: KafkaError | None, message: Message) -> None:
    assert error is None, f"{message.topic()}/{message.partition()}: {error}"


class Asked(NamedTuple):
    """A request as it was sent; `place` is its partition and offset in the request topic.

    `due_ms` counts from the timestamp that Kafka gave its record.
    """

    body: str
    due_ms: int
    place: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The deliveries, judged by a consumer that knows only the requests."""

    delivered: int
    lost: list[str]
    duplicated: list[str]
    early_ms: list[int]
    unasked: list[str]
    late_ms: list[int] = field(repr=False)

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.duplicated or self.early_ms or self.unasked)

    def late_at(self, share: float) -> int:
        return self.late_ms[min(len(self.late_ms) - 1, int(len(self.late_ms) * share))]


class ServiceProcess:
    """A blackbox service as an operator runs it: a process configured by its environment only."""

    def __init__(self, environment: dict[str, str], log: Path, options: Sequence[str] = ()) -> None:
        self._address = ""
        self._frozen: list[psutil.Process] = []
        self.log = log
        self._file = log.open("ab")
        own = environment | {"BLACKBOX_HTTP_PORT": "0"}
        self.process = self._begin(own, options)

    def _begin(
        self, environment: dict[str, str], options: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "blackbox", "run", *options],
            env=os.environ | environment,
            stdout=self._file,
            stderr=self._file,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def address(self) -> str:
        """Its HTTP address; "" while it does not listen."""
        if not self._address:
            told = LISTENS.search(self.log.read_text())
            self._address = told[1] if told is not None else ""
        return self._address

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of an HTTP GET; (0, "") while it does not listen."""
        if not self.address:
            return 0, ""
        try:
            with urllib.request.urlopen(f"{self.address}{path}", timeout=2) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def wait_ready(self) -> ServiceProcess:
        """Wait until every owned shard is open."""

        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            return self.get("/readyz")[0] == 200

        until(f"the service is ready, see {self.log}", ready, READY_S)
        return self

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = [line for line in self.get("/metrics")[1].splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """Freeze it and everything it started, like a paused host."""
        self._frozen = self.family()
        for process in self._frozen:
            process.suspend()

    def thaw(self) -> None:
        for process in self._frozen:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def family(self) -> list[psutil.Process]:
        """The process, and all that it started."""
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.pid)
            return [own, *own.children(recursive=True)]
        return []

    def python_workers(self) -> list[psutil.Process]:
        """The Python workers of its Spark that are alive now."""
        found = []
        for process in self.family():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                parent = process.parent()
                if DAEMON in process.cmdline() and parent and DAEMON in parent.cmdline():
                    found.append(process)
        return found

    def jvm(self) -> psutil.Process | None:
        """The JVM of its Spark."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):  # Python workers come and go
                if process.name() == "java":
                    return process
        return None

    def stop(self, timeout_s: float = 10.0) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._file.close()


class ForkedService(ServiceProcess):
    """A service that is forked from a process which has imported all modules: it starts ten times faster.

    The functions `before` are called in its process before it runs.
    """

    def __init__(
        self,
        environment: dict[str, str],
        log: Path,
        options: Sequence[str] = (),
        before: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._before = before
        super().__init__(environment, log, options)

    def _begin(
        self, environment: dict[str, str], options: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        forked = Forked(os.environ | environment, self.log, options, self._before)
        return cast("subprocess.Popen[bytes]", forked)  # it has the methods that services need


class World:
    """Its own topics on given servers; everything it started ends with it."""

    def __init__(
        self,
        kafka: EmbeddedKafka,
        redis: EmbeddedRedis,
        folder: Path,
        engine: str = "process",
        partitions: int = PARTITIONS,
    ) -> None:
        self.engine = engine
        self.service_type: Callable[..., ServiceProcess] = ForkedService
        self.partitions = partitions
        self.name = f"w{uuid.uuid4().hex[:8]}"
        self.kafka = kafka
        self.redis = redis
        self.folder = folder
        self.requests = f"{self.name}.TB"
        self.format_name = "countdown"
        self.targets = [f"{self.name}.orders", f"{self.name}.billing"]
        self.dead_letters = f"{self.name}.dead"
        self.kept: dict[str, str] = {}
        self.asked: dict[str, Asked] = {}
        self.services: list[ServiceProcess] = []
        self._received: list[Message] = []
        self._consumer: Consumer | None = None
        self._producer = Producer(
            {
                "bootstrap.servers": kafka.bootstrap_servers,
                "linger.ms": 5,
                "enable.idempotence": True,
                "max.in.flight": 1,
                "log_level": 0,
                "topic.metadata.refresh.interval.ms": 1_000,
                "message.max.bytes": LARGEST_BYTES,
            }
        )

    def __enter__(self) -> World:
        topics = [self.request_topic(), NewTopic(self.dead_letters, 1)]
        topics += [NewTopic(target, self.partitions, config=APPENDED) for target in self.targets]
        self.create(*topics)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for service in self.services:
            service.close()
        if self._consumer is not None:
            self._consumer.close()

    def request_topic(self) -> NewTopic:
        """The request topic as it is created, and recreated."""
        config = APPENDED | self.kept | {"max.message.bytes": str(LARGEST_BYTES)}
        return NewTopic(self.requests, self.partitions, config=config)

    def create(self, *topics: NewTopic) -> None:
        admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap_servers})
        for future in admin.create_topics(list(topics)).values():
            future.result()
        until("the broker knows the new topics", lambda: self._have_leaders(admin, topics))

    def empty(self, topic: str) -> None:
        """Remove all records of a topic, as retention does."""
        admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap_servers})
        partitions = admin.list_topics(topic, timeout=10).topics[topic].partitions
        everything = [TopicPartition(topic, partition, OFFSET_END) for partition in partitions]
        for future in admin.delete_records(everything).values():
            future.result(30)

    @staticmethod
    def _have_leaders(admin: AdminClient, topics: Sequence[NewTopic]) -> bool:
        known = admin.list_topics(timeout=10).topics
        return all(
            topic.topic in known
            and all(at.leader >= 0 for at in known[topic.topic].partitions.values())
            for topic in topics
        )

    def environment(self, **more: object) -> dict[str, str]:
        """The environment of a service of this world; `poll_interval_ms=100` also sets that variable."""
        config = self.folder / "kafka.properties"
        config.write_text(
            f"session.timeout.ms={int(SESSION_S * 1000)}\nheartbeat.interval.ms=300\n"
        )
        variables = {
            "kafka_bootstrap_servers": self.kafka.bootstrap_servers,
            "kafka_config": config,
            "redis_url": self.redis.url,
            "request_topics": f"{self.requests}:{self.format_name}",
            "dead_letter_topic": self.dead_letters,
            "group_id": self.name,
            "engine": self.engine,
        }
        return {f"BLACKBOX_{k.upper()}": str(v) for k, v in (variables | more).items()}

    def settings(self, **more: object) -> Settings:
        """The same for code of the test's own process."""
        return load(
            kafka_bootstrap_servers=self.kafka.bootstrap_servers,
            redis_url=self.redis.url,
            request_topics=f"{self.requests}:{self.format_name}",
            dead_letter_topic=self.dead_letters,
            group_id=self.name,
            **more,
        )

    def start_service(self, *, only: str | None = None, **more: object) -> ServiceProcess:
        """Start a service process, without waiting for it; `only` one half of a Spark engine."""
        log = self.folder / f"service-{len(self.services)}.log"
        options = [] if only is None else ["--only", only]
        service = self.service_type(self.environment(**more), log, options)
        self.services.append(service)
        return service

    def ask(
        self,
        count: int,
        *,
        within_s: float,
        from_s: float = 0.0,
        size: int = 100,
        partition: int | None = None,
    ) -> None:
        """Send requests with countdowns spread evenly over `from_s` to `within_s`; they are then in TB."""
        first = len(self.asked)
        for number in range(first, first + count):
            share = (number * 7919 % count) / count
            countdown_ms = int(1000 * (from_s + share * (within_s - from_s)))
            body = f"{number:07d}".ljust(size, ".")
            target = self.targets[number % len(self.targets)]
            request = {"topic": target, "message": body, "countdown": countdown_ms / 1000}
            self._send(request, body, countdown_ms, partition)
        self.flush()

    def _send(
        self, request: dict[str, object], body: str, countdown_ms: int, partition: int | None
    ) -> None:
        def acknowledged(error: KafkaError | None, message: Message) -> None:
            assert error is None, error
            place = message.partition(), message.offset()
            assert place[0] is not None
            assert place[1] is not None
            due_ms = message.timestamp()[1] + countdown_ms
            self.asked[body] = Asked(body, due_ms, (place[0], place[1]))

        headers = [("CALLER_SERVICE", b"tests"), ("trace", body[:7].encode())]
        self.send_raw(json.dumps(request), headers, partition, acknowledged)

    def send_raw(
        self,
        value: str | bytes | None,
        headers: Sequence[tuple[str, str | bytes | None]] = (),
        partition: int | None = None,
        acknowledged: Callable[[KafkaError | None, Message], None] = _must_be_there,
        *,
        key: bytes | None = None,
        timestamp_ms: int = 0,
    ) -> None:
        """Write any record to the request topic; 0: it is written now."""
        place: dict[str, Any] = {} if partition is None else {"partition": partition}
        while True:
            try:
                self._producer.produce(
                    self.requests,
                    value,
                    key,
                    headers=list(headers),
                    on_delivery=acknowledged,
                    timestamp=timestamp_ms,
                    **place,
                )
            except BufferError:
                self._producer.poll(0.1)
                continue
            self._producer.poll(0)
            return

    def writable_partitions(self) -> int:
        """How many partitions of the request topic the producer of the books knows."""
        return len(self._producer.list_topics(self.requests, 10).topics[self.requests].partitions)

    def flush(self) -> None:
        assert self._producer.flush(30) == 0

    def received(self, topic: str | None = None) -> list[Message]:
        """Everything that a read_committed consumer can read by now, or only that of one topic."""
        consumer = self._consumer or self._observe()
        while (message := consumer.poll(0.05)) is not None:
            for found in (message, *consumer.consume(10_000, timeout=0)):
                assert found.error() is None, found.error()
                self._received.append(found)
        return [m for m in self._received if topic is None or m.topic() == topic]

    def _observe(self) -> Consumer:
        self._consumer = Consumer(
            {
                "bootstrap.servers": self.kafka.bootstrap_servers,
                "group.id": f"{self.name}.observer",
                "isolation.level": "read_committed",
                "topic.metadata.refresh.interval.ms": 1_000,
                "enable.auto.commit": False,
            }
        )
        metadata = self._consumer.list_topics(timeout=10).topics
        self._consumer.assign(
            [
                TopicPartition(topic, partition, OFFSET_BEGINNING)
                for topic in (*self.targets, self.dead_letters)
                for partition in metadata[topic].partitions
            ]
        )
        return self._consumer

    def wait_delivered(self, timeout_s: float = 60.0) -> Verdict:
        """Wait until every request of the books is delivered, then a moment for duplicates."""

        def all_out() -> bool:
            bodies = {m.value() for m in self.received() if m.topic() in self.targets}
            return len(bodies) >= len(self.asked)

        try:
            until("every message is delivered", all_out, timeout_s)
        except AssertionError:
            return self.verdict()
        return self.verdict()

    def verdict(self, *, late_from: int = 0) -> Verdict:
        """Compare requests with deliveries; lateness without the first `late_from` requests."""
        counts: Counter[str] = Counter()
        early: list[int] = []
        late: list[int] = []
        for message in self.received():
            if message.topic() not in self.targets:
                continue
            body = (message.value() or b"").decode()
            counts[body] += 1
            if body in self.asked:
                late_ms = message.timestamp()[1] - self.asked[body].due_ms
                if int(body[:7]) >= late_from:
                    late.append(late_ms)
                if late_ms < 0:
                    early.append(late_ms)
                self._check_headers(message, self.asked[body])
        return Verdict(
            delivered=sum(counts.values()),
            lost=sorted(self.asked.keys() - counts.keys()),
            duplicated=sorted(body for body, count in counts.items() if count > 1),
            early_ms=early,
            unasked=sorted(counts.keys() - self.asked.keys()),
            late_ms=sorted(late),
        )

    def _check_headers(self, message: Message, asked: Asked) -> None:
        headers = dict(message.headers() or [])
        assert list(headers) == [
            "CALLER_SERVICE", "trace", "blackbox-id", "blackbox-due-ms", "blackbox-source",
        ]  # fmt: skip
        assert headers["trace"] == asked.body[:7].encode()


def read_all(bootstrap_servers: str, topic: str) -> list[Message]:
    """All records of a topic that a read_committed consumer can read now."""
    return list(each_of(bootstrap_servers, topic))


def each_of(bootstrap_servers: str, *topics: str) -> Iterator[Message]:
    """The same of several topics, one by one."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 20,
            "receive.message.max.bytes": 1_000_000_000,  # also for batches that blackbox cannot read
        }
    )
    yield from read_with(consumer, *topics)


def read_with(consumer: Consumer, *topics: str) -> Iterator[Message]:
    """The same with a given consumer that reports ends of partitions; it is closed at the end."""
    parts = [
        (topic, partition)
        for topic in topics
        for partition in consumer.list_topics(topic, timeout=10).topics[topic].partitions
    ]
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for topic, number in parts])
    ended: set[tuple[str | None, int | None]] = set()
    while len(ended) < len(parts):
        message = consumer.poll(10)
        assert message is not None, f"no answer from {topics}"
        for one in (message, *consumer.consume(10_000, timeout=0)):
            error = one.error()
            if error is None:
                yield one
            else:
                assert error.code() == KafkaError._PARTITION_EOF, error
                ended.add((one.topic(), one.partition()))
    consumer.close()
