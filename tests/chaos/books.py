"""Total-queue accounting: compares every request in the journal with every delivery.

Uses the requests as Kafka acknowledged them, because blackbox trims the journal, and the deliveries as a
consumer reads them. Uses no information from blackbox.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from confluent_kafka import Message

REVIVED_AFTER_MS = 3000
"""A message delivered this long after its cancel was written shows that the cancel was lost."""

SHOWN_CHARS = 40


@dataclass(slots=True)
class Asked:
    """A request, with the partition and offset of its record.

    `ended_ms` is the time at which its cancel or replacement was written. `due_ms` is None for requests that can only
    become a dead letter.
    """

    body: str
    place: tuple[int | None, int | None]
    target: str
    due_ms: int | None
    ended_ms: int | None = None

    def is_awaited(self, now_ms: int) -> bool:
        """Whether it must have been delivered by now."""
        return self.ended_ms is None and (self.due_ms is None or self.due_ms <= now_ms)


@dataclass(slots=True)
class Account:
    """The outcomes of the requests. `again` counts repeated deliveries.

    `revived` were delivered long after their end. `wrong` were delivered to a wrong topic. `shown_later`
    were missing at the first read, but not at the last.
    """

    requests: int
    delivered: int = 0
    lost: list[str] = field(default_factory=list)
    shown_later: int = 0
    again: Counter[str] = field(default_factory=Counter)
    early: list[str] = field(default_factory=list)
    revived: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    late_ms: list[int] = field(default_factory=list, repr=False)

    def complaints(self, *, may_repeat: int, may_revive: bool) -> list[str]:
        """Violations of the guarantees. `may_repeat` is the allowed number of repeated deliveries."""
        found = [f"lost: {body}" for body in self.lost]
        if self.again.total() > may_repeat:
            found += [
                f"delivered {count} times too often: {body}" for body, count in self.again.items()
            ]
        found += [f"delivered early {how}" for how in self.early]
        if not may_revive:
            found += [f"delivered long after its end: {body}" for body in self.revived]
        return found + self.wrong


def account(
    asked: Iterable[Asked],
    arrived: Iterable[Message],
    letters: Iterable[Message],
    *,
    now_ms: int,
    doomed: frozenset[str] = frozenset(),
    went_down: Iterable[tuple[int, int]] = (),
    away_ms: int = 0,
) -> Account:
    """Compare the requests with the target topics and the dead-letter topic.

    Requests for a `doomed` topic may become dead letters. `went_down` are the places of the requests that
    were delivered to it before it was deleted. Kafka was away for `away_ms`: a cancel that was written just before
    could not be read, and a message that became due could not be delivered.
    """
    by_body = {one.body: one for one in asked}
    bodies = {one.place: one.body for one in by_body.values()}
    books = Account(requests=len(by_body))
    outcomes = Counter(bodies[place] for place in went_down)
    for message in arrived:
        body = (message.value() or b"").decode()
        one = by_body.get(body)
        if one is None or one.due_ms is None or one.target != message.topic():
            books.wrong.append(f"no such request, in {message.topic()}: {body[:SHOWN_CHARS]}")
            continue
        outcomes[body] += 1
        books.delivered += 1
        _note_time(books, one, message.timestamp()[1], one.due_ms, REVIVED_AFTER_MS + away_ms)
    for message in letters:
        body = _asked_in(message)
        one = by_body.get(body)
        if one is None or (one.due_ms is not None and one.target not in doomed):
            books.wrong.append(f"unexpected dead letter: {dict(message.headers() or [])}")
        outcomes[body] += 1
    for body, one in by_body.items():
        if outcomes[body] > 1:
            books.again[body[:SHOWN_CHARS]] = outcomes[body] - 1
        elif outcomes[body] == 0 and one.is_awaited(now_ms):
            books.lost.append(body[:SHOWN_CHARS])
    return books


def _asked_in(letter: Message) -> str:
    """The body of the request. If the record was deleted with its topic, the dead letter has only the body.

    Of a record that nobody can read, it is the place.
    """
    about = dict(letter.headers() or [])
    if about.get("blackbox-reason") == b"unreadable":
        source = about["blackbox-source"]
        assert isinstance(source, bytes)
        return source.decode()
    value = (letter.value() or b"").decode()
    return str(json.loads(value)["message"]) if value.startswith("{") else value


def _note_time(books: Account, one: Asked, at_ms: int, due_ms: int, revived_after_ms: int) -> None:
    books.late_ms.append(at_ms - due_ms)
    if at_ms < due_ms:
        books.early.append(f"by {due_ms - at_ms} ms: {one.body[:SHOWN_CHARS]}")
    if one.ended_ms is not None and at_ms > one.ended_ms + revived_after_ms:
        books.revived.append(f"{one.body[:SHOWN_CHARS]}, {at_ms - one.ended_ms} ms after it")


def read_journal(journal: Iterable[Message]) -> list[Asked]:
    """The requests in journal order, each with the time of its end, if it was ended."""
    asked: list[Asked] = []
    holders: dict[tuple[int | None, str], Asked] = {}
    for message in journal:
        if _was_carried(message):
            continue
        value = json.loads(message.value() or b"")
        written_ms = message.timestamp()[1]
        held = holders.pop((message.partition(), value.get("id")), None)
        if held is not None:
            held.ended_ms = written_ms
        if "cancel" in value:
            continue
        is_valid = isinstance(value["countdown"], int | float)
        due_ms = written_ms + round(value["countdown"] * 1000) if is_valid else None
        place = message.partition(), message.offset()
        one = Asked(value["message"], place, value["topic"], due_ms)
        asked.append(one)
        if "id" in value:
            holders[message.partition(), value["id"]] = one
    return asked


def _was_carried(message: Message) -> bool:
    """Whether this is a carried record of the cold tier, which is not a new request."""
    return "blackbox-carried" in dict(message.headers() or [])
