"""`blackbox promote`: promote requests of the cold tier that are due soon to the index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from blackbox.cli.batch import spark
from blackbox.cli.error_exit import FAILED
from blackbox.cli.terminal import AsJson, as_json, load_silenced, print_line, print_whole, table
from blackbox.config.wiring import kafka
from blackbox.support import logs

if TYPE_CHECKING:
    from blackbox.jobs.promote.tasks import Outcome

COUNTS = ("cold", "promoted", "renewed", "lost", "refused")


def promote(json: AsJson = False) -> None:
    """Promote cold requests that are due soon, and renew old ones; safe at any time.

    Exits with 1 when a shard could not be promoted, or requests were lost or refused.
    """
    settings = load_silenced()
    access = kafka(settings, logs.NO_CLIENT_LOG)
    with spark(settings, "promoting") as session:
        from blackbox.jobs.promote.promote import promote as promoted

        outcomes = promoted(session, settings, access)
    totals = {name: sum(getattr(o.promoted, name) for o in outcomes) for name in COUNTS}
    if json:
        typer.echo(as_json({"totals": totals, "shards": list(map(_row, outcomes))}))
    else:
        _print_table(outcomes, totals)
    for outcome in outcomes:
        if outcome.problem is not None:
            print_line(outcome.problem, err=True)
    if any(o.problem is not None for o in outcomes) or totals["lost"] or totals["refused"]:
        raise typer.Exit(FAILED)


def _row(outcome: Outcome) -> dict[str, Any]:
    counts = {name: getattr(outcome.promoted, name) for name in COUNTS}
    return {"shard": str(outcome.promoted.shard), **counts, "problem": outcome.problem}


def _print_table(outcomes: Sequence[Outcome], totals: Mapping[str, int]) -> None:
    footers = {"shard": "total"} | {name: f"{count:,}" for name, count in totals.items()}
    shown = table(["shard"], COUNTS, footers)
    for outcome in outcomes:
        numbers = (getattr(outcome.promoted, name) for name in COUNTS)
        shown.add_row(str(outcome.promoted.shard), *(f"{number:,}" for number in numbers))
    print_whole(shown)
