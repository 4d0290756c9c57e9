"""`blackbox show`: show the state of a request."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from blackbox.admin.lookup import StatusLookup
from blackbox.cli.error_exit import FAILED, BadUsage, error_exit
from blackbox.cli.terminal import AsJsonLines, as_json, instant, load_silenced, print_line
from blackbox.core.request_status import RequestStatus
from blackbox.records.request import MAX_OFFSET, Shard, locate, placed
from blackbox.support.logs import printable

NOT_FOUND = ("unknown", "over", "undetermined")
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
    with closing(StatusLookup(settings)) as lookup:
        lookup.count_partitions()
        statuses = _statuses(id, lookup, list(settings.topics))
    for status in statuses:
        typer.echo(as_json(_as_json(status)) if json else _as_text(status))
    if all(status.state in NOT_FOUND for status in statuses):
        if not statuses:
            print_line(f"{id}: no shard has this request", err=True)
        raise typer.Exit(FAILED)


def _statuses(text: str, lookup: StatusLookup, topics: list[str]) -> list[RequestStatus]:
    if _MEMBER.fullmatch(text) and int(text, 16) <= MAX_OFFSET:
        # A member is an offset, and does not name its shard: look in all of them.
        everywhere = (lookup.status(shard, int(text, 16)) for shard in lookup.shards())
        return [status for status in everywhere if status.state != "unknown"]
    try:
        places = [_place(text, topics)]
    # Neither an id nor a place; only the index knows caller ids, and only while they are pending.
    except BadUsage as usage:
        places = lookup.pending_under(text)
        if not places:
            raise error_exit(str(usage)) from None
    return [lookup.status(*place) for place in places]


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


def _as_json(status: RequestStatus) -> dict[str, object]:
    return {name: held for name, held in asdict(status).items() if held is not None}


def _as_text(status: RequestStatus) -> str:
    lines = [f"{status.id}  {status.source}", f"  {_sentence(status)}"]
    if status.target is not None and status.state != "delivered":
        lines.append(f"  to        {status.target}")
    if status.caller is not None:
        lines.append(f"  caller    {status.caller}")
    if status.caller_id is not None and status.state != "cancel":
        lines.append(f"  caller id {status.caller_id}")
    if status.due_ms is not None:
        lines.append(f"  due       {instant(status.due_ms)}")
    if status.is_cold:
        lines.append("  waits     in Kafka, not in Redis, until it is promoted")
    if status.carried is not None:
        lines.append(f"  carried   to {status.carried}")
    if status.attempts:
        if status.reason is None and status.detail is not None:
            lines.append(f"  waits     {status.detail}")
        if status.next_try_ms is not None:
            lines.append(f"  next try  {instant(status.next_try_ms)}")
        else:
            lines.append("  next try  once its target accepts messages")
    if status.reason is not None:
        lines.append(f"  reason    {status.reason}: {status.detail or 'no detail'}")
    return "\n".join(map(printable, lines))


def _sentence(status: RequestStatus) -> str:
    at = instant(status.at_ms)
    if status.state == "delivered":
        late_ms = (status.at_ms or 0) - (status.due_ms or status.at_ms or 0)
        return f"delivered to {status.place} at {at}, {late_ms} ms after it was due"
    if status.state in ("dead", "expired", "invalid"):
        return f"dead-lettered at {at}, to {status.place}"
    return {
        "pending": "pending" if status.reason is None else "to become a dead letter",
        "ended": "not pending and never delivered: cancelled, or replaced by a later request",
        "unread": "in Kafka, not yet read",
        "cancel": f"not a request, but a cancel of {status.caller_id!r}",
        "tombstone": "not a request, but the tombstone of a schedule that has ended",
        "over": f"no longer pending; {status.detail}",
        "undetermined": f"not known: {status.detail}",
        "unknown": "not found: never written, or already removed from Kafka",
    }[status.state]
