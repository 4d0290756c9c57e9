"""The audit: each request has one fate, each planted fault is found, and nothing else is."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from confluent_kafka import Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession

from blackbox.connect import formats, kafka
from blackbox.entry import Entry
from blackbox.index.connection import pool
from blackbox.index.keys import Keys
from blackbox.index.shard_index import ShardIndex
from blackbox.intake import Intake, parse
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import receipts_topic
from blackbox.outgoing import deliveries
from blackbox.pipeline import audit as module
from blackbox.pipeline.audit.audit import Verdict, audited
from blackbox.pipeline.audit.fates import STATES
from blackbox.pipeline.audit.report import write_page
from blackbox.plan import Batch, Labels
from blackbox.receipt import Places, Receipt, encode
from blackbox.request import Shard, member, request_id
from blackbox.settings import load
from tests.world import World

pytestmark = pytest.mark.service


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Books:
    """Journals, index and targets of one shard, written by hand as its owner writes them."""

    def __init__(self, world: World, spark: SparkSession) -> None:
        self.world = world
        self.spark = spark
        self.shard = Shard(world.requests, 0)
        self.target = world.targets[0]
        self.settings = load(
            kafka_bootstrap_servers=world.kafka.bootstrap_servers,
            redis_url=world.redis.url,
            request_topics=f"{world.requests}:countdown",
            dead_letter_topic=world.dead_letters,
            group_id=world.name,
        )
        world.create(NewTopic(receipts_topic(world.requests), 4))
        self.client: Any = redis.Redis.from_url(world.redis.url)
        self.keys = Keys(self.shard)
        self._connections = pool(world.redis.url)
        self.index = ShardIndex(self.shard, self._connections, grace_s=3600)
        self.index.begin(Labels(0, 0))
        self._contract = formats(self.settings)[world.requests]
        self._journal = ShardJournal(self.shard, kafka(self.settings))
        self._producer = Producer({"bootstrap.servers": world.kafka.bootstrap_servers})

    def close(self) -> None:
        self._journal.close()
        self.index.close()
        self._connections.disconnect()
        self.client.close()

    def ask(self, in_s: float = 3600, caller: str = "tests", **more: object) -> int:
        """A request, in the journal only; its offset."""
        asked = {"topic": self.target, "message": "hello", "countdown": in_s} | more
        return self.write(json.dumps(asked), [("CALLER_SERVICE", caller)])

    def write(self, value: str, headers: Any = ()) -> int:
        return self._write(self.shard.topic, value, list(headers), 0)[1]

    def cancel(self, caller_id: str) -> int:
        return self.write(json.dumps({"id": caller_id, "cancel": True}))

    def take_in(self) -> None:
        """What intake does with all that is in the journal."""
        intake = Intake(self._contract, self.index, None)
        for batch in self._journal.requests(
            self.index.labels.requests, self._journal.request_bounds().end
        ):
            intake.apply(batch, now_ms())

    def send(self, offset: int) -> tuple[str, int, int]:
        """The message of a request, in its target; where."""
        record = self._journal.records([offset])[offset]
        alone = Batch(offset, offset + 1, [record])
        [(_, asked)] = parse(self._contract, alone, now_ms(), None).changes
        assert not isinstance(asked, Entry)
        [message] = deliveries(self.shard, {offset: Entry(*asked)})
        return self.target, *self._write(message.topic, message.value, message.headers)

    def deliver(self, *offsets: int, at_ms: int | None = None) -> Places:
        """What dispatch does with requests that are due; where they went."""
        delivered: Places = {}
        for offset in offsets:
            topic, partition, there = self.send(offset)
            delivered.setdefault(f"{topic}/{partition}", []).append((offset, there))
        self.settle(Receipt(at_ms or now_ms(), delivered=delivered))
        return delivered

    def settle(self, receipt: Receipt) -> None:
        """A receipt in its journal, and applied to the index."""
        label = self.tell(receipt) + 1
        removed = list(receipt.removals())
        known = self.index.caller_ids(removed)
        self.index.settle({offset: known.get(offset) for offset in removed}, label)

    def tell(self, receipt: Receipt) -> int:
        """A receipt, in its journal only; its offset."""
        return self._write(receipts_topic(self.shard.topic), encode(receipt), [], 0)[1]

    def cut(self, offset: int) -> None:
        """What retention does: requests below `offset` are gone."""
        admin = AdminClient({"bootstrap.servers": self.world.kafka.bootstrap_servers})
        for future in admin.delete_records([TopicPartition(*self.shard, offset)]).values():
            future.result(30)

    def audit(self, **how: Any) -> Verdict:
        with audited(self.spark, self.settings, **how) as found:
            return found.verdict

    def _write(self, topic: str, value: Any, headers: Any, partition: int = -1) -> tuple[int, int]:
        places: list[tuple[int, int]] = []

        def acknowledged(error: object, message: Message) -> None:
            assert error is None, error
            places.append((message.partition() or 0, message.offset() or 0))

        self._producer.produce(
            topic, value, headers=headers, on_delivery=acknowledged, partition=partition
        )
        assert self._producer.flush(30) == 0
        return places[0]


@pytest.fixture
def books(world: World, spark: SparkSession) -> Iterator[Books]:
    books = Books(world, spark)
    yield books
    books.close()


def kinds(verdict: Verdict) -> list[tuple[str, int]]:
    return [(one.kind, one.offset) for one in verdict.exceptions]


def test_each_request_is_in_exactly_one_state(books: Books) -> None:
    books.ask(caller="shop")  # 0, pending
    books.ask(0, caller="shop")  # 1, delivered
    books.ask(0, topic="no-such-topic")  # 2, dead
    books.ask(id="a")  # 3, replaced
    books.ask(id="a")  # 4, cancelled
    books.cancel("a")  # 5
    books.ask(0, expires_after=1)  # 6, expired
    books.write("no request")  # 7, invalid
    books.ask(0, id="b")  # 8, delivered before it is replaced
    books.take_in()
    books.deliver(1, 8)
    books.settle(Receipt(now_ms(), dead=[2], expired=[6], invalid=[7]))
    books.ask(id="b")  # 9, pending
    books.write("no request either")  # 10, pending: its dead letter is still to be written
    books.take_in()

    verdict = books.audit(targets=True)

    assert kinds(verdict) == []
    assert verdict.is_clean
    assert {state: count for state, count in verdict.states.items() if count} == {
        "pending": 3, "delivered": 2, "dead": 1, "replaced": 1, "cancelled": 1, "expired": 1,
        "invalid": 1,
    }  # fmt: skip
    assert (verdict.requests, verdict.cancels, verdict.unknown) == (10, 1, 0)
    assert verdict.callers["shop"] == {"pending": 1, "delivered": 1}
    assert verdict.callers[None] == {"invalid": 1, "pending": 1}
    assert verdict.targets["no-such-topic"] == {"dead": 1}
    assert sum(sum(states.values()) for states in verdict.hours.values()) == 10


def test_each_planted_fault_is_found_and_nothing_else(books: Books) -> None:
    lost = books.ask(caller="<b>shop</b>", id="gone")  # 0
    twice, early, told_twice = books.ask(0), books.ask(3600), books.ask(0)  # 1 to 3
    bare, ended, replaced, fine = books.ask(), books.ask(0), books.ask(id="a"), books.ask()
    cancelled = books.ask(id="b")  # 8
    cancel = books.cancel("b")  # 9
    books.take_in()
    stored = {
        offset: books.client.zscore(books.keys.due, member(offset)) or 1 for offset in range(10)
    }
    books.deliver(twice, early, told_twice, ended)
    books.settle(Receipt(now_ms(), dead=[told_twice]))
    books.ask(id="a")  # 10
    books.take_in()
    books.settle(Receipt(now_ms(), dead=[cancel]))
    due, payload = books.keys.due, books.keys.message
    books.client.zrem(due, member(lost))
    books.client.delete(payload(member(lost)), payload(member(bare)))
    for offset in (ended, replaced, cancelled, 900):
        books.client.zadd(due, {member(offset): stored.get(offset, 1)})
        books.client.set(payload(member(offset)), b"left")
    books.client.set(payload(member(700)), b"left")
    books.send(twice)

    verdict = books.audit(targets=True)

    assert sorted(kinds(verdict)) == [
        ("duplicated", twice), ("duplicated", told_twice), ("early", early), ("lost", lost),
        ("no-payload", bare), ("no-request", cancel), ("orphan-entry", ended),
        ("orphan-entry", replaced), ("orphan-entry", cancelled), ("orphan-entry", 900),
        ("orphan-payload", 700),
    ]  # fmt: skip
    assert not verdict.is_clean
    assert verdict.by_kind == {
        "orphan-entry": 4, "duplicated": 2, "early": 1, "lost": 1, "no-payload": 1,
        "no-request": 1, "orphan-payload": 1,
    }  # fmt: skip
    said = {(one.kind, one.offset): one for one in verdict.exceptions}
    assert said["lost", lost].id == request_id(books.shard, lost)
    assert said["lost", lost].caller == "<b>shop</b>"
    assert "targets hold it 2 times" in said["duplicated", twice].detail
    detail = said["duplicated", told_twice].detail
    assert detail.startswith(f"2 outcomes; first delivered at {books.target}/")
    assert detail.endswith(", last dead")
    assert said["orphan-entry", cancelled].detail == "in the index, but cancelled by 9"
    assert said["orphan-entry", replaced].detail == "in the index, but replaced by 10"
    assert fine not in {one.offset for one in verdict.exceptions}


def test_targets_are_held_against_receipts(books: Books) -> None:
    fine, misplaced, untold = (books.ask(0) for _ in range(3))
    books.take_in()
    [(taken, [(_, there)])] = books.deliver(fine).items()
    books.settle(Receipt(now_ms(), delivered={taken: [(misplaced, there)]}))
    books.send(untold)

    assert kinds(books.audit()) == []
    assert kinds(books.audit(targets=True)) == [("not-there", misplaced), ("unaccounted", untold)]


def test_a_void_outcome_leaves_a_request_pending(books: Books) -> None:
    torn, late = books.ask(0), books.ask(0)
    books.take_in()
    gone = f"{books.target}/0"
    books.tell(Receipt(now_ms(), delivered={gone: [(torn, 0), (late, 1)]}))
    books.index.settle({}, books.tell(Receipt(now_ms(), void=[torn, late], barrier=True)) + 1)
    books.deliver(late)

    verdict = books.audit(targets=True)

    assert kinds(verdict) == []
    assert (verdict.states["pending"], verdict.states["delivered"]) == (1, 1)


def test_labels_that_do_not_fit_their_journals_are_named(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    books.ask(0)
    books.ask(0)
    books.take_in()
    books.deliver(0)
    books.ask()  # 2, never taken in
    books.tell(Receipt(now_ms(), dead=[1]))  # never applied
    ahead = Shard(books.shard.topic, 1)
    other = ShardIndex(ahead, books._connections, grace_s=3600)
    other.begin(Labels(4, 7))
    other.close()

    verdict = books.audit()

    found = {(one.kind, one.partition, one.offset, one.detail) for one in verdict.exceptions}
    assert found == {
        ("labels-ahead", 1, 4, "the label requests is 4, but that journal ends at 0"),
        ("labels-ahead", 1, 7, "the label receipts is 7, but that journal ends at 0"),
        ("labels-behind", 0, 2, "the label requests stays 2, while 1 records wait"),
        ("labels-behind", 0, 1, "the label receipts stays 1, while 1 outcomes wait"),
    }
    assert (verdict.states["unread"], verdict.states["dead"]) == (1, 1)


def test_what_the_journals_do_not_keep_is_unknown_and_no_exception(books: Books) -> None:
    for _ in range(4):
        books.ask(0)
    books.take_in()
    books.deliver(0)
    books.cut(3)

    verdict = books.audit()

    assert kinds(verdict) == []
    assert (verdict.requests, verdict.unknown) == (1, 3)


def test_late_is_what_the_operator_calls_late(books: Books) -> None:
    overdue, pending, late = books.ask(0), books.ask(), books.ask(0)
    books.take_in()
    books.deliver(late, at_ms=now_ms() + 90_000)

    verdict = books.audit(late_s=0)

    assert kinds(verdict) == [("late", overdue), ("late", late)]
    still, done = verdict.exceptions
    assert re.fullmatch(r"still pending \d+ ms after it was due", still.detail)
    assert re.fullmatch(r"delivered 9\d{4} ms after it was due", done.detail)
    assert verdict.states == dict.fromkeys(STATES, 0) | {"pending": pending + 1, "delivered": 1}


def test_an_audit_beside_a_live_service_under_load_finds_nothing(
    world: World, spark: SparkSession, tmp_path: Path
) -> None:
    service = world.start_service(poll_interval_ms=50)
    service.wait_ready()
    world.ask(4000, within_s=60)
    settings = load(
        **{
            name.removeprefix("BLACKBOX_").lower(): value
            for name, value in world.environment().items()
        }
    )
    page = tmp_path / "audit.html"

    verdict = write_page(spark, settings, page, targets=True)

    assert kinds(verdict) == []
    assert verdict.requests == 4000
    assert verdict.states["pending"] > 0, verdict
    assert verdict.states["delivered"] > 0
    assert "Every request is accounted for" in page.read_text()
