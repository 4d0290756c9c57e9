"""`blackbox reschedule`: a pending request at another time."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from blackbox.cli.failures import FAILED, BadUsage
from blackbox.cli.terminal import as_json, printable, quietly, typed_instant
from blackbox.control.control import Control


def reschedule(
    id: Annotated[
        str, typer.Argument(help="The id that `send` printed, or the one it was sent with (--id).")
    ],
    countdown: Annotated[float | None, typer.Option(help="Seconds from now.")] = None,
    at: Annotated[
        str | None, typer.Option(help="Instead: RFC 3339 with offset, or epoch ms.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Have a pending request delivered at another time; prints its new id.

    Ends with 1 unless that was in time.
    """
    settings = quietly()
    try:
        with closing(Control(settings)) as control:
            done = control.reschedule(id, countdown_s=countdown, at=typed_instant(at))
    except ValueError as error:
        raise BadUsage(str(error)) from None
    if json:
        typer.echo(as_json(asdict(done)))
    else:
        told = {"unknown": f"{id}: no request of this id, and none pending under it"}
        if done.request is not None:
            told |= {
                "rescheduled": done.request.id,
                "too-late": f"too late: {done.request.source} is {done.request.state}",
                "undetermined": f"not rescheduled: {done.request.detail}",
                "asked": f"asked for {done.request.id}; the service has not taken it in yet",
            }
        typer.echo(printable(told[done.outcome]))
    if done.outcome != "rescheduled":
        raise typer.Exit(FAILED)
