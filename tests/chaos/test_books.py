"""The accounting finds messages that are lost, duplicated, early, revived or in a wrong topic."""

from __future__ import annotations

import json

from confluent_kafka import Message

from tests.chaos.books import REVIVED_AFTER_MS, Account, account, read_journal
from tests.chaos.schedule import Schedule, schedules

NOW_MS = 1_000_000


def request(offset: int, body: str, at_ms: int, countdown_s: float = 1, **more: object) -> Message:
    value = {"topic": "orders", "message": body, "countdown": countdown_s} | more
    return record("TB", json.dumps(value), at_ms, offset)


def record(topic: str, value: str, at_ms: int, offset: int = 0) -> Message:
    return Message(
        topic=topic, partition=0, offset=offset, value=value.encode(), timestamp=(2, at_ms)
    )


def books_of(
    journal: list[Message],
    arrived: list[Message],
    letters: list[Message] | None = None,
    doomed: frozenset[str] = frozenset(),
) -> Account:
    asked = read_journal(journal)
    return account(asked, arrived, letters or [], now_ms=NOW_MS, doomed=doomed)


def test_one_delivery_in_time_is_no_complaint() -> None:
    books = books_of([request(0, "a", 5000)], [record("orders", "a", 6010)])

    assert books.complaints(may_repeat=0, may_revive=False) == []
    assert (books.requests, books.delivered, books.late_ms) == (1, 1, [10])


def test_only_a_due_request_without_a_delivery_is_lost() -> None:
    books = books_of([request(0, "a", 5000), request(1, "b", 5000, countdown_s=3600)], [])

    assert books.lost == ["a"]


def test_a_second_delivery_is_counted_and_may_be_allowed() -> None:
    books = books_of([request(0, "a", 5000)], [record("orders", "a", 6000)] * 2)

    assert books.again == {"a": 1}
    assert books.complaints(may_repeat=0, may_revive=False)
    assert books.complaints(may_repeat=1, may_revive=False) == []


def test_a_message_and_a_dead_letter_of_one_request_count_as_two() -> None:
    journal = [request(0, "a", 5000)]
    letter = record("dead", (journal[0].value() or b"").decode(), 7000)
    books = books_of(journal, [record("orders", "a", 6000)], [letter], frozenset({"orders"}))

    assert books.again == {"a": 1}


def test_a_millisecond_early_is_early() -> None:
    assert books_of([request(0, "a", 5000)], [record("orders", "a", 5999)]).early


def test_an_ended_request_may_be_delivered_shortly_after_its_end_only() -> None:
    ended = [request(0, "a", 5000, id="x"), record("TB", '{"id": "x", "cancel": true}', 5500, 1)]

    assert books_of(ended, []).lost == []
    assert books_of(ended, [record("orders", "a", 6000)]).revived == []
    late_ms = 5500 + REVIVED_AFTER_MS + 1
    assert books_of(ended, [record("orders", "a", late_ms)]).revived == ["a, 3001 ms after it"]


def test_a_cancel_may_be_read_later_by_as_much_as_kafka_was_away() -> None:
    cancel = record("TB", '{"id": "x", "cancel": true}', 5500, 1)
    asked = read_journal([request(0, "a", 5000, id="x"), cancel])
    late = [record("orders", "a", 5500 + REVIVED_AFTER_MS + 700)]

    assert account(asked, late, [], now_ms=NOW_MS, away_ms=700).revived == []
    assert account(asked, late, [], now_ms=NOW_MS, away_ms=699).revived


def test_a_replacement_ends_a_request_and_must_be_delivered() -> None:
    replaced = [request(0, "a", 5000, id="x"), request(1, "b", 5500, id="x")]

    assert books_of(replaced, []).lost == ["b"]


def test_an_unknown_message_or_one_in_another_topic_is_wrong() -> None:
    journal = [request(0, "a", 5000)]

    assert books_of(journal, [record("orders", "other", 6000)]).wrong
    assert books_of(journal, [record("billing", "a", 6000)]).wrong
    assert books_of(journal, [], [record("dead", (journal[0].value() or b"").decode(), 1)]).wrong


def test_an_invalid_request_must_become_a_dead_letter() -> None:
    journal = [record("TB", '{"topic": "orders", "message": "a", "countdown": "soon"}', 5000)]

    assert books_of(journal, []).lost == ["a"]
    assert books_of(journal, [record("orders", "a", 6000)]).wrong
    letter = record("dead", (journal[0].value() or b"").decode(), 5100)
    assert books_of(journal, [], [letter]).complaints(may_repeat=0, may_revive=False) == []


def test_a_seed_always_gives_the_same_schedule() -> None:
    one, same, other = Schedule(7, 3, "x"), Schedule(7, 3, "x"), Schedule(7, 4, "x")

    assert one.setup == same.setup
    assert one.asks(one.setup, 0, 2, ["t"]) == same.asks(one.setup, 0, 2, ["t"])
    assert one.asks(one.setup, 0, 2, ["t"]) != other.asks(one.setup, 0, 2, ["t"])
    assert schedules(7, {"a": 5, "b": 5}) == schedules(7, {"a": 5, "b": 5})
