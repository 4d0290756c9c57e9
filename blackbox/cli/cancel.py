"""`blackbox cancel`: end a pending request, and say whether that was in time."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from blackbox.cli.failures import FAILED
from blackbox.cli.terminal import as_json, printable, quietly
from blackbox.control.control import Control


def cancel(
    id: Annotated[
        str, typer.Argument(help="The id that `send` printed, or the one it was sent with (--id).")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Cancel a pending request, by a caller's id all under it; too late once delivery is under way.

    Ends with 1 unless it was cancelled.
    """
    settings = quietly()
    with closing(Control(settings)) as control:
        done = control.cancel(id)
    if json:
        typer.echo(as_json(asdict(done)))
    else:
        what = id if done.request is None else done.request.source
        state = "" if done.request is None else done.request.state
        typer.echo(
            printable(
                {
                    "cancelled": f"cancelled {what}",
                    "too-late": f"too late: {what} is {state}",
                    "asked": f"asked to cancel {what}; the service has not taken it in yet",
                    "undetermined": f"not cancelled: {'' if done.request is None else done.request.detail}",
                    "unknown": f"{what}: no request of this id, and none pending under it",
                }[done.outcome]
            )
        )
        for other in done.others:
            typer.echo(printable(f"the same id at {other.source}: {other.state}"))
    if done.outcome != "cancelled":
        raise typer.Exit(FAILED)
