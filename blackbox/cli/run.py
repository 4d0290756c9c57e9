"""`blackbox run`: the service."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Annotated, Literal

import typer

from blackbox import logs
from blackbox.cli import signals
from blackbox.cli.failures import REFUSED, BadUsage, ended
from blackbox.settings import load

Half = Literal["intake", "dispatch"]


def run(
    embedded: Annotated[
        bool, typer.Option("--embedded", help="Bring Kafka and Redis along, on free ports.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="With --embedded: where their data live; else they are temporary."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Instead of BLACKBOX_ENGINE.")] = None,
    only: Annotated[
        Half | None, typer.Option(help="With Spark: one half; the other is another application.")
    ] = None,
) -> None:
    """Take in requests and deliver their messages, until SIGTERM or Ctrl-C."""
    from blackbox.run import Unsound, serve

    if data is not None and not embedded:
        raise BadUsage(f"--data {data} says where embedded servers keep theirs; add --embedded")
    logs.to_stderr()
    overrides = {} if engine is None else {"engine": engine}
    with ExitStack() as ending:
        if embedded:
            overrides |= _start_servers(data, overrides, ending)
        settings = load(**overrides)
        if only is not None and settings.engine != "spark":
            raise BadUsage(f"--only {only} is for the Spark engine; this is {settings.engine}")
        stop = Event()
        signals.announce(stop)
        try:
            serve(settings, stop, only)
        except Unsound as unsound:
            raise ended(str(unsound), REFUSED) from None


def _start_servers(
    data: Path | None, overrides: dict[str, str], ending: ExitStack
) -> dict[str, str]:
    from blackbox.embedded import EmbeddedStack

    load(kafka_bootstrap_servers="embedded", **overrides)
    signals.interrupt()
    stack = EmbeddedStack(data, progress=lambda text: typer.echo(text, err=True))
    ending.enter_context(stack)
    typer.echo(f"export BLACKBOX_KAFKA_BOOTSTRAP_SERVERS={stack.bootstrap_servers}")
    typer.echo(f"export BLACKBOX_REDIS_URL={stack.redis_url}")
    return {"kafka_bootstrap_servers": stack.bootstrap_servers, "redis_url": stack.redis_url}
