"""`python -m tests.chaos`: injects seeded faults into real servers, and prints a table of the results."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.chaos.faults import FAULTS
from tests.chaos.play import Played, play_all
from tests.chaos.report import Run
from tests.chaos.schedule import Schedule, schedules
from tests.chaos.servers import FAKETIME, Servers

SEED = 20261121
LANES = 8
TOLD_EVERY = 50


def main(
    seed: Annotated[
        int, typer.Option(help="Decides everything except the timing of the machine.")
    ] = SEED,
    schedule: Annotated[list[int] | None, typer.Option(help="Play only these schedules.")] = None,
    fault: Annotated[
        str, typer.Option(help="Play only faults whose name contains this text.")
    ] = "",
    share: Annotated[
        float, typer.Option(help="Play this share of the schedules of each fault, at least one.")
    ] = 1.0,
    lanes: Annotated[int, typer.Option(help="Number of schedules at once.")] = LANES,
    write: Annotated[
        Path | None, typer.Option(help="The file for the results as Markdown.")
    ] = None,
) -> None:
    """Play schedules. Failed schedules are listed, and their logs are kept."""
    console = Console(width=None if sys.stdout.isatty() else 240)
    chosen = choose(seed, schedule, fault, share)
    folder = Path(tempfile.mkdtemp(prefix="blackbox-chaos-"))
    console.print(f"seed {seed}: {len(chosen)} schedules, {lanes} at once, in {folder}")
    began = time.monotonic()
    played = watched(chosen, lanes, folder, console)
    run = Run(seed, lanes, os.cpu_count() or 1, time.monotonic() - began, played)
    console.print(run.table())
    console.print(
        f"transactions found torn: {sum(one.torn for one in played)}; messages that could not "
        f"be read at the first attempt: {sum(one.books.shown_later for one in played)}"
    )
    if write is not None:
        write.write_text(run.page())
    failed = [one for one in played if one.complaints]
    for one in failed:
        console.print(f"{one.schedule.name} ({one.schedule.fault}), see {one.folder}")
    raise typer.Exit(1 if failed else 0)


def choose(seed: int, numbers: list[int] | None, fault: str, share: float) -> list[Schedule]:
    """The selected schedules of this seed."""
    left = {
        name: max(1, round(found.count * share))
        for name, found in FAULTS.items()
        if fault.lower() in name.lower() and (FAKETIME or not found.needs_faketime)
    }
    chosen = []
    for one in schedules(seed, {name: found.count for name, found in FAULTS.items()}):
        if numbers and one.number not in numbers:
            continue
        if numbers or left.get(one.fault, 0) > 0:
            left[one.fault] = left.get(one.fault, 0) - 1
            chosen.append(one)
    return chosen


def watched(chosen: list[Schedule], lanes: int, folder: Path, console: Console) -> list[Played]:
    """Play them with a progress bar."""
    played: list[Played] = []
    servers = Servers(folder, lanes)
    columns = (
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
    )  # fmt: skip
    try:
        servers.start()
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=len(chosen))

            def done(one: Played) -> None:
                played.append(one)
                if one.complaints:
                    first = one.complaints[0][:300]
                    bar.console.print(f"{one.schedule.name} ({one.schedule.fault}): {first}")
                bar.update(task, advance=1, description=one.schedule.fault)
                if not console.is_terminal and len(played) % TOLD_EVERY == 0:
                    console.print(f"{len(played)} of {len(chosen)} schedules")

            play_all(chosen, servers, lanes, folder, done)
    finally:
        servers.close()
    return played


if __name__ == "__main__":
    typer.run(main)
