"""One thread counts partitions for all, and no thread waits twice for an unavailable Kafka."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock

import pytest
import redis

from blackbox.admin import lookup
from blackbox.admin.lookup import StatusLookup
from blackbox.config.settings import load
from blackbox.core.settlement import Settlement
from blackbox.index.inspector import Inspector, Pending
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.topics import receipts_topic
from blackbox.records.errors import JournalLost, NotAllowed
from blackbox.records.receipt import Receipt
from blackbox.records.request import Cancel, Request, Shard
from tests.contract.held import NOW_MS, SHARD, entry, store
from tests.support.fakes import FakeFormat, FakeJournal, record


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


class ClosableJournal(FakeJournal):
    def close(self) -> None:
        pass


@pytest.fixture
def in_one_shard(
    status_lookup: StatusLookup,
    connections: redis.ConnectionPool,
    journal: FakeJournal,
    monkeypatch: pytest.MonkeyPatch,
) -> StatusLookup:
    """Looks up the requests of one shard, in its index and in these journals."""
    monkeypatch.setattr(lookup, "ShardJournal", lambda shard, access: journal)
    monkeypatch.setattr(
        StatusLookup, "_count", lambda _: {SHARD.topic: 4, receipts_topic(SHARD.topic): 4}
    )
    monkeypatch.setattr(status_lookup, "inspector", Inspector(connections))
    monkeypatch.setattr(status_lookup, "formats", {SHARD.topic: journal.format})
    status_lookup.count_partitions()
    return status_lookup


@pytest.fixture
def journal() -> FakeJournal:
    asked = Request("orders", b"hi", NOW_MS, None, [], None, "a", None)
    return ClosableJournal([record(0), record(1)], format=FakeFormat({0: asked, 1: Cancel("a")}))


def test_a_request_that_is_stored_during_a_look_up_has_not_ended(
    in_one_shard: StatusLookup, index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Inspector.pending_at

    def look_and_store(inspector: Inspector, shard: Shard, offset: int) -> Pending | None:
        found = look(inspector, shard, offset)
        store(index, 0, 1, {0: entry()})
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Inspector, "pending_at", look_and_store)
        during = in_one_shard.status(SHARD, 0)
    assert during.state == "unread"
    assert in_one_shard.status(SHARD, 0).state == "pending"


@pytest.mark.parametrize("is_delivered", [True, False])
def test_a_request_that_is_cancelled_in_flight_has_not_ended_until_its_delivery_has(
    in_one_shard: StatusLookup, index: ShardIndex, journal: FakeJournal, *, is_delivered: bool
) -> None:
    store(index, 0, 1, {0: entry(caller_id="a")})
    assert index.mark_in_flight([0], index.removed) == set()
    store(index, 1, 2, {1: Cancel("a")})

    during = in_one_shard.status(SHARD, 0)
    if is_delivered:
        journal.append(Receipt(NOW_MS, delivered={"orders/0": [(0, 7)]}))
        committed = in_one_shard.status(SHARD, 0)
        assert committed.state == "delivered"
        index.settle(Settlement({0: "a"}, 2))
    else:  # taken back
        index.mark_in_flight((), index.removed)
    after = in_one_shard.status(SHARD, 0)

    assert during.state == "pending"
    assert "while it was being delivered" in (during.detail or "")
    assert after.state == ("delivered" if is_delivered else "ended")
