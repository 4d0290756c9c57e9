"""One thread counts partitions for all, and no thread waits twice for an unavailable Kafka."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock

import pytest

from blackbox.admin import lookup
from blackbox.admin.lookup import StatusLookup
from blackbox.config.settings import load
from blackbox.records.errors import JournalLost, NotAllowed
from blackbox.records.request import Shard


class Counted:
    """What Kafka answers, and how often it was asked."""

    def __init__(self) -> None:
        self.answer: dict[str, int] | JournalLost = {"TB": 2}
        self.may_answer = Event()
        self.may_answer.set()
        self.times = 0
        self._lock = Lock()

    def __call__(self) -> dict[str, int]:
        with self._lock:
            self.times += 1
        assert self.may_answer.wait(30)
        if isinstance(self.answer, JournalLost):
            raise self.answer
        return self.answer


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted()
    monkeypatch.setattr(StatusLookup, "_count", lambda _: counted())
    return counted


@pytest.fixture
def status_lookup() -> StatusLookup:
    return StatusLookup(load(kafka_bootstrap_servers="127.0.0.1:1"))


def make_outdated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the known counts expire at once."""
    monkeypatch.setattr(lookup, "COUNTED_FOR_S", 0.0)


def test_partition_counts_are_cached_briefly(counted: Counted, status_lookup: StatusLookup) -> None:
    for _ in range(10):
        status_lookup.count_partitions()
    assert list(status_lookup.shards()) == [Shard("TB", 0), Shard("TB", 1)]
    assert counted.times == 1


def test_while_one_thread_counts_partitions_others_use_the_known_counts(
    counted: Counted, status_lookup: StatusLookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_outdated(monkeypatch)
    status_lookup.count_partitions()
    counted.may_answer.clear()
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(status_lookup.count_partitions)
        while counted.times < 2:
            time.sleep(0.001)
        status_lookup.count_partitions()
        counted.may_answer.set()
        slow.result(10)
    assert counted.times == 2


def test_known_partition_counts_are_used_if_kafka_does_not_answer(
    counted: Counted, status_lookup: StatusLookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_outdated(monkeypatch)
    status_lookup.count_partitions()
    counted.answer = JournalLost("away")
    status_lookup.count_partitions()
    assert list(status_lookup.shards()) == [Shard("TB", 0), Shard("TB", 1)]


@pytest.mark.parametrize("failure", [JournalLost("away"), NotAllowed("not allowed")])
def test_only_the_first_caller_waits_for_a_kafka_that_does_not_answer(
    counted: Counted, status_lookup: StatusLookup, failure: JournalLost
) -> None:
    counted.answer = failure
    for _ in range(10):
        with pytest.raises(type(failure), match=str(failure)):
            status_lookup.count_partitions()
    assert counted.times == 1


def test_a_revoked_permission_is_reported(
    counted: Counted, status_lookup: StatusLookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_outdated(monkeypatch)
    status_lookup.count_partitions()
    counted.answer = NotAllowed("not allowed")
    with pytest.raises(NotAllowed):
        status_lookup.count_partitions()
