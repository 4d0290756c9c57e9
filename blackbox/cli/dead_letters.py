"""`blackbox letters`: list, replay or discard dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from blackbox.admin.admin import Admin
from blackbox.admin.dead_letters import ClosedLetters
from blackbox.api.answers import LetterState
from blackbox.cli.error_exit import FAILED, BadUsage
from blackbox.cli.terminal import AsJsonLines, as_json, instant, load_silenced, printable
from blackbox.journal.dead_letter_topic import DeadLetter


def letters(
    reason: Annotated[str | None, typer.Option(help="Only letters with this reason.")] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Also letters that were replayed or discarded.")
    ] = False,
    replay: Annotated[
        list[str] | None,
        typer.Option(metavar="PLACE", help="Replay the dead letter at this place; repeatable."),
    ] = None,
    discard: Annotated[
        list[str] | None,
        typer.Option(metavar="PLACE", help="Discard the dead letter at this place; repeatable."),
    ] = None,
    json: AsJsonLines = False,
) -> None:
    """List open dead letters, newest first; replay some, or discard some.

    A listing reads the last 10,000 records of each partition, and shows letters of the configured request
    topics. PLACE is the place that it prints, such as blackbox.dead-letters/0@17. Exits with 1 when a named
    letter was left unchanged.
    """
    if replay and discard:
        raise BadUsage("both --replay and --discard are given; give one of them")
    settings = load_silenced()
    with closing(Admin(settings)) as admin:
        if replay or discard:
            _report(admin.close_letters(replay or discard or [], replay=bool(replay)), json)
        else:
            _list(admin.letters(reason, is_open=not all_), json)


def _list(found: Sequence[DeadLetter], json: bool) -> None:
    for letter in found:
        if json:
            state = LetterState.of(letter).model_dump(exclude_none=True)
            typer.echo(as_json(state))
            continue
        became = f" ({letter.became})" if letter.became else ""
        typer.echo(printable(f"{letter.place}  {instant(letter.at_ms)}  {letter.reason}{became}"))
        typer.echo(
            printable(f"  of {letter.source}, caller {letter.caller or 'unknown'}: {letter.detail}")
        )


def _report(done: ClosedLetters, json: bool) -> None:
    if json:
        typer.echo(as_json(asdict(done)))
    else:
        for place in done.done:
            typer.echo(printable(f"{place}: done"))
        for place, why in done.left.items():
            typer.echo(printable(f"{place}: {why}"))
    if done.left:
        raise typer.Exit(FAILED)
