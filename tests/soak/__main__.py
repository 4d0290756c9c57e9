"""`python -m tests.soak`: half an hour at half of the machine's maximum rate, with a fault every minute."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from blackbox.embedded import EmbeddedStack
from tests.soak.run import run
from tests.support.world import World

WHOLE_HEAP = "-Xms512m -XX:+AlwaysPreTouch"
"""Otherwise Kafka's memory grows for hours, until its first full collection."""

CHECKED_OFTEN = {"log.retention.check.interval.ms": "5000"}
"""With Kafka's default of five minutes, its open segments rise and fall with a period near that of the faults."""


def main(
    minutes: Annotated[float, typer.Option(help="How long the load lasts.")] = 30.0,
    engine: Annotated[str, typer.Option(help="process or spark")] = "process",
    share: Annotated[float, typer.Option(help="The share of the machine's maximum rate.")] = 0.5,
    every_s: Annotated[float, typer.Option(help="Seconds from one fault to the next.")] = 60.0,
    write: Annotated[
        Path | None, typer.Option(help="A folder for soak.md, soak.svg and soak.json.")
    ] = None,
) -> None:
    """Exit code 1 if something is lost, duplicated, early, late outside of faults, or grows."""
    console = Console()
    os.environ["JAVA_TOOL_OPTIONS"] = WHOLE_HEAP
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    stack = EmbeddedStack()
    stack.kafka.settings = CHECKED_OFTEN
    with stack, Progress(*columns, console=console, transient=True) as bar:
        folder = stack.folder / "soak"
        folder.mkdir()
        shown = bar.add_task("", total=minutes * 60)

        def say(what: str, done_s: float) -> None:
            bar.update(shown, description=what, completed=done_s)
            if not console.is_terminal:
                console.print(f"{done_s / 60:4.1f} min: {what}")

        with World(stack.kafka, stack.redis, folder, engine) as world:
            soak = run(world, minutes * 60, share, every_s, say)
    console.print(soak.table())
    if write is not None:
        soak.write(write)
    for complaint in soak.complaints():
        console.print(complaint)
    raise typer.Exit(int(bool(soak.complaints())))


if __name__ == "__main__":
    typer.run(main)
