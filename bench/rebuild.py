"""A lost Redis: the time until every shard is open again, by the numbers of ended and pending requests.

For comparison, the rate at which the same service stores the same number of requests without a loss.
"""

from __future__ import annotations

import json
import re
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated
from urllib.error import URLError
from urllib.request import urlopen

import redis
import typer
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from bench.engines import ENGINES, WARM_UP
from bench.field import ALIKE_AT_ONCE, PATIENCE_S, Field, wait
from bench.report import Progress, markdown, say
from blackbox.embedded import EmbeddedStack
from blackbox.journal.topics import receipts_topic
from blackbox.records.receipt import Mark, Receipt, encode

NAMED = 1_000
"""Requests in a receipt."""

DUE_IN_S = 36_000
OPENED = re.compile(r"open after ([\d.]+) s")
# A service that looked for a low-water mark would leave one in the journals of the next run.
NEVER_TRIM_S = 86_400


@dataclass(frozen=True, slots=True)
class Figures:
    """The time of the slowest shard, the number of stored requests, and the answers of `/livez` in that time."""

    open_s: float
    pending: int
    is_exact: bool
    live: int
    not_live: int


class Journals:
    """The request topic and receipts of a service that lost its Redis."""

    def __init__(self, field: Field, bootstrap_servers: str) -> None:
        self._field = field
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "linger.ms": 20,
                "enable.idempotence": True,
                "queue.buffering.max.messages": 2_000_000,
                # Tens of millions of equal requests need little disk then.
                "compression.type": "lz4",
            }
        )

    def write(self, ended: int, pending: int) -> None:
        # The ended requests come first, as in any old journal, and the pending ones after them.
        per_shard = ended // self._field.partitions
        now_ms = time.time_ns() // 1_000_000
        self._requests("ended requests", per_shard, body(self._field, now_ms))
        later = body(self._field, now_ms + 1000 * DUE_IN_S)
        self._requests("pending requests", pending // self._field.partitions, later)
        progress = Progress("receipts", ended // NAMED)
        for partition in range(self._field.partitions):
            for first in range(0, per_shard, NAMED):
                offsets = range(first, min(first + NAMED, per_shard))
                places = {f"{self._field.target}/0": [(o, o) for o in offsets]}
                self._receipt(partition, Receipt(1, delivered=places, read=offsets.stop))
                progress((partition * per_shard + first) // NAMED)
        assert self._producer.flush(600) == 0

    def mark(self, ended: int, receipts: dict[int, int]) -> None:
        """Write a mark: all requests below the pending ones have ended, and the receipts below these name them."""
        per_shard = ended // self._field.partitions
        for partition, end in receipts.items():
            self._receipt(partition, Receipt(1, read=per_shard, mark=Mark(per_shard, end)))
        assert self._producer.flush(600) == 0

    def _requests(self, what: str, count: int, value: bytes) -> None:
        progress = Progress(what, count * self._field.partitions)
        for partition in range(self._field.partitions):
            for first in range(0, count, ALIKE_AT_ONCE):
                batch = [{"value": value}] * min(ALIKE_AT_ONCE, count - first)
                self._producer.produce_batch(self._field.requests, batch, partition=partition)
                self._producer.poll(0)
                while len(self._producer) > 1_500_000:
                    self._producer.poll(0.05)
                progress(partition * count + first + len(batch))

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


def body(field: Field, due_ms: int) -> bytes:
    # the same for a rebuilt request and for a request of intake
    request = {"topic": field.target, "message": "m" * 100, "at": due_ms}
    return json.dumps(request).encode()


def keep_for_ever(field: Field, bootstrap_servers: str) -> None:
    """Create both journals as blackbox does."""
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
    # The next run needs their disk.
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    for answer in admin.delete_topics([field.requests, receipts_topic(field.requests)]).values():
        answer.result()


def offsets(client: redis.Redis, field: Field) -> Iterator[int]:
    """Every pending request in Redis."""
    for partition in range(field.partitions):
        for name, _ in client.zscan_iter(
            f"blackbox:{{{field.requests}-{partition}}}:due", count=5000
        ):
            # The member `~` only shows that the key was not lost.
            if name != b"~":
                yield int(name, 16)


def receipt_ends(field: Field, bootstrap_servers: str) -> dict[int, int]:
    """The offsets of the next receipts."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "bench"})
    topic = receipts_topic(field.requests)
    ends = {
        p: consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=10)[1]
        for p in range(field.partitions)
    }
    consumer.close()
    return ends


def measure(field: Field, client: redis.Redis, ended: int, pending: int) -> Figures:
    """Lose Redis, start the service, wait until it is ready."""
    client.flushall()
    looks = {True: 0, False: 0}
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.5):
            try:
                with urlopen(f"http://127.0.0.1:{field.port}/livez", timeout=2) as answer:
                    looks[answer.status == 200] += 1
            except URLError as error:
                # The connection was refused: the service does not listen yet.
                if "refused" not in str(error):
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
    if len(opened) != field.partitions:
        raise SystemExit(f"{len(opened)} openings of {field.partitions} shards: see {field.log}")
    per_shard, shares = ended // field.partitions, pending // field.partitions
    # All partitions have the same offsets: the set holds those of one, the sum those of all.
    expected = field.partitions * sum(range(per_shard, per_shard + shares))
    is_exact = len(set(found)) == shares and sum(found) == expected
    return Figures(max(opened), len(found), is_exact, looks[True], looks[False])


def intake_per_s(stack: EmbeddedStack, rebuilt: Field, pending: int) -> float:
    """The rate at which a warm service stores the same number of requests of the same size."""
    field = Field(stack, "intake", rebuilt.partitions, stack.folder)
    field.environment |= {
        name: rebuilt.environment[name] for name in ("BLACKBOX_ENGINE", "BLACKBOX_TRIM_INTERVAL_S")
    }
    keep_for_ever(field, stack.bootstrap_servers)
    value = body(rebuilt, int(time.time() * 1000) + 1000 * DUE_IN_S)
    with field.service():
        field.write_alike(WARM_UP, value)
        wait("warm", lambda: field.stored(WARM_UP))
        # Redis is empty, as for a rebuild. The time does not include the start or the opening.
        field.forget()
        field.write_alike(pending, value)
        began = time.monotonic()
        wait("stored", lambda: field.stored(pending))
        took_s = time.monotonic() - began
    drop(field, stack.bootstrap_servers)
    return pending / took_s


def main(
    pending: Annotated[int, typer.Option(help="The number of pending requests.")] = 2_000_000,
    ended: Annotated[
        str, typer.Option(help="The numbers of ended requests, with one run for each.")
    ] = "2e6,40e6",
    engines: Annotated[str, typer.Option(help="The engines to measure.")] = ",".join(ENGINES),
    partitions: Annotated[int, typer.Option(help="Partitions of the request topic.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rebuilds from a mark, each with an intake.")] = 1,
) -> None:
    """Measure rebuilds without a low-water mark and from one. The latter run alternately with an intake."""
    head = (
        "engine", "ended", "mark", "pending", "open after s", "records/s", "intake/s", "of intake",
        "exact", "live",
    )  # fmt: skip
    rows: list[list[str]] = []
    with EmbeddedStack() as stack:
        client = redis.Redis.from_url(stack.redis_url, socket_timeout=PATIENCE_S)
        for count in (int(float(one)) for one in ended.split(",")):
            field = Field(stack, engines.split(",")[0], partitions, stack.folder)
            field.environment["BLACKBOX_TRIM_INTERVAL_S"] = str(NEVER_TRIM_S)
            keep_for_ever(field, stack.bootstrap_servers)
            journals = Journals(field, stack.bootstrap_servers)
            journals.write(count, pending)
            # Without a mark first, because a written mark stays in the journals.
            for has_mark in (False, True):
                if has_mark:
                    journals.mark(count, receipt_ends(field, stack.bootstrap_servers))
                for engine in engines.split(","):
                    field.environment["BLACKBOX_ENGINE"] = engine
                    found, intakes = [], []
                    for number in range(rounds if has_mark else 1):
                        say(f"{engine}: rebuild, {count:,} ended, mark: {has_mark}, {number + 1}")
                        found.append(measure(field, client, count, pending))
                        say(f"open after {found[-1].open_s:.1f} s")
                        if has_mark:
                            intakes.append(intake_per_s(stack, field, pending))
                            say(f"{engine}: intake, {intakes[-1]:,.0f} /s")
                    rows.append(_row(engine, count, found, intakes))
                    print(markdown(head, rows), flush=True)
            drop(field, stack.bootstrap_servers)


def _row(engine: str, ended: int, found: list[Figures], intakes: list[float]) -> list[str]:
    """Medians. The share is relative to the intake of the same round."""
    open_s, pending = statistics.median(one.open_s for one in found), found[0].pending
    read = pending if intakes else ended + pending
    shares = [
        one.pending / one.open_s / intake for one, intake in zip(found, intakes, strict=False)
    ]
    live, looks = sum(one.live for one in found), sum(one.live + one.not_live for one in found)
    return [
        engine, f"{ended:,}", "above them" if intakes else "none", f"{pending:,}", f"{open_s:.1f}",
        f"{read / open_s:,.0f}",
        f"{statistics.median(intakes):,.0f}" if intakes else "",
        f"{statistics.median(shares):.2f}" if shares else "",
        "yes" if all(one.is_exact for one in found) else "NO",
        f"{live} of {looks}",
    ]  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
