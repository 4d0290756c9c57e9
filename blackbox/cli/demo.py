"""`blackbox demo`: a complete run on servers of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from blackbox.cli import signals
from blackbox.cli.error_exit import FAILED, INTERRUPTED, BadUsage
from blackbox.support import logs


def demo(
    requests: Annotated[
        int, typer.Option(min=50, max=1_000_000, help="Number of requests.")
    ] = 10_000,
    seconds: Annotated[
        float,
        typer.Option(
            min=1, max=3600, metavar="SECONDS", help="All requests are due within SECONDS."
        ),
    ] = 15.0,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep it running afterwards, until Ctrl-C.")
    ] = False,
    engine: Annotated[str, typer.Option(help="spark or process.")] = "spark",
    report: Annotated[
        Path, typer.Option(metavar="FILE", help="Write the audit report to this file.")
    ] = Path("blackbox-audit.html"),
) -> None:
    """Start Kafka, Redis and blackbox, send requests, and verify what was delivered.

    Exits with 0 only if every message was delivered exactly once and not early, every invalid request
    became a dead letter, and the audit, if its packages are installed, finds no exceptions.
    """
    if not report.absolute().parent.is_dir():
        raise BadUsage(f"--report {report}: the folder {report.absolute().parent} does not exist")
    # When the command was started: almost all the time until here was CPU time.
    began_s = time.time() - time.process_time()
    logs.disable()
    # Also for SIGTERM: only an exception in the main thread stops the servers.
    signals.interrupt()
    from rich.console import Console

    from blackbox.demo.display import Display
    from blackbox.demo.performance import Demo

    show = Demo(requests, seconds, engine, keep, began_s, report)
    try:
        is_good = show.perform(Display(Console()))
    except KeyboardInterrupt:
        typer.echo("\nInterrupted; all servers were stopped.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if not is_good:
        raise typer.Exit(FAILED)
