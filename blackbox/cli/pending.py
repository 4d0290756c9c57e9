"""`blackbox pending`: list pending requests, the soonest first."""

from __future__ import annotations

import time
from contextlib import closing
from itertools import islice
from typing import Annotated

import typer

from blackbox.admin.admin import Admin
from blackbox.admin.pending import PendingFilter
from blackbox.api.answers import RequestState
from blackbox.cli.terminal import (
    AsJsonLines,
    as_json,
    instant,
    load_silenced,
    print_whole,
    printable,
    table,
)

PAGE = 100


def pending(
    target: Annotated[str | None, typer.Option(help="Only requests to this topic.")] = None,
    caller: Annotated[str | None, typer.Option(help="Only requests by this caller.")] = None,
    within: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Only requests that are due within SECONDS, or overdue."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of requests.")] = 50,
    json: AsJsonLines = False,
) -> None:
    """List pending requests, the soonest first, without the cold tier; reads only."""
    settings = load_silenced()
    to_ms = None if within is None else int((time.time() + within) * 1000)
    matching = PendingFilter(to_ms=to_ms, target=target, caller=caller)
    with closing(Admin(settings)) as admin:
        each = admin.all_pending(settings.topics, matching, min(limit, PAGE))
        found = list(islice(each, limit))
    states = [RequestState.of_pending(one) for one in found]
    if json:
        for state in states:
            typer.echo(as_json(state.model_dump(exclude_none=True)))
    else:
        _print_table(states)


def _print_table(states: list[RequestState]) -> None:
    listed = table(("due", "to topic", "caller", "its id", "id"))
    for state in states:
        names = (state.target, state.caller, state.caller_id)
        shown = (printable(name or "-") for name in names)
        listed.add_row(instant(state.due_ms), *shown, state.id)
    print_whole(listed)
