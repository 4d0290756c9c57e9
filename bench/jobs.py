"""The time of each batch job, by the size of the journals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import typer
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console
from rich.progress import Progress

from bench.field import Field
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
READ = 5000
JOBS = ("ledger", "audit", "load")
DOCS = Path(__file__).parent.parent / "docs"
BODY = "x" * (MESSAGE_BYTES - 10)

console = Console(width=120)


class Yard(Field):
    """Topics with long journals, of whose requests one in ten stays pending, and the services on them."""

    def __init__(self, stack: EmbeddedStack) -> None:
        super().__init__(stack, "process", PARTITIONS, stack.folder)
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


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Figure(NamedTuple):
    """The seconds of the whole command of a job, on journals of this number of requests."""

    job: str
    requests: int
    cores: int
    seconds: float


def main(
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

This page shows how long [`ledger`](ledger.md), [`audit`](audit.md) and [`load`](load.md) take, including the start of
Spark. Kafka, Redis and the job share a machine of {cores} cores. With "1 core", the processes of the job are kept on one
core (`BLACKBOX_SPARK_MASTER=local[1]`). Messages have {bytes} bytes. Of every 50 requests, 44 are delivered, 5 are pending
and 1 is cancelled. The last column is the rate at the largest number of requests.

![time of each job by requests, with one core and with more](jobs.svg)

{table}

`python -m bench.jobs`, in a checkout of the repository, measures this ([jobs.json](jobs.json) has the figures).
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
    typer.run(main)
