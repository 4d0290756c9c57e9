"""A lost Redis: how long until every shard is open again, by how much has ended and how much is pending."""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.error import URLError
from urllib.request import urlopen

import redis
import typer
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from rich.console import Console
from rich.table import Table

from bench.engines import ENGINES, Field
from blackbox.embedded import EmbeddedStack
from blackbox.journal.topics import receipts_topic
from blackbox.receipt import Mark, Receipt, encode

AT_ONCE = 50_000
NAMED = 1_000
"""Requests in a receipt."""

DUE_IN_S = 36_000
OPENED = re.compile(r"open after ([\d.]+) s")


@dataclass(frozen=True, slots=True)
class Figures:
    """How long the slowest shard took, what was stored, and how liveness answered meanwhile."""

    open_s: float
    pending: int
    is_exact: bool
    live: int
    not_live: int


class Journals:
    """Request topic and receipts as a service leaves them that lost its Redis."""

    def __init__(self, field: Field, bootstrap_servers: str) -> None:
        self._field = field
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "linger.ms": 20,
                "enable.idempotence": True,
                "queue.buffering.max.messages": 2_000_000,
                "compression.type": "lz4",
            }
        )

    def write(self, ended: int, pending: int, *, has_mark: bool) -> None:
        """The ended ones first; without a mark, receipts name each of them."""
        per_shard = ended // self._field.partitions
        self._requests(per_shard, 0)
        self._requests(pending // self._field.partitions, DUE_IN_S)
        for partition in range(self._field.partitions):
            if has_mark:
                mark = Mark(per_shard, 0)
                self._receipt(partition, Receipt(1, read=per_shard, mark=mark))
            else:
                for first in range(0, per_shard, NAMED):
                    offsets = range(first, min(first + NAMED, per_shard))
                    places = {f"{self._field.target}/0": [(o, o) for o in offsets]}
                    self._receipt(partition, Receipt(1, delivered=places, read=offsets.stop))
        assert self._producer.flush(600) == 0

    def _requests(self, count: int, due_in_s: int) -> None:
        at_ms = time.time_ns() // 1_000_000 + 1000 * due_in_s
        request = {"topic": self._field.target, "message": "m" * 100, "at": at_ms}
        value = json.dumps(request).encode()
        for partition in range(self._field.partitions):
            for first in range(0, count, AT_ONCE):
                batch = [{"value": value}] * min(AT_ONCE, count - first)
                self._producer.produce_batch(self._field.requests, batch, partition=partition)
                self._producer.poll(0)
                while len(self._producer) > 1_500_000:
                    self._producer.poll(0.05)

    def _receipt(self, partition: int, receipt: Receipt) -> None:
        topic = receipts_topic(self._field.requests)
        while True:
            try:
                self._producer.produce(
                    topic,
                    encode(receipt),
                    f"{self._field.requests}-{partition}",
                    partition=partition,
                )
                return
            except BufferError:
                self._producer.poll(0.1)


def keep_for_ever(field: Field, bootstrap_servers: str) -> None:
    """Both journals, as blackbox makes them."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    kept = {"retention.ms": "-1", "segment.bytes": str(256 << 20)}
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in kept.items()
    ]
    topic = ConfigResource(ResourceType.TOPIC, field.requests, incremental_configs=entries)
    for answer in admin.incremental_alter_configs([topic]).values():
        answer.result()
    receipts = NewTopic(receipts_topic(field.requests), field.partitions, config=kept)
    for made in admin.create_topics([receipts]).values():
        made.result()


def drop(field: Field, bootstrap_servers: str) -> None:
    """Their disk is needed for the next run."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    for answer in admin.delete_topics([field.requests, receipts_topic(field.requests)]).values():
        answer.result()


def offsets(client: redis.Redis, field: Field) -> Iterator[int]:
    """Every pending request, as Redis has it."""
    for partition in range(field.partitions):
        for name, _ in client.zscan_iter(
            f"blackbox:{{{field.requests}-{partition}}}:due", count=5000
        ):
            if name != b"~":
                yield int(name, 16)


def measure(field: Field, client: redis.Redis, port: int, ended: int, pending: int) -> Figures:
    """Lose Redis, start the service, wait until it is ready."""
    client.flushall()
    looks = {True: 0, False: 0}
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.5):
            try:
                with urlopen(f"http://127.0.0.1:{port}/livez", timeout=2) as answer:
                    looks[answer.status == 200] += 1
            except URLError as error:
                if "refused" not in str(error):  # not listening yet
                    looks[False] += 1

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        with field.service():
            opened = [float(s) for s in OPENED.findall(field.log.read_text())]
            found = list(offsets(client, field))
    finally:
        done.set()
        watcher.join()
    per_shard, shares = ended // field.partitions, pending // field.partitions
    expected = field.partitions * sum(range(per_shard, per_shard + shares))
    is_exact = len(set(found)) == shares and sum(found) == expected
    return Figures(max(opened), len(found), is_exact, looks[True], looks[False])


def main(
    pending: Annotated[int, typer.Option(help="Requests that wait.")] = 2_000_000,
    ended: Annotated[str, typer.Option(help="How many have ended, one run each.")] = "2e6,40e6",
    engines: Annotated[str, typer.Option(help="Which engines.")] = ",".join(ENGINES),
    partitions: Annotated[int, typer.Option(help="Of the request topic.")] = 4,
) -> None:
    """Measure rebuilds, below a low-water mark and above it."""
    table = Table(
        "engine", "ended", "mark", "pending", "open after s", "records/s", "exact", "live"
    )
    with tempfile.TemporaryDirectory() as folder, EmbeddedStack() as stack:
        client = redis.Redis.from_url(stack.redis_url)
        for count in (int(float(one)) for one in ended.split(",")):
            for has_mark in (True, False):
                field = Field(stack, engines.split(",")[0], partitions, Path(folder))
                keep_for_ever(field, stack.bootstrap_servers)
                journals = Journals(field, stack.bootstrap_servers)
                journals.write(count, pending, has_mark=has_mark)
                for engine in engines.split(","):
                    field.environment["BLACKBOX_ENGINE"] = engine
                    found = measure(field, client, field.port, count, pending)
                    read = pending if has_mark else count + pending
                    table.add_row(
                        engine, f"{count:,}", "above them" if has_mark else "none",
                        f"{found.pending:,}", f"{found.open_s:.1f}", f"{read / found.open_s:,.0f}",
                        str(found.is_exact), f"{found.live} of {found.live + found.not_live}",
                    )  # fmt: skip
                    Console(width=140).print(table)
                drop(field, stack.bootstrap_servers)


if __name__ == "__main__":
    typer.run(main)
