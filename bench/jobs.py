"""Recovery of a large lost Redis, and the time of each batch job by size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple
from zlib import crc32

import psutil
import redis
import typer
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.engines import Field
from bench.ground import HEADERS, MESSAGE_BYTES
from blackbox.embedded import EmbeddedStack
from blackbox.journal.topics import receipts_topic
from blackbox.records.receipt import Receipt, encode

PARTITIONS = 4
ROUND, PENDING, CANCELLED = 50, 5, 49
"""Of fifty requests, the first five stay pending, the last is cancelled, and the others are delivered."""

FAR_S = 86_400
PATIENCE_S = 1200.0
OUTCOMES = 1000
LOAD_PER_S = 1000
READ = 5000
JOBS = ("ledger", "audit", "load")
DOCS = Path(__file__).parent.parent / "docs"
BODY = "x" * (MESSAGE_BYTES - 10)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(width=120)


class Pending(NamedTuple):
    """A set of pending requests: their number, and a checksum of each place, due time and message."""

    entries: int
    checksum: int


class Yard(Field):
    """Topics with long journals, of whose requests one in ten stays pending, and the services on them."""

    def __init__(self, stack: EmbeddedStack) -> None:
        super().__init__(stack, "process", PARTITIONS, stack.folder)
        self._url = stack.redis_url
        self.create(receipts_topic(self.requests))

    def command(self, *typed: str, cores: int, **settings: object) -> float:
        """The seconds that a command of blackbox takes. Raises CalledProcessError."""
        more = {f"BLACKBOX_{name.upper()}": str(value) for name, value in settings.items()}
        # `local[1]` limits Spark's tasks alone; the JVM and Python's processes have more threads.
        chosen = sorted(os.sched_getaffinity(0))[:cores]
        more["BLACKBOX_SPARK_MASTER"] = f"local[{cores}]"
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "blackbox", *typed, "--json"],
            env=os.environ | self.environment | more, check=True, stdout=subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setaffinity(0, chosen),
        )  # fmt: skip
        return time.monotonic() - began

    def use(self, engine: str) -> None:
        """Let later services run on this engine."""
        self.environment["BLACKBOX_ENGINE"] = engine

    def create(self, *topics: str) -> None:
        admin = AdminClient(self._bootstrap)
        new = [NewTopic(name, PARTITIONS) for name in topics]
        for future in admin.create_topics(new).values():
            future.result()

    def ask(self, requests: int) -> list[list[int]]:
        """Write requests and cancels. Returns the offsets of the requests to be delivered, by partition."""
        due_now: list[list[int]] = [[] for _ in range(PARTITIONS)]
        written = [0] * PARTITIONS
        with Progress(console=console, transient=True) as bar, self._producing() as produce:
            shown = bar.add_task("writing the requests", total=requests)
            for number in range(requests):
                partition, kind = number % PARTITIONS, number // PARTITIONS % ROUND
                is_due = PENDING <= kind < CANCELLED
                if is_due:
                    due_now[partition].append(written[partition])
                for value in _records(self.target, number, is_due, kind == CANCELLED):
                    produce(self.requests, value, partition)
                    written[partition] += 1
                if number % READ == 0:
                    bar.update(shown, completed=number)
        return due_now

    def settle(self, delivered: list[list[int]]) -> None:
        topic = receipts_topic(self.requests)
        with self._producing() as produce:
            for partition, offsets in enumerate(delivered):
                for at in range(0, len(offsets), OUTCOMES):
                    pairs = [(o, at + n) for n, o in enumerate(offsets[at : at + OUTCOMES])]
                    places = {f"{self.target}/{partition}": pairs}
                    produce(topic, encode(Receipt(_now_ms(), delivered=places)), partition)
                # The messages do not exist. Recovery looks for those of the last receipt, and a
                # barrier names none.
                produce(topic, encode(Receipt(_now_ms(), barrier=True)), partition)

    @contextmanager
    def load(self) -> Iterator[None]:
        """Write requests for a later day at an even rate during the block."""
        over = Event()

        def write() -> None:
            number = 0
            with self._producing() as produce:
                while not over.wait(0.1):
                    for _ in range(LOAD_PER_S // 10):
                        [value] = _records(self.target, number)
                        produce(self.requests, value, number % PARTITIONS)
                        number += 1

        writer = Thread(target=write)
        writer.start()
        try:
            yield
        finally:
            over.set()
            writer.join()

    @contextmanager
    def _producing(self) -> Iterator[Callable[[str, bytes, int], None]]:
        producer = Producer(
            self._bootstrap | {"linger.ms": 20, "enable.idempotence": True, "max.in.flight": 1}
        )

        def produce(topic: str, value: bytes, partition: int) -> None:
            while True:
                try:
                    producer.produce(topic, value, partition=partition, headers=HEADERS)
                    break
                except BufferError:
                    producer.poll(0.05)

        yield produce
        assert producer.flush(120) == 0

    def has_read(self, ends: Mapping[int, int]) -> bool:
        """Whether the indexes hold the requests below these offsets."""
        positions = self.positions()
        return all(positions.get(partition, -1) >= end for partition, end in ends.items())

    def positions(self) -> dict[int, int]:
        # An index that Redis has just lost has no positions.
        names = range(PARTITIONS)
        found: list[Any] = [self._redis.hget(self._key(p, "state"), "requests") for p in names]
        return {
            p: int(position)
            for p, position in zip(names, found, strict=True)
            if position is not None
        }

    def request_ends(self) -> dict[int, int]:
        consumer = Consumer(self._bootstrap | {"group.id": "bench"})
        found = {
            p: consumer.get_watermark_offsets(TopicPartition(self.requests, p), timeout=10)[1]
            for p in range(PARTITIONS)
        }
        consumer.close()
        return found

    def lose_redis(self) -> None:
        # The loss is the same as without it. Redis answers at once, so no figure includes that time.
        self._redis.flushall(asynchronous=True)

    def in_redis(self) -> Pending:
        """The pending requests in the indexes."""
        count = checksum = 0
        raw: Any = redis.Redis.from_url(self._url)
        for partition in range(PARTITIONS):
            due, first = self._key(partition, "due"), 0
            while found := raw.zrange(
                due, "-inf", "(inf", byscore=True, offset=first, num=READ, withscores=True
            ):
                keys = [self._key(partition, f"msg:{name.decode()}") for name, _ in found]
                for (name, due_ms), entry in zip(found, raw.mget(keys), strict=True):
                    message = entry.partition(b"\n")[2]
                    checksum += _sum(partition, int(name, 16), int(due_ms), message)
                first += len(found)
            count += first
        raw.close()
        return Pending(count, checksum)

    def in_journals(self, ends: Mapping[int, int]) -> Pending:
        """The pending requests below these offsets, read from Kafka by plain Python."""
        # Without blackbox's code for journals, whose bugs would be on both sides of the comparison.
        count = checksum = 0
        for partition, end in ends.items():
            ended: set[int] = set()
            for _, _, value in self._read(receipts_topic(self.requests), partition):
                receipt = json.loads(value)
                for pairs in receipt.get("delivered", {}).values():
                    ended.update(offset for offset, _ in pairs)
                ended.difference_update(receipt.get("void", ()))
            pending: dict[int, int] = {}
            named: dict[str, int] = {}
            for offset, at_ms, value in self._read(self.requests, partition, end):
                asked = json.loads(value)
                if "id" in asked:
                    pending.pop(named.pop(asked["id"], -1), None)
                    if asked.get("cancel"):
                        continue
                    named[asked["id"]] = offset
                if offset not in ended:
                    due_ms, message = at_ms + asked["countdown"] * 1000, asked["message"].encode()
                    pending[offset] = _sum(partition, offset, due_ms, message)
            count += len(pending)
            checksum += sum(pending.values())
        return Pending(count, checksum)

    def _read(
        self, topic: str, partition: int, end: int = sys.maxsize
    ) -> Iterator[tuple[int, int, bytes]]:
        consumer = Consumer(
            self._bootstrap
            | {"group.id": "bench", "isolation.level": "read_committed", "enable.partition.eof": True}
        )  # fmt: skip
        consumer.assign([TopicPartition(topic, partition, 0)])
        is_over = False
        while not is_over:
            for message in consumer.consume(READ, 0.2):
                offset: Any = message.offset()
                is_over = is_over or message.error() is not None or offset >= end
                if not is_over:
                    yield offset, message.timestamp()[1], message.value() or b""
        consumer.close()

    def _key(self, partition: int, name: str) -> str:
        return f"blackbox:{{{self.requests}-{partition}}}:{name}"


def _records(
    target: str, number: int, is_due: bool = False, is_cancelled: bool = False
) -> list[bytes]:
    # a prime, so that requests that are written together are due far apart
    in_s = 0 if is_due else FAR_S + number * 7919 % FAR_S
    asked = f'"topic":"{target}","message":"{number:010d}{BODY}","countdown":{in_s}'
    if not is_cancelled:
        return [f"{{{asked}}}".encode()]
    name = f'"id":"order-{number}"'
    return [f"{{{asked},{name}}}".encode(), f'{{{name},"cancel":true}}'.encode()]


def _wait(what: str, ask: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ask():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.05)


def _sum(partition: int, offset: int, due_ms: int, message: bytes) -> int:
    return crc32(message, crc32(b"%d@%d %d " % (partition, offset, due_ms)))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _cpu_s() -> dict[str, float]:
    """Processor time until now of Redis, of Kafka, and of the whole machine."""
    spent = {"redis": 0.0, "kafka": 0.0}
    for process in psutil.Process().children(recursive=True):
        line = " ".join(process.cmdline())
        for name, mark in (("redis", "redis-server"), ("kafka", "kafka.Kafka")):
            if mark in line:
                times = process.cpu_times()
                spent[name] += times.user + times.system
    whole = psutil.cpu_times()
    return spent | {"all": whole.user + whole.system}


class Healed(NamedTuple):
    """A recovery from a total loss of Redis. `found` is the content of Redis after it, `expected` that of Kafka."""

    engine: str
    took_s: float
    scanned: int
    found: Pending
    expected: Pending
    cores: dict[str, float]


@app.command()
def heal(
    pending: int = 2_000_000,
    engines: list[str] = typer.Option(["process", "spark"]),  # noqa: B008
) -> None:
    """FLUSHALL under load, and the recovery by the service of each engine.

    The final content of Redis is compared with a plain read of the journals.
    """
    requests = pending * ROUND // PENDING
    healed = []
    with EmbeddedStack() as stack:
        yard = Yard(stack)
        yard.settle(yard.ask(requests))
        for engine in engines:
            yard.use(engine)
            healed.append(_healed(yard, engine))
            console.print(_table(healed, pending))
    if any(one.found != one.expected for one in healed):
        raise SystemExit("Redis does not contain the pending requests")


def _healed(yard: Yard, engine: str) -> Healed:
    with yard.service(), console.status(f"engine {engine}"):
        with yard.load():
            _wait("the service has caught up", lambda: yard.has_read(yard.request_ends()))
            ends = yard.request_ends()
            before, began = _cpu_s(), time.monotonic()
            yard.lose_redis()
            _wait("healed", lambda: yard.has_read(ends))
            took_s, cores = time.monotonic() - began, _cores(before, began)
        ends_now = yard.request_ends()
        _wait("the rest", lambda: yard.has_read(ends_now))
    expected = yard.in_journals(yard.positions())
    found = yard.in_redis()
    scanned = sum(ends.values())
    return Healed(engine, took_s, scanned, found, expected, cores)


def _cores(before: dict[str, float], began: float) -> dict[str, float]:
    took_s = time.monotonic() - began
    return {name: (spent - before[name]) / took_s for name, spent in _cpu_s().items()}


def _table(healed: list[Healed], pending: int) -> Table:
    title = f"Redis lost under load, {pending:,} pending, messages of {MESSAGE_BYTES} bytes"
    table = Table(title=title)
    for name in (
        "engine", "s", "scanned /s", "stored /s", "pending", "as the journals say",
        "cores: Redis", "Kafka", "all",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "engine" else "right")
    for one in healed:
        table.add_row(
            one.engine,
            f"{one.took_s:.1f}",
            f"{one.scanned / one.took_s:,.0f}",
            f"{one.found.entries / one.took_s:,.0f}",
            f"{one.found.entries:,}",
            "yes" if one.found == one.expected else f"NO: {one.expected.entries:,}",
            *(f"{share:.2f}" for share in one.cores.values()),
        )
    return table


class Figure(NamedTuple):
    """The seconds of the whole command of a job, on journals of this number of requests."""

    job: str
    requests: int
    cores: int
    seconds: float


@app.command()
def growth(
    requests: list[int] = typer.Option([100_000, 1_000_000, 10_000_000]),  # noqa: B008
    cores: list[int] = typer.Option([1, 2]),  # noqa: B008
    fresh: bool = typer.Option(False, help="Measure the sizes in docs/jobs.json again."),
    folder: Path = DOCS,
) -> None:
    """Measure the time of each job by size of the journals and by cores: jobs.json, .svg and .md.

    Each figure is written at once. The same command later measures the missing figures.
    """
    kept = folder / "jobs.json"
    figures = (
        [] if fresh or not kept.exists() else [Figure(*f) for f in json.loads(kept.read_bytes())]
    )
    for size in requests:
        known = {(f.job, f.cores) for f in figures if f.requests == size}
        left = [count for count in cores if not known >= {(job, count) for job in JOBS}]
        for figure in _measured(size, left) if left else ():
            same = [f for f in figures if f[:3] == figure[:3]]
            figures = sorted([*(f for f in figures if f not in same), figure])
            # after each figure, so that a stopped run loses none
            kept.write_text(json.dumps(figures, indent=1) + "\n")
            console.print(f"{figure.job}, {size:,}, {figure.cores} cores: {figure.seconds:.1f} s")
        _write_page(folder, figures)
    console.print((folder / "jobs.md").read_text())


def _measured(size: int, cores: list[int]) -> Iterator[Figure]:
    with EmbeddedStack() as stack:
        yard = Yard(stack)
        rows, loaded = stack.folder / "rows.jsonl", f"{yard.requests}.loaded"
        yard.create(loaded)
        yard.settle(yard.ask(size))
        # The audit also compares the index.
        with yard.service():
            _wait("taken in", lambda: yard.has_read(yard.request_ends()))
        with rows.open("wb") as file:
            for number in range(size):
                file.writelines(value + b"\n" for value in _records(yard.target, number))
        for count in cores:
            ledger = stack.folder / f"ledger-{count}"
            for job, typed, settings in (
                ("ledger", [], {"ledger": ledger}),
                ("audit", [], {}),
                ("load", [str(rows), "--again", str(count)], {"request_topics": f"{loaded}:countdown"}),
            ):  # fmt: skip
                try:
                    took_s = yard.command(job, *typed, cores=count, **settings)
                except subprocess.CalledProcessError as failed:
                    console.print(f"{job}, {size:,}, {count} cores: failed, {failed}")
                    continue
                yield Figure(job, size, count, round(took_s, 1))


def _write_page(folder: Path, figures: list[Figure]) -> None:
    sizes = sorted({figure.requests for figure in figures})
    most = max(figure.cores for figure in figures)
    found = {figure[:3]: figure.seconds for figure in figures}
    _draw(folder / "jobs.svg", figures, sizes)
    heads = ["job", *(f"{size:,} requests" for size in sizes), "requests/s"]
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    for job in JOBS:
        for count in sorted({figure.cores for figure in figures}):
            took = [found.get((job, size, count)) for size in sizes]
            cells = ["" if seconds is None else f"{seconds:.1f} s" for seconds in took]
            rate = f"{sizes[-1] / took[-1]:,.0f}" if took[-1] else ""
            name = f"{job}, {count} core{'s' if count > 1 else ''}"
            lines.append("| " + " | ".join([name, *cells, rate]) + " |")
    page = folder / "jobs.md"
    about = PAGE.format(cores=most, bytes=MESSAGE_BYTES, table="\n".join(lines))
    page.write_text(about)


PAGE = """# How long the jobs take

