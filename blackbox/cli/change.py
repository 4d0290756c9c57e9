"""`blackbox cancel` and `blackbox reschedule`: cancel a pending request, or deliver it at another time."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from blackbox.admin.admin import Admin
from blackbox.admin.changes import Cancelled, Rescheduled
from blackbox.cli.error_exit import FAILED, BadUsage
from blackbox.cli.terminal import (
    AsJson,
    At,
    Countdown,
    as_json,
    load_silenced,
    printable,
    typed_instant,
)

Id = Annotated[
    str, typer.Argument(help="The id that `send` printed, or the --id it was sent with.")
]


def cancel(id: Id, json: AsJson = False) -> None:
    """Cancel a pending request, or all under a caller's id; too late once it is in flight.

    Exits with 1 unless it was cancelled.
    """
    with closing(Admin(load_silenced())) as admin:
        done = admin.cancel(id)
    what = "" if done.request is None else done.request.source
    texts = {
        "cancelled": f"cancelled {what}",
        "asked": f"wrote a cancel of {what}; the service has not read it yet",
    }
    _report(done, "cancelled", texts, id, json=json)
    if not json:
        for other in done.others:
            typer.echo(printable(f"also under this id: {other.source}: {other.state}"))
    if done.outcome != "cancelled":
        raise typer.Exit(FAILED)


def reschedule(
    id: Id,
    countdown: Countdown = None,
    at: At = None,
    json: AsJson = False,
) -> None:
    """Deliver a pending request at another time; prints its new id.

    Exits with 1 unless it was rescheduled in time.
    """
    settings = load_silenced()
    try:
        with closing(Admin(settings)) as admin:
            done = admin.reschedule(id, countdown_s=countdown, at=typed_instant(at))
    except ValueError as error:
        raise BadUsage(str(error)) from None
    what = "" if done.request is None else done.request.id
    texts = {
        "rescheduled": what,
        "asked": f"wrote {what}; the service has not read it yet",
    }
    _report(done, "rescheduled", texts, id, json=json)
    if done.outcome != "rescheduled":
        raise typer.Exit(FAILED)


def _report(
    done: Cancelled | Rescheduled, done_word: str, texts: dict[str, str], id: str, *, json: bool
) -> None:
    if json:
        typer.echo(as_json(asdict(done)))
    elif done.request is None:
        typer.echo(printable(f"{id}: no request has this id, and none is pending under it"))
    else:
        texts["too-late"] = f"too late: {done.request.source} is {done.request.state}"
        if done.request.state == "ended" and done.request.detail is not None:
            texts["too-late"] += f": {done.request.detail}"
        texts["undetermined"] = f"not {done_word}: {done.request.detail}"
        typer.echo(printable(texts[done.outcome]))
