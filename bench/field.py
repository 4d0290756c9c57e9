"""A service on either engine with topics of its own, its load, and what it costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import redis
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from bench.ground import HEADERS, MESSAGE_BYTES
from blackbox.embedded import EmbeddedStack
from blackbox.embedded.tcp_ports import free_port

TARGET_PARTITIONS = 4
# Emptying a Redis with millions of requests takes some seconds.
PATIENCE_S = 120
# Countdowns of the lateness runs. A countdown shorter than the time of intake makes a message late.
SHORTEST_S, LONGEST_S = 2.0, 6.0

DEADLINE_S = 900.0
FORGOTTEN_AT_ONCE = 5_000
ALIKE_AT_ONCE = 50_000


class Pod:
    """A service that can be started again, crashed and stopped."""

    def __init__(self, environment: Mapping[str, str], port: int, log: Path) -> None:
        self._port = port
        self._log = log
        self._environment = os.environ | environment | {"BLACKBOX_HTTP_PORT": str(port)}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "blackbox", "run"],
                # A session, so that a crash can end the whole group, with Spark's JVM and its workers.
                env=self._environment, stdout=log, stderr=log, start_new_session=True,
                # Not the current folder, which Python would search before another checkout.
                cwd=self._log.parent,
            )  # fmt: skip

    def is_ready(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self._port}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def crash(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            if how == signal.SIGKILL:
                os.killpg(self._process.pid, how)
            else:
                self._process.send_signal(how)
            self._process.wait(60)
            self._process = None


class Field:
    """Topics of one engine's run, and the service that works on them.

    Its messages have `message_bytes`. `cluster`: the URL of a Redis Cluster, which is used instead of the
    stack's Redis.
    """

    def __init__(
        self,
        stack: EmbeddedStack,
        engine: str,
        partitions: int,
        folder: Path,
        *,
        message_bytes: int = MESSAGE_BYTES,
        cluster: str | None = None,
    ) -> None:
        self._bootstrap: dict[str, Any] = {"bootstrap.servers": stack.bootstrap_servers}
        self._redis: Any = (
            redis.Redis.from_url(stack.redis_url, socket_timeout=PATIENCE_S)
            if cluster is None
            else redis.RedisCluster.from_url(cluster, socket_timeout=PATIENCE_S)
        )
        self._redis.flushall()
        self._message_bytes = message_bytes
        self.name = f"{engine}{uuid.uuid4().hex[:6]}"
        self.requests, self.target = f"{self.name}.TB", f"{self.name}.out"
        self.partitions = partitions
        appended = {"message.timestamp.type": "LogAppendTime"}
        admin = AdminClient(self._bootstrap)
        for future in admin.create_topics(
            [
                NewTopic(self.requests, partitions, config=appended),
                NewTopic(self.target, TARGET_PARTITIONS, config=appended),
            ]
        ).values():
            future.result()
        self.port = free_port()
        self.log = folder / f"{self.name}.log"
        variables = {
            "KAFKA_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
            "REDIS_URL": cluster or stack.redis_url,
            "REQUEST_TOPICS": f"{self.requests}:countdown",
            "DEAD_LETTER_TOPIC": f"{self.name}.dead",
            "GROUP_ID": self.name,
            "ENGINE": engine,
        }
        self.environment = {f"BLACKBOX_{name}": str(value) for name, value in variables.items()}
        self._producer = Producer(
            self._bootstrap
            | {
                "linger.ms": 10,
                "queue.buffering.max.messages": 2_000_000,
                "enable.idempotence": True,
                "max.in.flight": 1,
            }
        )

    @contextmanager
    def service(self) -> Iterator[psutil.Process]:
        """A service that is ready, until it is stopped; `log` is its log."""
        self.log.unlink(missing_ok=True)
        pod = Pod(self.environment, self.port, self.log)
        pod.start()
        try:
            wait("the service is ready", pod.is_ready)
            yield psutil.Process(pod.pid)
        finally:
            pod.stop()

    def pod(self, name: str) -> Pod:
        """A service with a stable name, as in a StatefulSet."""
        environment = self.environment | {"BLACKBOX_INSTANCE_ID": name}
        return Pod(environment, free_port(), self.log.with_name(f"{name}.log"))

    def write(self, count: int, **when: float) -> None:
        """Requests with one due time or countdown. They become visible in Kafka at once."""
        # One transaction: the service sees nothing before the commit. No figure therefore includes the
        # time to write the load.
        producer = Producer(
            self._bootstrap
            | {
                "linger.ms": 20,
                "queue.buffering.max.messages": count + 1,
                "transactional.id": uuid.uuid4().hex,
                "transaction.timeout.ms": 300_000,
            }
        )
        producer.init_transactions()
        producer.begin_transaction()
        for number in range(count):
            producer.produce(self.requests, self._request(number, **when), headers=HEADERS)
        assert producer.flush(DEADLINE_S) == 0
        # Writing the load to disk is not the engine's work.
        os.sync()
        producer.commit_transaction()

    def write_alike(
        self, count: int, value: bytes, wrote: Callable[[int], None] = lambda done: None
    ) -> None:
        """One request `count` times, evenly over the partitions. They become visible in Kafka at once."""
        producer = Producer(
            self._bootstrap
            | {
                "linger.ms": 20,
                "queue.buffering.max.messages": 2_000_000,
                "transactional.id": uuid.uuid4().hex,
                "transaction.timeout.ms": 300_000,
            }
        )
        producer.init_transactions()
        producer.begin_transaction()
        for partition in range(self.partitions):
            first, end = (count * p // self.partitions for p in (partition, partition + 1))
            for done in range(first, end, ALIKE_AT_ONCE):
                batch = [{"value": value}] * min(ALIKE_AT_ONCE, end - done)
                producer.produce_batch(self.requests, batch, partition=partition)
                # Below the 2,000,000 of the queue, beyond which records are refused.
                while len(producer) > 1_500_000:
                    producer.poll(0.05)
                wrote(done + len(batch))
        assert producer.flush(DEADLINE_S) == 0
        os.sync()
        producer.commit_transaction()

    def write_paced(self, per_second: int, seconds: float) -> int:
        """Requests at an even rate, with evenly spread countdowns. Returns their number."""
        began, sent, total = time.monotonic(), 0, int(per_second * seconds)
        while sent < total:
            due = min(total, int((time.monotonic() - began) * per_second))
            for number in range(sent, due):
                # A prime: requests that are written together are due far apart.
                share = (number * 7919 % 1000) / 1000
                countdown = SHORTEST_S + share * (LONGEST_S - SHORTEST_S)
                self._producer.produce(
                    self.requests, self._request(number, countdown=countdown), headers=HEADERS
                )
            sent = max(sent, due)
            self._producer.poll(0.005)
        assert self._producer.flush(30) == 0
        return total

    def _request(self, number: int, **when: float) -> bytes:
        body = f"{number:07d}".ljust(self._message_bytes, ".")
        return json.dumps({"topic": self.target, "message": body} | when).encode()

    def pending(self) -> int:
        # without the member `~` at +inf, which shows that the key was not lost
        return sum(
            int(self._redis.zcount(f"blackbox:{{{self.requests}-{p}}}:due", "-inf", "(inf"))
            for p in range(self.partitions)
        )

    def stored(self, count: int) -> bool:
        return self.pending() >= count

    def forget(self) -> None:
        """Remove all pending requests, as cancels do."""
        # In parts, because one call for millions would also block Redis for the service.
        for partition in range(self.partitions):
            prefix = f"blackbox:{{{self.requests}-{partition}}}:"
            due = f"{prefix}due"
            while names := self._redis.zrange(
                due, "-inf", "(inf", byscore=True, offset=0, num=FORGOTTEN_AT_ONCE
            ):
                self._redis.zrem(due, *names)
                self._redis.unlink(*(f"{prefix}msg:{name.decode()}" for name in names))

    def read_back(self, start: dict[int, int]) -> list[tuple[int, int]]:
        """(due, delivered) in epoch ms of every delivered message since these offsets."""
        consumer = Consumer(
            self._bootstrap
            | {"group.id": "bench", "isolation.level": "read_committed", "fetch.wait.max.ms": 20}
        )
        ends = self.ends()
        consumer.assign([TopicPartition(self.target, p, start[p]) for p in start])
        found: list[tuple[int, int]] = []
        reached = dict(start)
        # The last offset is that of a commit marker.
        while any(reached[p] < ends[p] - 1 for p in ends):
            messages = consumer.consume(10_000, timeout=0.5)
            for message in messages:
                reached[message.partition()] = message.offset() + 1  # type: ignore[index, operator]
                due = dict(message.headers() or [])["blackbox-due-ms"]
                found.append((int(due), message.timestamp()[1]))  # type: ignore[arg-type]
            if not messages and all(reached[p] >= ends[p] - 2 for p in ends):
                break
        consumer.close()
        return found

    def ends(self) -> dict[int, int]:
        consumer = Consumer(self._bootstrap | {"group.id": "bench"})
        ends = {
            p: consumer.get_watermark_offsets(TopicPartition(self.target, p), timeout=10)[1]
            for p in range(TARGET_PARTITIONS)
        }
        consumer.close()
        return ends


def wait(what: str, ask: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not ask():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {DEADLINE_S:.0f} s: {what}")
        time.sleep(0.02)


def cpu_s(root: psutil.Process) -> float:
    """Processor time of a process and its descendants, including ended ones."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def memory_mb(root: psutil.Process) -> float:
    # The proportional set size counts memory that processes share once.
    return sum(p.memory_full_info().pss for p in [root, *root.children(recursive=True)]) / 1e6


def lateness_ms(field: Field, per_second: int, seconds: int, others: int = 0) -> list[int]:
    """The sorted lateness of messages of an even load, after the first seconds.

    `others` are pending beside it.
    """
    start = field.ends()
    field.write_paced(per_second, 3)
    skipped = int(time.time() * 1000)
    field.write_paced(per_second, seconds)
    wait("delivered", lambda: field.pending() == others)
    time.sleep(1.0)
    # After LONGEST_S, all requests from the first seconds have been delivered.
    late = sorted(at - due for due, at in field.read_back(start) if due > skipped + 6000)
    assert late[0] >= 0, f"early by {-late[0]} ms"
    return late