This page shows how long `ledger`, `audit` and `load` take, including the start of Spark. Kafka, Redis and
the job share a machine of {cores} cores; "1 core" is `BLACKBOX_SPARK_MASTER=local[1]` with the job's processes kept
on one core. Messages of {bytes} bytes; of every 50 requests, 44 are delivered, 5 are pending and 1 is cancelled. The last
column is for the largest journals.

![time of each job by requests, with one core and with more](jobs.svg)

{table}

Measured with `python -m bench.jobs growth` (figures: [jobs.json](jobs.json)). The commands are
explained in [ledger](ledger.md), [audit](audit.md) and [load](load.md).
"""


def _draw(path: Path, figures: list[Figure], sizes: list[int]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # With a fixed salt and no date, the same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "blackbox"
    drawn, axes = pyplot.subplots(figsize=(8, 4.5))
    for job, colour in zip(JOBS, ("#0072b2", "#009e73", "#7a4fa3"), strict=True):
        for count, style in zip(sorted({f.cores for f in figures}), (":", "-", "--"), strict=False):
            mine = [f for f in figures if (f.job, f.cores) == (job, count)]
            axes.plot(
                [f.requests for f in mine], [f.seconds for f in mine], style, color=colour,
                marker="o", label=f"{job}, {count} core{'s' if count > 1 else ''}",
            )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="requests", ylabel="seconds")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    drawn.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(drawn)


if __name__ == "__main__":
    app()
