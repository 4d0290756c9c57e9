"""Run the contestants in turn, and print their rates and the ratios between them."""

from __future__ import annotations

import gc
import statistics
from collections import defaultdict
from collections.abc import Callable

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import ground, naive, raw, verbs
from blackbox.embedded import EmbeddedStack
from blackbox.support import interpreter

BATCH = 1000
# The naive loop gets a 40th of the requests, because all of them would take it minutes.
NAIVE_SHARE = 40

Run = Callable[[], tuple[float, float]]


def main(requests: int = 200_000, rounds: int = 5) -> None:
    """Intake (Kafka to Redis) and drain (Redis to Kafka) of requests of 200 bytes, one shard, one thread each."""
    console = Console()
    # as a service does: all contestants run in this process
    interpreter.tune()
    with EmbeddedStack() as stack, Progress(console=console) as progress:
        written = progress.add_task("writing the requests", total=None)
        field = ground.prepare(stack, requests)
        progress.update(written, total=1, completed=1)
        contestants = _contestants(field)
        task = progress.add_task("running", total=rounds * len(contestants))
        seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for _ in range(rounds):
            for name, (count, run) in contestants.items():
                progress.update(task, description=name)
                # The garbage of one contestant must not slow down the next one.
                gc.collect()
                intake_s, drain_s = run()
                seconds[name].append((count / intake_s, count / drain_s))
                progress.advance(task)
    _print(console, seconds, requests, rounds)


def _contestants(field: ground.Ground) -> dict[str, tuple[int, Run]]:
    few = field.count // NAIVE_SHARE
    return {
        "raw": (field.count, lambda: raw.run(field, BATCH, exactly_once=True)),
        "blackbox": (field.count, lambda: verbs.run(field, BATCH, exactly_once=True)),
        "blackbox, at least once": (
            field.count,
            lambda: verbs.run(field, BATCH, exactly_once=False),
        ),
        "naive": (few, lambda: naive.run(field, few)),
    }


def _print(
    console: Console, rates: dict[str, list[tuple[float, float]]], requests: int, rounds: int
) -> None:
    table = Table(
        title=f"{requests:,} requests of {ground.MESSAGE_BYTES} bytes, {BATCH:,} a commit, "
        f"median of {rounds} alternating rounds"
    )
    table.add_column("")
    for column in ("intake /s", "drain /s"):
        table.add_column(column, justify="right")
    for name, found in rates.items():
        table.add_row(
            name, *(f"{statistics.median(each):,.0f}" for each in zip(*found, strict=True))
        )
    table.add_section()
    for one, other in (
        ("blackbox", "raw"),
        ("blackbox", "naive"),
        ("blackbox", "blackbox, at least once"),
    ):
        table.add_row(f"{one} : {other}", *_ratios(rates[one], rates[other]))
    console.print(table)


def _ratios(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> list[str]:
    # Ratios within a round: its contestants ran one after the other on a machine in the same state.
    pairs = list(zip(ours, theirs, strict=True))
    return [f"{statistics.median(a[at] / b[at] for a, b in pairs):.2f}" for at in (0, 1)]


if __name__ == "__main__":
    typer.run(main)
