"""What the brokers told of target topics is remembered, and asked anew by one thread at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from blackbox.doubt import JournalLost
from blackbox.journal.access import KafkaAccess, outcome
from blackbox.journal.targets import Remembered, Targets

AT_ONCE_S = -1.0
"""What was told holds no longer than this."""

PATIENCE_S = 10.0


def test_what_still_holds_is_not_asked_again() -> None:
    asked: list[list[str]] = []

    def ask(topics: list[str]) -> Iterator[tuple[str, float, str | None]]:
        asked.append(topics)
        yield from ((topic, 60.0, "gone" if topic == "gone" else None) for topic in topics)

    remembered = Remembered(ask)
    assert remembered.of(["orders"]) == {}
    assert remembered.of(["orders", "gone"]) == {"gone": "gone"}
    assert remembered.of(["orders", "gone"]) == {"gone": "gone"}
    assert asked == [["orders"], ["gone"]]


def test_what_has_expired_is_asked_again() -> None:
    answers = iter([None, "gone"])
    remembered = Remembered(lambda topics: [(topic, 60.0, next(answers)) for topic in topics])
    assert remembered.of(["orders"]) == {}
    remembered.expire(["orders"])
    assert remembered.of(["orders"]) == {"orders": "gone"}


def test_who_asks_anew_holds_up_nobody_who_was_told_before() -> None:
    answers = iter(["before", "after"])
    is_asking, may_answer = Event(), Event()

    def ask(topics: list[str]) -> Iterator[tuple[str, float, str | None]]:
        answer = next(answers)
        if answer == "after":
            is_asking.set()
            assert may_answer.wait(PATIENCE_S)
        yield from ((topic, 60.0, answer) for topic in topics)

    remembered = Remembered(ask)
    remembered.of(["orders"])
    remembered.expire(["orders"])
    with ThreadPoolExecutor(1) as other:
        found = other.submit(remembered.of, ["orders"])
        assert is_asking.wait(PATIENCE_S)
        remembered.expire(["orders"])
        assert remembered.of(["orders"]) == {"orders": "before"}
        may_answer.set()
        assert found.result(PATIENCE_S) == {"orders": "after"}


def test_while_one_thread_asks_the_others_go_by_what_was_told_before() -> None:
    answers = iter(["before", "after"])
    is_asking, may_answer = Event(), Event()

    def ask(topics: list[str]) -> Iterator[tuple[str, float, str | None]]:
        answer = next(answers)
        if answer == "after":
            is_asking.set()
            assert may_answer.wait(PATIENCE_S)
        yield from ((topic, AT_ONCE_S, answer) for topic in topics)

    remembered = Remembered(ask)
    remembered.of(["orders"])
    with ThreadPoolExecutor(1) as other:
        found = other.submit(remembered.of, ["orders"])
        assert is_asking.wait(PATIENCE_S)
        assert remembered.of(["orders"]) == {"orders": "before"}
        may_answer.set()
        assert found.result(PATIENCE_S) == {"orders": "after"}


def test_what_nobody_told_yet_is_waited_for() -> None:
    is_asking, may_answer = Event(), Event()

    def ask(topics: list[str]) -> Iterator[tuple[str, float, str | None]]:
        is_asking.set()
        assert may_answer.wait(PATIENCE_S)
        yield from ((topic, 60.0, topic) for topic in topics)

    remembered = Remembered(ask)
    with ThreadPoolExecutor(2) as others:
        first = others.submit(remembered.of, ["orders"])
        assert is_asking.wait(PATIENCE_S)
        second = others.submit(remembered.of, ["bills"])
        may_answer.set()
        assert first.result(PATIENCE_S) == {"orders": "orders"}
        assert second.result(PATIENCE_S) == {"bills": "bills"}


class Silent:
    """A client that another shard replaces before it has answered."""

    def __init__(self, replace: Callable[[], None]) -> None:
        self._replace = replace

    def describe_topics(self, topics: object, **_: object) -> dict[str, Future[Any]]:
        own = weakref.ref(self)

        class Answer(Future[Any]):
            def exception(self, timeout: float | None = None) -> BaseException | None:
                assert own() is not None, "who is gone answers nobody"
                return KafkaException(KafkaError(KafkaError._TIMED_OUT))

        self._replace()
        return {"orders": Answer()}


def test_who_asks_keeps_the_client_that_it_asked() -> None:
    targets = Targets(KafkaAccess("127.0.0.1:1", "unit", {"log_level": "0"}))

    def replace() -> None:
        targets._admin = cast(Any, object())

    targets._admin = cast(Any, Silent(replace))
    with pytest.raises(JournalLost):
        targets.unavailable(["orders"], anew=True)


def test_who_says_nothing_is_not_waited_for_for_ever() -> None:
    with pytest.raises(KafkaException, match="Timed out"):
        outcome(Future[Any](), 0.01)
