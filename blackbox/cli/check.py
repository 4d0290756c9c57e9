"""`blackbox check`: is everything set up so that the promises hold?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import orjson
import typer

from blackbox import logs
from blackbox.cli.failures import FAILED
from blackbox.settings import load

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def check(json: AsJson = False) -> None:
    """Look at Kafka's and Redis' configuration; ends with 1 if `run` would refuse to start."""
    from blackbox.check import findings

    settings = load()
    logs.silent()
    found = findings(settings)
    if json:
        typer.echo(orjson.dumps([asdict(finding) for finding in found]))
    elif not found:
        typer.echo("Nothing found: Kafka and Redis are set up as they should be.")
    else:
        _print_table([(f.severity, f.text, f.remedy) for f in found])
    if any(finding.severity == "refuse" for finding in found):
        raise typer.Exit(FAILED)


def _print_table(rows: list[tuple[str, str, str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_lines=False, pad_edge=False)
    table.add_column("")
    table.add_column("found", ratio=3)
    table.add_column("remedy", ratio=2)
    for severity, text, remedy in rows:
        style = "bold red" if severity == "refuse" else "yellow"
        table.add_row(Text(severity, style=style), Text(text), Text(remedy), end_section=True)
    Console().print(table)
