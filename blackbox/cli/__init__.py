"""The command `blackbox`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from blackbox.cli.audit import audit
from blackbox.cli.change import cancel, reschedule
from blackbox.cli.check import check
from blackbox.cli.dead_letters import letters
from blackbox.cli.demo import demo
from blackbox.cli.error_exit import failures_explained
from blackbox.cli.ledger import ledger
from blackbox.cli.load import load
from blackbox.cli.pausing import pause, resume
from blackbox.cli.pending import pending
from blackbox.cli.promote import promote
from blackbox.cli.rebind import rebind
from blackbox.cli.run import run
from blackbox.cli.send import send
from blackbox.cli.show import show
from blackbox.cli.status import status


class PlainErrors(TyperGroup):
    """Ends expected failures with clear lines on stderr instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        with failures_explained():
            return super().invoke(ctx)


app = typer.Typer(
    cls=PlainErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    run, demo, send, cancel, reschedule, pending, show, letters, pause, resume, status, check, load,
    ledger, rebind, audit, promote,
):  # fmt: skip
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"blackbox {version('blackbox')}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Delayed messages for Kafka: deliver this message to that topic, in 90 seconds, exactly once.

    Configured by BLACKBOX_* environment variables. `blackbox demo` shows it on servers of its own.
    """
