"""`blackbox show`: show the state of a request."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from blackbox.admin.lookup import StatusLookup
from blackbox.cli.error_exit import FAILED, BadUsage, error_exit
from blackbox.cli.terminal import AsJsonLines, as_json, instant, load_silenced
from blackbox.core.request_status import Fate
from blackbox.records.request import MAX_OFFSET, Shard, locate, placed
from blackbox.support.logs import printable

NOT_TOLD = ("unknown", "over", "undetermined")
_MEMBER = re.compile(r"[0-9a-f]{16}")


def show(
    id: Annotated[
        str, typer.Argument(help="An id as `send` prints it, a place such as TB/3@1234, the 16 hex "
        "digits of its key in Redis, or, while it is pending, its caller's id.")
    ],
    json: AsJsonLines = False,
) -> None:  # fmt: skip
    """Show whether a request is pending, where its message went, or why it is a dead letter.

    Exits with 1 when there is no such request, or its state was not found in time.
    """
    settings = load_silenced()
    with closing(StatusLookup(settings)) as registry:
        registry.count_partitions()
        fates = _fates(id, registry, list(settings.topics))
    for fate in fates:
        typer.echo(as_json(_as_json(fate)) if json else _as_text(fate))
    if all(fate.state in NOT_TOLD for fate in fates):
        if not fates:
            typer.echo(f"{id}: no shard has this request", err=True)
        raise typer.Exit(FAILED)


def _fates(text: str, registry: StatusLookup, topics: list[str]) -> list[Fate]:
    """The fates of the requests that `text` names; those pending under a caller's id newest first."""
    if _MEMBER.fullmatch(text) and int(text, 16) <= MAX_OFFSET:
        # A member of the index does not name its shard.
        everywhere = (registry.fate(shard, int(text, 16)) for shard in registry.shards())
        return [fate for fate in everywhere if fate.state != "unknown"]
    try:
        places = [_place(text, topics)]
    except BadUsage as usage:
        places = registry.holders(text)
        if not places:
            raise error_exit(str(usage)) from None
    return [registry.fate(*place) for place in places]


def _place(text: str, topics: list[str]) -> tuple[Shard, int]:
    if place := placed(text):
        topic = place[0].topic
        if topic not in topics:
            raise BadUsage(
                f"{text}: {topic!r} is not one of the request topics {', '.join(topics)}"
            )
        return place
    try:
        return locate(text, topics)
    except ValueError as error:
        raise BadUsage(
            f"{error}, a place such as {topics[0]}/3@1234, the 16 hex digits of a key in Redis, or "
            "the caller's id of a pending request"
        ) from None


def _as_json(fate: Fate) -> dict[str, object]:
    return {name: held for name, held in asdict(fate).items() if held is not None}


def _as_text(fate: Fate) -> str:
    lines = [f"{fate.id}  {fate.source}", f"  {_sentence(fate)}"]
    if fate.target is not None and fate.state != "delivered":
        lines.append(f"  to        {fate.target}")
    if fate.caller is not None:
        lines.append(f"  caller    {fate.caller}")
    if fate.caller_id is not None and fate.state != "cancel":
        lines.append(f"  caller id {fate.caller_id}")
    if fate.due_ms is not None:
        lines.append(f"  due       {instant(fate.due_ms)}")
    if fate.is_cold:
        lines.append("  waits     in Kafka, not in Redis, until it is promoted")
    if fate.carried is not None:
        lines.append(f"  carried   to {fate.carried}")
    if fate.attempts:
        if fate.reason is None and fate.detail is not None:
            lines.append(f"  waits     {fate.detail}")
        if fate.next_try_ms is not None:
            lines.append(f"  next try  {instant(fate.next_try_ms)}")
        else:
            lines.append("  next try  once its target accepts messages")
    if fate.reason is not None:
        lines.append(f"  reason    {fate.reason}: {fate.detail or 'no detail'}")
    return "\n".join(map(printable, lines))


def _sentence(fate: Fate) -> str:
    at = instant(fate.at_ms)
    if fate.state == "delivered":
        late_ms = (fate.at_ms or 0) - (fate.due_ms or fate.at_ms or 0)
        return f"delivered to {fate.place} at {at}, {late_ms} ms after it was due"
    if fate.state in ("dead", "expired", "invalid"):
        return f"dead-lettered at {at}, to {fate.place}"
    return {
        "pending": "pending" if fate.reason is None else "to become a dead letter",
        "ended": "not pending and never delivered: cancelled, or replaced by a later request",
        "unread": "in Kafka, not yet read",
        "cancel": f"not a request, but a cancel of {fate.caller_id!r}",
        "tombstone": "not a request, but the tombstone of a schedule that has ended",
        "over": f"no longer pending; {fate.detail}",
        "undetermined": f"not known: {fate.detail}",
        "unknown": "not found: never written, or already removed from Kafka",
    }[fate.state]
