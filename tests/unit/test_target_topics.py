"""Answers about target topics are cached, and refreshed by one thread at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from blackbox.journal import target_topics as targets_module
from blackbox.journal.kafka_access import KafkaAccess, outcome
from blackbox.journal.target_topics import AnswerCache, TargetTopics
from blackbox.records.errors import JournalLost
from tests.support.world import until

AT_ONCE_S = -1.0
"""An answer is valid for at most this long."""

PATIENCE_S = 10.0


def test_a_known_answer_is_not_asked_for_again() -> None:
    asked: list[list[str]] = []

    def ask(topics: list[str]) -> Iterator[tuple[str, float, str | None]]:
        asked.append(topics)
        yield from ((topic, 60.0, "gone" if topic == "gone" else None) for topic in topics)

    cache = AnswerCache(ask)
    assert cache.get(["orders"]) == {}
    assert cache.get(["orders", "gone"]) == {"gone": "gone"}
    assert cache.get(["orders", "gone"]) == {"gone": "gone"}
    assert asked == [["orders"], ["gone"]]


@dataclass
class Brokers:
    """Brokers that answer when they may, each answer once and valid for so long; False: no answer."""

    answers: list[str | bool | None]
    holds_s: float = 60.0
    asked: int = 0
    may_answer: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        self.may_answer.set()

    def ask(self, topics: list[str]) -> Iterator[tuple[str, float, str | None]]:
        self.asked += 1
        assert self.may_answer.wait(PATIENCE_S)
        answer = self.answers.pop(0)
        if isinstance(answer, bool):
            raise JournalLost("nobody answers")
        yield from ((topic, self.holds_s, answer) for topic in topics)


def test_a_refresh_does_not_delay_readers_of_the_known_answer() -> None:
    brokers = Brokers(["before", "after"])
    cache = AnswerCache(brokers.ask)
    cache.get(["orders"])
    brokers.may_answer.clear()
    with ThreadPoolExecutor(1) as other:
        asking = other.submit(cache.refresh, ["orders"])
        until("it asks", lambda: brokers.asked == 2)
        assert cache.get(["orders"]) == {"orders": "before"}
        brokers.may_answer.set()
        asking.result(PATIENCE_S)
    assert cache.get(["orders"]) == {"orders": "after"}


def test_an_expired_good_answer_is_used_while_it_is_refreshed() -> None:
    brokers = Brokers([None, "gone"], holds_s=AT_ONCE_S)
    cache = AnswerCache(brokers.ask)
    cache.get(["orders"])
    brokers.may_answer.clear()

    assert cache.get(["orders"]) == {}
    assert cache.get(["orders"]) == {}

    brokers.holds_s = 60.0
    brokers.may_answer.set()
    until("it is reported", lambda: cache.get(["orders"]) == {"orders": "gone"})
    assert brokers.asked == 2


@pytest.mark.parametrize(("before", "holds_s"), [(None, -60.0), ("gone", AT_ONCE_S)])
def test_an_expired_refusal_or_an_old_answer_is_refreshed_before_use(
    before: str | None, holds_s: float
) -> None:
    brokers = Brokers([before, "after"], holds_s)
    cache = AnswerCache(brokers.ask)
    cache.get(["orders"])

    assert cache.get(["orders"]) == {"orders": "after"}


@pytest.mark.parametrize(
    ("before", "holds_s"), [(None, AT_ONCE_S), (None, -60.0), ("gone", AT_ONCE_S)]
)
def test_without_an_answer_the_known_one_is_kept_for_a_while(
    before: str | None, holds_s: float
) -> None:
    brokers = Brokers([before, False], holds_s)
    cache = AnswerCache(brokers.ask)
    told = cache.get(["orders"])

    for _ in range(100):
        assert cache.get(["orders"]) == told
    until("the brokers were asked", lambda: brokers.asked == 2)
    assert cache.get(["orders"]) == told
    assert brokers.asked == 2


def test_a_topic_without_any_answer_raises_an_error() -> None:
    cache = AnswerCache(Brokers([False, "known"]).ask)
    with pytest.raises(JournalLost):
        cache.get(["orders"])
    assert cache.get(["orders"]) == {"orders": "known"}


def test_an_unknown_topic_waits_for_its_own_answer() -> None:
    is_asking, may_answer = Event(), Event()

    def ask(topics: list[str]) -> Iterator[tuple[str, float, str | None]]:
        is_asking.set()
        assert may_answer.wait(PATIENCE_S)
        yield from ((topic, 60.0, topic) for topic in topics)

    cache = AnswerCache(ask)
    with ThreadPoolExecutor(2) as others:
        first = others.submit(cache.get, ["orders"])
        assert is_asking.wait(PATIENCE_S)
        second = others.submit(cache.get, ["bills"])
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
                assert own() is not None, "a replaced client answers nothing"
                return KafkaException(KafkaError(KafkaError._TIMED_OUT))

        self._replace()
        return {"orders": Answer()}


def test_a_lookup_keeps_its_client_until_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets_module, "ASKS", 1)
    targets = TargetTopics(KafkaAccess("127.0.0.1:1", "unit", {"log_level": "0"}))

    def replace() -> None:
        targets._admin = cast(Any, object())

    targets._admin = cast(Any, Silent(replace))
    with pytest.raises(JournalLost):
        targets.unavailable(["orders"], refresh=True)


def test_a_lookup_without_an_answer_times_out() -> None:
    with pytest.raises(KafkaException, match="Timed out"):
        outcome(Future[Any](), 0.01)
