"""The costs and savings of `BLACKBOX_LINGER_MS`: lateness, processor time and transactions at steady loads.

Alternates between the values. `--tree` runs the service of another checkout, which may not know the setting.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, NamedTuple

import psutil
import typer
from confluent_kafka import Consumer, TopicPartition

from bench.field import LONGEST_S, Field, cpu_s, wait
from bench.report import markdown, say
from blackbox.embedded import EmbeddedStack
from blackbox.journal.topics import receipts_topic

WARM_UP_S = 8
WARM_UP_PER_S = 1_000


class Load(NamedTuple):
    """A steady load: requests per second, evenly over so many partitions."""

    per_s: int
    partitions: int


LOADS = (Load(10, 64), Load(100, 16), Load(1_000, 4), Load(10_000, 4))
RATES = [load.per_s for load in LOADS]
VALUES = [0, 20, 100, 500]


class Cost(NamedTuple):
    """One measurement: shares of a core, transactions per second, lateness in ms."""

    service: float
    broker: float
    redis: float
    transactions: float
    p50: float
    p99: float


def measure(stack: EmbeddedStack, field: Field, per_s: int, seconds: float) -> Cost:
    """The cost of a load while it is steady."""
    with field.service() as started:
        field.write_paced(WARM_UP_PER_S, WARM_UP_S)
        wait("warm", lambda: field.pending() == 0)
        # From here on as many messages are due as requests come in.
        start = field.ends()
        field.write_paced(per_s, LONGEST_S)
        processes = {
            "service": started,
            "broker": psutil.Process(stack.kafka.pid),
            "redis": psutil.Process(stack.redis.pid),
        }
        before = {name: cpu_s(one) for name, one in processes.items()}
        began, from_ms, receipts = time.monotonic(), time.time() * 1000, _receipts(stack, field)
        field.write_paced(per_s, seconds)
        took_s, until_ms = time.monotonic() - began, time.time() * 1000
        service, broker, server = (
            (cpu_s(one) - before[name]) / took_s for name, one in processes.items()
        )
        # Each transaction writes a receipt and Kafka's marker.
        transactions = (_receipts(stack, field) - receipts) / 2 / took_s
        wait("delivered", lambda: field.pending() == 0)
        read = field.read_back(start)
        late = sorted(at - due for due, at in read if from_ms <= due < until_ms)
    assert late[0] >= 0, f"early by {-late[0]} ms"
    p50, p99 = late[len(late) // 2], late[int(len(late) * 0.99)]
    return Cost(service, broker, server, transactions, p50, p99)


def _receipts(stack: EmbeddedStack, field: Field) -> int:
    """The offsets in all partitions of the receipts topic."""
    consumer = Consumer({"bootstrap.servers": stack.bootstrap_servers, "group.id": "bench"})
    topic = receipts_topic(field.requests)
    ends = [
        consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=10)[1]
        for p in range(field.partitions)
    ]
    consumer.close()
    return sum(ends)


def main(
    engines: Annotated[list[str], typer.Option(help="The engines.")] = ["process", "spark"],  # noqa: B006
    values: Annotated[list[int], typer.Option(help="Values of the setting, ms.")] = list(VALUES),  # noqa: B006
    rates: Annotated[
        list[int], typer.Option(help="Only these loads, by requests per second.")
    ] = list(RATES),  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Alternating rounds.")] = 3,
    seconds: Annotated[float, typer.Option(help="Length of a measurement.")] = 20.0,
    tree: Annotated[
        Path | None, typer.Option(help="Measure another checkout as well, as `before`.")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="A file for the figures, JSON.")] = None,
) -> None:
    """Print medians over the rounds."""
    kinds = ["before"] if tree is not None else []
    kinds += [str(value) for value in values]
    found: dict[str, list[Cost]] = defaultdict(list)
    with EmbeddedStack() as stack:
        for number in range(rounds):
            for engine in engines:
                for load in LOADS:
                    if load.per_s not in rates:
                        continue
                    for kind in kinds:
                        field = Field(stack, engine, load.partitions, stack.folder)
                        if kind == "before":
                            field.environment["PYTHONPATH"] = str(tree)
                        else:
                            field.environment["BLACKBOX_LINGER_MS"] = kind
                        cost = measure(stack, field, load.per_s, seconds)
                        row = f"{engine}, {load.per_s:,}/s over {load.partitions}, {kind}"
                        say(f"{number + 1} of {rounds}: {row}: {_shown(cost)}")
                        found[row].append(cost)
                        if write is not None:
                            write.write_text(json.dumps(found, indent=1) + "\n")
    rows = [
        [row, *_shown(Cost(*map(statistics.median, zip(*costs, strict=True))))]
        for row, costs in found.items()
    ]
    print(markdown(["load, linger", *HEAD], rows))


HEAD = ("service", "broker", "Redis", "transactions/s", "p50, ms", "p99, ms")


def _shown(cost: Cost) -> list[str]:
    shares = [f"{share:.3f}" for share in cost[:3]]
    return [*shares, f"{cost.transactions:.0f}", f"{cost.p50:.0f}", f"{cost.p99:.0f}"]


if __name__ == "__main__":
    typer.run(main)
