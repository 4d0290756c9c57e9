"""Both engines side by side, as services: intake, drain, lateness, processor time, memory, idling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import redis
import typer
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console
from rich.table import Table

from bench.ground import HEADERS, MESSAGE_BYTES
from blackbox.embedded import EmbeddedStack
from blackbox.embedded.tcp_ports import free_port

ENGINES = ("spark", "process")
TARGET_PARTITIONS = 4
WARM_UP = 20_000
# Emptying a Redis with millions of requests takes some seconds.
PATIENCE_S = 120
# Countdowns of the lateness runs. A countdown shorter than the time of intake makes a message late.
SHORTEST_S, LONGEST_S = 2.0, 6.0

LATENESS_S = 20
IDLE_S = 30
DEADLINE_S = 900.0
FAR_S = 86_400
FORGOTTEN_AT_ONCE = 5_000
ALIKE_AT_ONCE = 50_000


@dataclass(slots=True)
class Figures:
    """The measurements of one engine. Rates are per second, times in the unit of the name."""

    start_s: float = 0.0
    intake: float = 0.0
    drain: float = 0.0
    late_ms: dict[int, tuple[int, int]] = field(default_factory=dict)
    cpu_us: dict[str, float] = field(default_factory=dict)
    idle_share: float = 0.0
    memory_mb: dict[str, float] = field(default_factory=dict)


class Field:
    """Topics of one engine's run, and the service that works on them."""

    def __init__(self, stack: EmbeddedStack, engine: str, partitions: int, folder: Path) -> None:
        self._bootstrap: dict[str, Any] = {"bootstrap.servers": stack.bootstrap_servers}
        self._redis = redis.Redis.from_url(stack.redis_url, socket_timeout=PATIENCE_S)
        self._redis.flushall()
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
            "REDIS_URL": stack.redis_url,
            "REQUEST_TOPICS": f"{self.requests}:countdown",
            "DEAD_LETTER_TOPIC": f"{self.name}.dead",
            "GROUP_ID": self.name,
            "ENGINE": engine,
            "HTTP_PORT": self.port,
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
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "blackbox", "run"],
                env=os.environ | self.environment, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            wait("the service is ready", self._is_ready)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(30)

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

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
        body = f"{number:07d}".ljust(MESSAGE_BYTES, ".")
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
            due: Any = f"{prefix}due"
            raw: Any = self._redis
            while names := raw.zrange(
                due, "-inf", "(inf", byscore=True, offset=0, num=FORGOTTEN_AT_ONCE
            ):
                raw.zrem(due, *names)
                raw.unlink(*(f"{prefix}msg:{name.decode()}" for name in names))

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


def measure(
    field: Field, figures: Figures, requests: int, drained: int, say: Callable[[str], None]
) -> None:
    began = time.monotonic()
    with field.service() as service:
        figures.start_s = time.monotonic() - began
        say("warming up")
        field.write(WARM_UP, countdown=3)
        wait("warm", lambda: field.stored(1))
        wait("delivered", lambda: field.pending() == 0)
        figures.memory_mb["idle"] = memory_mb(service)

        say("idle")
        before = cpu_s(service)
        time.sleep(IDLE_S)
        figures.idle_share = (cpu_s(service) - before) / IDLE_S

        say("intake")
        # A smaller load first as a warm-up: only the second figure is kept.
        for count in (requests // 4, requests):
            before = cpu_s(service)
            field.write(count, countdown=FAR_S)
            began = time.monotonic()
            wait("stored", lambda count=count: field.stored(count))  # type: ignore[misc]
            figures.intake = count / (time.monotonic() - began)
            figures.cpu_us["intake"] = (cpu_s(service) - before) / count * 1e6
            field.forget()

        say("drain")
        figures.memory_mb["busy"] = memory_mb(service)
        for count in (drained // 4, drained):
            start = field.ends()
            # The time to store them first: at 40,000 per second, plus 4 s.
            due_ms = int(time.time() * 1000) + int(count / 40) + 4000
            field.write(count, at=due_ms)
            wait("stored", lambda count=count: field.stored(count))  # type: ignore[misc]
            if time.time() * 1000 > due_ms:
                raise SystemExit("the requests were not stored before they were due")
            before = cpu_s(service)
            wait("drained", lambda: field.pending() == 0)
            found = field.read_back(start)
            took_s = (max(at for _, at in found) - due_ms) / 1000
            figures.drain = len(found) / took_s
            figures.cpu_us["drain"] = (cpu_s(service) - before) / count * 1e6

        for per_second in (1_000, 10_000):
            say(f"lateness at {per_second:,} per second")
            before, count = cpu_s(service), per_second * LATENESS_S
            late = lateness_ms(field, per_second, LATENESS_S)
            figures.late_ms[per_second] = late[len(late) // 2], late[int(len(late) * 0.99)]
            figures.cpu_us[f"{per_second:,} /s"] = (cpu_s(service) - before) / count * 1e6


def main(
    partitions: list[int] = typer.Option([4, 8]),  # noqa: B008
    requests: int = 1_000_000,
    drained: int = 400_000,
    engines: list[str] = typer.Option(list(ENGINES)),  # noqa: B008
) -> None:
    """Measure the engines one after the other: a real broker and Redis, requests of 200 bytes, services as processes."""
    console = Console()
    found: dict[tuple[str, int], Figures] = {}
    with EmbeddedStack() as stack:
        for count in partitions:
            for engine in engines:
                figures = found[engine, count] = Figures()
                field = Field(stack, engine, count, stack.folder)
                label = f"{engine}, {count} partitions"
                with console.status(label) as status:
                    measure(
                        field, figures, requests, drained,
                        lambda doing, s=status, n=label: s.update(f"{n}: {doing}"),  # type: ignore[misc]
                    )  # fmt: skip
                console.print(label, figures)
    console.print(_table(found))


def _table(found: dict[tuple[str, int], Figures]) -> Table:
    table = Table(title=f"messages of {MESSAGE_BYTES} bytes, exactly once")
    table.add_column("")
    for engine, count in found:
        table.add_column(f"{engine}, {count}", justify="right")
    rows: dict[str, Callable[[Figures], str]] = {
        "start to ready, s": lambda f: f"{f.start_s:.1f}",
        "intake /s": lambda f: f"{f.intake:,.0f}",
        "drain /s": lambda f: f"{f.drain:,.0f}",
        "lateness at 1,000 /s, p50 / p99 ms": lambda f: "{} / {}".format(*f.late_ms[1_000]),
        "lateness at 10,000 /s, p50 / p99 ms": lambda f: "{} / {}".format(*f.late_ms[10_000]),
        "processor µs a message: intake": lambda f: f"{f.cpu_us['intake']:.1f}",
        "drain": lambda f: f"{f.cpu_us['drain']:.1f}",
        "both at 1,000 /s": lambda f: f"{f.cpu_us['1,000 /s']:.0f}",
        "both at 10,000 /s": lambda f: f"{f.cpu_us['10,000 /s']:.0f}",
        "idle, % of a core": lambda f: f"{100 * f.idle_share:.1f}",
        "memory idle / busy, MB": lambda f: (
            f"{f.memory_mb['idle']:.0f} / {f.memory_mb['busy']:.0f}"
        ),
    }
    for name, show in rows.items():
        table.add_row(name, *(show(figures) for figures in found.values()))
    return table


if __name__ == "__main__":
    typer.run(main)
