"""`blackbox check`: check that Kafka and Redis are configured as the guarantees require."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.text import Text

from blackbox.cli.error_exit import FAILED
from blackbox.cli.terminal import AsJson, as_json, load_silenced, print_whole, table


def check(json: AsJson = False) -> None:
    """Check the configuration of Kafka and Redis; exits with 1 if `run` would refuse to start."""
    from blackbox.config.check import findings
    from blackbox.config.wiring import rules

    settings = load_silenced()
    # `run` reads these files at its start: a bad one must be found before it is deployed.
    rules(settings)
    if settings.engine == "spark":
        settings.spark_settings()
    found = findings(settings)
    if json:
        typer.echo(as_json([asdict(finding) for finding in found]))
    elif not found:
        typer.echo("No findings: Kafka and Redis are configured as required.")
    else:
        _print_table([(f.severity, f.text, f.remedy) for f in found])
    if any(finding.severity == "refuse" for finding in found):
        raise typer.Exit(FAILED)


def _print_table(rows: list[tuple[str, str, str]]) -> None:
    shown = table([""])
    shown.add_column("found", ratio=3)
    shown.add_column("remedy", ratio=2)
    for severity, text, remedy in rows:
        style = "bold red" if severity == "refuse" else "yellow"
        shown.add_row(Text(severity, style=style), text, remedy, end_section=True)
    print_whole(shown)
