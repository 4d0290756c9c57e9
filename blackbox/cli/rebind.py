"""`blackbox rebind`: bind the indexes of a request topic to the current topic, cluster and group."""

from __future__ import annotations

from typing import Annotated

import typer

from blackbox.cli.error_exit import BadUsage
from blackbox.cli.terminal import load_silenced, print_line
from blackbox.rebind import Pending
from blackbox.rebind import rebind as rebound


def rebind(
    topic: Annotated[str, typer.Argument(help="The request topic.")],
    pending: Annotated[
        Pending,
        typer.Option(
            help="Requests pending in the earlier topic of this name: deliver or drop them."
        ),
    ],
) -> None:
    """Accept that a request topic was created again, became shorter, or has another group.

    Shards whose index does not match stay closed until this is run; the log and /readyz say so.
    """
    settings = load_silenced()
    if topic not in settings.topics:
        known = ", ".join(settings.topics)
        raise BadUsage(f"{topic!r} is not one of the request topics: {known}")
    for one in rebound(settings, topic, pending):
        line = (
            f"{one.shard}: {one.why}; {one.again} written again, {one.dropped} dropped, {one.cold} "
            "beyond the horizon lost with their records"
        )
        if one.letters:
            line += f"; {one.letters} became dead letters"
        if one.superseded:
            line += f"; {one.superseded} since replaced or cancelled by their callers"
        print_line(line)
