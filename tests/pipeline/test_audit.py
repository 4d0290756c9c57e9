"""The audit: each request has one status, and exactly the planted faults are found."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from confluent_kafka import Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession
from typer.testing import CliRunner, Result

from blackbox import Client
from blackbox.cli import app
from blackbox.config.settings import Settings, load
from blackbox.config.wiring import formats, kafka
from blackbox.core.intake import Intake
from blackbox.core.parsing import parse_batch
from blackbox.core.plan import Batch, Positions
from blackbox.core.settlement import Settlement
from blackbox.index.connection import pool
from blackbox.index.keys import Keys
from blackbox.index.shard_index import ShardIndex
from blackbox.jobs.audit import tuning
from blackbox.jobs.audit.audit import AuditVerdict, audited
from blackbox.jobs.audit.positions import PositionFinding
from blackbox.jobs.audit.report import page
from blackbox.jobs.ledger.extend import extend
from blackbox.jobs.ledger.ledger import Ledger
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.records.cancel import HEADER as CANCELS
from blackbox.records.carried import HEADER as CARRIED
from blackbox.records.entry import Entry
from blackbox.records.outgoing import deliveries
from blackbox.records.receipt import Mark, Places, Receipt, encode
from blackbox.records.request import Shard, member, request_id
from blackbox.spark.job_failures import AuditError
from tests.support.world import World, until
from tests.support.year import HOUR_MS, Year

pytestmark = pytest.mark.service
module = import_module("blackbox.jobs.audit.audit")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Books:
    """Journals, index and targets of one shard, written by the test as its owner writes them."""

    def __init__(self, world: World, settings: Settings, partition: int) -> None:
        self.world = world
        self.settings = settings
        self.shard = Shard(next(iter(settings.topics)), partition)
        self.target = world.targets[0]
        self.client: Any = redis.Redis.from_url(world.redis.url)
        self.keys = Keys(self.shard)
        self._connections = pool(world.redis.url)
        self.index = ShardIndex(self.shard, self._connections, grace_s=3600)
        self._format = formats(settings)[self.shard.topic]
        self._journal = ShardJournal(self.shard, kafka(settings))
        self._producer = Producer(
            {
                "bootstrap.servers": world.kafka.bootstrap_servers,
                "enable.idempotence": True,
                "max.in.flight": 1,
            }
        )

    def close(self) -> None:
        self._journal.close()
        self.index.close()
        self._connections.disconnect()
        self.client.close()

    def bind(self) -> None:
        """Bind the index to the topics, as an owner does when it opens the shard."""
        self.index.load()
        self.index.take_over(self._journal.binding(self.settings.group_id))

    def ask(self, in_s: float = 3600, caller: str = "tests", **more: object) -> int:
        """Write a request to the journal only; returns its offset."""
        asked = {"topic": self.target, "message": "hello", "countdown": in_s} | more
        return self.write(json.dumps(asked), [("CALLER_SERVICE", caller)])

    def write(self, value: str, headers: Any = (), at_ms: int = 0) -> int:
        return self._write(*self.shard, value, list(headers), at_ms)[1]

    def replace(self, named: int, in_s: float = 0, caller: str = "tests", **more: object) -> int:
        """Write a replacement of this request by its id; returns its offset."""
        asked = {"topic": self.target, "message": "moved", "countdown": in_s} | more
        replaces = ("blackbox-replaces", request_id(self.shard, named).encode())
        return self.write(json.dumps(asked), [("CALLER_SERVICE", caller), replaces])

    def cancel(self, caller_id: str) -> int:
        return self.write(json.dumps({"id": caller_id, "cancel": True}))

    def run_intake(self) -> None:
        """Store everything in the journal, as intake does."""
        intake = Intake(self._format, self.index, None)
        for batch in self._journal.requests(
            self.index.positions.requests, self._journal.request_bounds().end
        ):
            intake.parse_and_store(batch, now_ms())

    def send(self, offset: int, to: str | None = None) -> tuple[str, int, int]:
        """Write the message of a request to its target, or to another topic; returns its place."""
        record = self._journal.records([offset])[offset]
        alone = Batch(offset, offset + 1, [record])
        [(_, asked)] = parse_batch(self._format, alone, now_ms(), None).changes
        assert not isinstance(asked, Entry)
        [message] = deliveries(self.shard, {offset: Entry(*asked)})
        key = None if message.key is None else message.key.decode()
        return self.target, *self._write(
            to or message.topic, -1, message.value, message.headers, key=key
        )

    def put(self, offset: int) -> int:
        """Write a message that names this record to the first partition of the target; returns its offset."""
        source = self.shard.source(offset)
        headers = [("blackbox-id", "i"), ("blackbox-due-ms", "1"), ("blackbox-source", source)]
        return self._write(self.target, 0, "hello", headers)[1]

    def deliver(self, *offsets: int, at_ms: int | None = None) -> Places:
        """Deliver due requests, as dispatch does; returns the places."""
        delivered: Places = {}
        for offset in offsets:
            topic, partition, there = self.send(offset)
            delivered.setdefault(f"{topic}/{partition}", []).append((offset, there))
        self.settle(Receipt(at_ms or now_ms(), delivered=delivered))
        return delivered

    def deliver_now(self) -> None:
        """A request from the journal to its delivery."""
        offset = self.ask(0)
        self.run_intake()
        self.deliver(offset)

    def settle(self, receipt: Receipt) -> None:
        """Write a receipt to its journal, and apply it to the index."""
        position = self.write_receipt(receipt) + 1
        removed = list(receipt.removals())
        known = self.index.caller_ids(removed)
        self.index.settle(Settlement({offset: known.get(offset) for offset in removed}, position))

    def write_receipt(self, receipt: Receipt) -> int:
        """Write a receipt to its journal only; returns its offset."""
        journal = receipts_topic(self.shard.topic)
        return self._write(journal, self.shard.partition, encode(receipt), [], key=str(self.shard))[
            1
        ]

    def write_receipt_of_a_later_version(self) -> None:
        """Write a receipt of a later version."""
        journal, receipt = receipts_topic(self.shard.topic), b'{"v":2,"at_ms":5}'
        self._write(journal, self.shard.partition, receipt, [], key=str(self.shard))

    def forget(self, offset: int) -> None:
        """Redis loses a request."""
        self.client.zrem(self.keys.due, member(offset))
        self.client.delete(self.keys.message(member(offset)))

    def leave(self, offset: int) -> None:
        """Redis has a request that it should not have."""
        self.client.zadd(self.keys.due, {member(offset): 1})
        self.client.set(self.keys.message(member(offset)), b"left")

    def cut(self, *, requests: int = 0, receipts: int = 0) -> None:
        """Remove all records below these offsets, as retention does."""
        admin = AdminClient({"bootstrap.servers": self.world.kafka.bootstrap_servers})
        topic, partition = self.shard
        below = {topic: requests, receipts_topic(topic): receipts}
        at = [TopicPartition(name, partition, offset) for name, offset in below.items() if offset]
        for future in admin.delete_records(at).values():
            future.result(30)

    def lose_receipts(self) -> None:
        """Delete the receipts topic."""
        topic = receipts_topic(self.shard.topic)
        admin = AdminClient({"bootstrap.servers": self.world.kafka.bootstrap_servers})
        admin.delete_topics([topic])[topic].result(30)
        until("it is deleted", lambda: topic not in admin.list_topics(timeout=10).topics)

    def carry(self, previous: int) -> int:
        """Write a request again, as promotion does; returns the offset of the carried record."""
        value = json.dumps({"topic": self.target, "message": "hello", "countdown": 0})
        return self.write(value, [(CARRIED, json.dumps([previous, previous, now_ms(), False]))])

    def schedule(self, id: str, in_s: float = 3600, target: str | None = None) -> int:
        """Write a schedule; returns its offset."""
        headers = {
            "scheduler-epoch": f"{time.time() + in_s:.0f}",
            "scheduler-target-topic": target or self.target,
        }
        return self._write(*self.shard, "hello", list(headers.items()), key=id)[1]

    def leave_a_hole(self, topic: str, partition: int) -> int:
        """Leave an offset without a record, as compaction does; returns it."""
        offset, end = self._begin_transaction(topic, partition)
        end()
        return offset

    def begin_transaction(self, topic: str) -> Callable[[], None]:
        """Hide what is written to its partition of this topic from now on; returns what ends that."""
        return self._begin_transaction(topic, self.shard.partition)[1]

    def _begin_transaction(self, topic: str, partition: int) -> tuple[int, Callable[[], None]]:
        settings = {"bootstrap.servers": self.world.kafka.bootstrap_servers}
        producer = Producer(settings | {"transactional.id": f"{topic}-{partition}"})
        offsets: list[int] = []
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(
            topic, b"aborted", b"key", partition=partition,
            on_delivery=lambda _, message: offsets.append(message.offset() or 0),
        )  # fmt: skip
        producer.flush(30)
        return offsets[0], lambda: producer.abort_transaction(30)

    def _write(
        self,
        topic: str,
        partition: int,
        value: Any,
        headers: Any,
        at_ms: int = 0,
        key: str | None = None,
    ) -> tuple[int, int]:
        places: list[tuple[int, int]] = []

        def acknowledged(error: object, message: Message) -> None:
            assert error is None, error
            places.append((message.partition() or 0, message.offset() or 0))

        self._producer.produce(
            topic, value, key, headers=headers, on_delivery=acknowledged, partition=partition,
            timestamp=at_ms,
        )  # fmt: skip
        assert self._producer.flush(30) == 0
        return places[0]


Fault = Callable[[Books], set[tuple[str, int]]]


class Shelf:
    """A request topic with a shard for each of the books, all of them clean."""

    def __init__(self, world: World, spark: SparkSession, shards: int, format: str) -> None:
        topic = f"{world.name}.asked"
        world.create(NewTopic(topic, shards), NewTopic(receipts_topic(topic), shards))
        self.spark = spark
        self.environment = {
            "BLACKBOX_KAFKA_BOOTSTRAP_SERVERS": world.kafka.bootstrap_servers,
            "BLACKBOX_REDIS_URL": world.redis.url,
            "BLACKBOX_REQUEST_TOPICS": f"{topic}:{format}",
            "BLACKBOX_DEAD_LETTER_TOPIC": world.dead_letters,
            "BLACKBOX_GROUP_ID": world.name,
            "BLACKBOX_HISTORY_TOPIC": f"{world.name}.history",
        }
        self.settings = settings_of(self.environment)
        self.books = [Books(world, self.settings, partition) for partition in range(shards)]

    def close(self) -> None:
        with ExitStack() as ending:
            for books in self.books:
                ending.callback(books.close)

    def audit(self, **how: Any) -> AuditVerdict:
        with audited(self.spark, self.settings, **how) as found:
            return found.verdict


def settings_of(environment: Mapping[str, str]) -> Settings:
    return load(**{n.removeprefix("BLACKBOX_").lower(): v for n, v in environment.items()})


@pytest.fixture
def topic_format() -> str:
    return "countdown"


@pytest.fixture
def shelf(
    world: World, spark: SparkSession, topic_format: str, request: pytest.FixtureRequest
) -> Iterator[Shelf]:
    shelf = Shelf(world, spark, getattr(request, "param", 1), topic_format)
    for books in shelf.books:
        books.index.begin(Positions(0, 0))
    yield shelf
    shelf.close()


@pytest.fixture
def type_audit(
    shelf: Shelf, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Run the command in this process, on the shared session."""
    monkeypatch.setattr(import_module("blackbox.cli.audit"), "spark", lambda *_: nullcontext(spark))
    none: dict[str, str | None] = dict.fromkeys(n for n in os.environ if n.startswith("BLACKBOX_"))
    environment = none | shelf.environment | {"COLUMNS": "100"}

    def typed(*words: str, **more: str) -> Result:
        return CliRunner().invoke(app, ["audit", *words], env=environment | more)

    return typed


def kinds(verdict: AuditVerdict) -> list[tuple[str, int]]:
    return [(one.kind, one.offset) for one in verdict.exceptions]


def test_a_message_in_the_receipts_topic_ends_no_request_for_the_audit_and_for_clients(
    shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    [books] = shelf.books
    pending = books.ask()
    receipt = json.loads(encode(Receipt(now_ms(), dead=[pending])))
    forged = books.ask(0, key=str(books.shard), message=receipt)
    books.run_intake()
    # as another deployment delivers it, with the headers of every message
    receipts, partition, there = books.send(forged, to=receipts_topic(books.shard.topic))
    books.settle(Receipt(now_ms(), delivered={f"{receipts}/{partition}": [(forged, there)]}))

    found = shelf.audit()

    assert (found.by_kind, found.states["pending"], found.states["delivered"]) == ({}, 1, 1)
    topic = books.shard.topic
    with Client(books.world.kafka.bootstrap_servers, caller="shop", request_topic=topic) as client:
        assert client.get(request_id(books.shard, pending)).state == "pending"
    assert f"{topic}.receipts/0@0: skipping a record that is not a receipt" in caplog.text


@pytest.mark.proof
@pytest.mark.parametrize("shelf", [4], indirect=True)
def test_a_clean_audit_gives_each_request_one_state_and_ends_with_0(
    shelf: Shelf, type_audit: Callable[..., Result], tmp_path: Path
) -> None:
    books, torn, cut, untold = shelf.books
    books.ask(caller="shop")  # 0, pending
    books.ask(0, caller="shop")  # 1, delivered
    books.ask(0, topic="no-such-topic")  # 2, dead
    books.ask(id="a")  # 3, replaced
    books.ask(id="a")  # 4, cancelled
    books.cancel("a")  # 5
    books.ask(0, expires_after=1)  # 6, expired
    books.write("no request")  # 7, invalid
    books.ask(0, id="b")  # 8, delivered before it is replaced
    books.run_intake()
    books.deliver(1, 8)
    books.settle(Receipt(now_ms(), dead=[2], expired=[6], invalid=[7]))
    books.ask(id="b")  # 9, pending
    books.write("no request either")  # 10, pending: its dead letter is still to be written
    books.ask()  # 11, cancelled by its id
    for cancelled in (11, 1, 10, 11):  # 12 to 15; delivered and invalid requests are not cancelled
        books.write("", [("blackbox-cancel", request_id(books.shard, cancelled).encode())])
    books.run_intake()
    for ended in (1, 11):  # 16, 17: too late, so that 9 stays; the dead letter of 17 is written
        again = {"topic": books.target, "message": "moved", "countdown": 0, "id": "b"}
        headers = [("blackbox-replaces", request_id(books.shard, ended).encode())]
        books.write(json.dumps(again), headers)
    books.run_intake()
    books.settle(Receipt(now_ms(), invalid=[17]))
    # A void outcome leaves a request pending, and a valid one may follow.
    torn.ask(0)
    torn.ask(0)
    torn.run_intake()
    torn.write_receipt(Receipt(now_ms(), delivered={f"{torn.target}/0": [(0, 900), (1, 901)]}))
    torn.index.settle(
        Settlement({}, torn.write_receipt(Receipt(now_ms(), void=[0, 1], barrier=True)) + 1)
    )
    torn.deliver(1)
    # If a log lost its end, receipts name the requests that were there before.
    torn.ask(0)
    lost = Receipt(now_ms(), delivered={f"{torn.target}/0": [(2, 902)]}, cut=[2])
    torn.run_intake()
    torn.index.settle(Settlement({}, torn.write_receipt(lost) + 1))
    torn.deliver(2)
    # What the journals no longer contain cannot be checked: an outcome, an entry, a removal.
    for _ in range(4):
        cut.ask(0)
    cut.run_intake()
    cut.deliver(0)
    cut.cut(requests=3)
    for _ in range(2):
        untold.ask(0)
    untold.run_intake()
    untold.deliver(0)
    untold.cut(receipts=1)

    html, parquet = tmp_path / "audit.html", tmp_path / "tables"
    answer = type_audit("--targets", "--json", "--html", str(html), "--parquet", str(parquet))

    assert answer.exit_code == 0, answer.output
    verdict = json.loads(answer.stdout)
    assert (verdict["verdict"], verdict["exceptions"]) == ("clean", [])
    assert {state: count for state, count in verdict["states"].items() if count} == {
        "pending": 7, "delivered": 4, "dead": 1, "replaced": 1, "cancelled": 2, "expired": 1,
        "invalid": 2, "unknown": 1,
    }  # fmt: skip
    assert (verdict["cancels"], verdict["unknown"]) == (5, 4)
    assert verdict["callers"]["shop"] == {"pending": 1, "delivered": 1}
    assert verdict["callers"][""] == {"invalid": 2, "pending": 2}
    assert verdict["targets"]["no-such-topic"] == {"dead": 1}
    assert sum(sum(states.values()) for states in verdict["hours"].values()) == 19
    assert "Every request that can be judged is accounted for" in html.read_text()
    assert shelf.spark.read.parquet(f"{parquet}/statuses").count() == 19
    assert shelf.spark.read.parquet(f"{parquet}/exceptions").count() == 0


def lost(books: Books) -> set[tuple[str, int]]:
    offset = books.ask(caller="<b>shop</b>", id="gone")
    books.run_intake()
    books.forget(offset)
    return {("lost", offset)}


def lost_before_a_record_that_was_refused_and_would_be_valid_by_now(
    books: Books,
) -> set[tuple[str, int]]:
    offset, refused = books.ask(id="a"), books.ask(id="a")
    books.run_intake()
    books.settle(Receipt(now_ms(), invalid=[refused]))
    return {("lost", offset)}


def twice_in_its_target(books: Books) -> set[tuple[str, int]]:
    offset = books.ask(0)
    books.run_intake()
    books.deliver(offset)
    books.send(offset)
    return {("duplicated", offset)}


def two_outcomes(books: Books) -> set[tuple[str, int]]:
    offset = books.ask(0)
    books.run_intake()
    books.deliver(offset)
    books.settle(Receipt(now_ms(), dead=[offset]))
    return {("duplicated", offset)}


def early(books: Books) -> set[tuple[str, int]]:
    offset = books.ask(3600)
    books.run_intake()
    books.deliver(offset)
    return {("early", offset)}


def late(books: Books) -> set[tuple[str, int]]:
    offset = books.ask(0)
    books.run_intake()
    books.deliver(offset, at_ms=now_ms() + 90_000)
    return {("late", offset)}


def overdue(books: Books) -> set[tuple[str, int]]:
    asked = {"topic": books.target, "message": "hello", "countdown": 0}
    offset = books.write(json.dumps(asked), at_ms=now_ms() - 90_000)
    books.run_intake()
    return {("late", offset)}


def entries_of_ended_requests(books: Books) -> set[tuple[str, int]]:
    delivered, replaced, cancelled = books.ask(0), books.ask(id="a"), books.ask(id="b")
    books.ask(id="a")
    books.cancel("b")
    books.run_intake()
    books.deliver(delivered)
    for offset in (delivered, replaced, cancelled):
        books.leave(offset)
    return {("orphan-entry", offset) for offset in (delivered, replaced, cancelled)}


def entry_of_no_request(books: Books) -> set[tuple[str, int]]:
    books.leave(900)
    return {("orphan-entry", 900)}


def payload_without_entry(books: Books) -> set[tuple[str, int]]:
    books.client.set(books.keys.message(member(700)), b"left")
    return {("orphan-payload", 700)}


def entry_without_payload(books: Books) -> set[tuple[str, int]]:
    offset = books.ask()
    books.run_intake()
    books.client.delete(books.keys.message(member(offset)))
    return {("no-payload", offset)}


def receipts_of_no_request(books: Books) -> set[tuple[str, int]]:
    cancel = books.cancel("b")
    books.run_intake()
    books.settle(Receipt(now_ms(), dead=[cancel, 900]))
    return {("no-request", cancel), ("no-request", 900)}


def outcome_at_a_wrong_place(books: Books) -> set[tuple[str, int]]:
    fine, misplaced = books.ask(0), books.ask(0)
    books.run_intake()
    [(taken, [(_, there)])] = books.deliver(fine).items()
    books.settle(Receipt(now_ms(), delivered={taken: [(misplaced, there)]}))
    return {("not-there", misplaced)}


def beyond_the_end_of_its_target(books: Books) -> set[tuple[str, int]]:
    """The target lost its end, or was created again."""
    offset = books.ask(0)
    books.run_intake()
    books.settle(Receipt(now_ms(), delivered={f"{books.target}/0": [(offset, 90_000)]}))
    return {("not-there", offset)}


def in_a_target_that_is_gone(books: Books) -> set[tuple[str, int]]:
    """The topic of one, the partition of the other."""
    deleted = f"{books.target}.deleted"
    offsets = books.ask(0, topic=deleted), books.ask(0)
    books.run_intake()
    places = zip((f"{deleted}/0", f"{books.target}/90"), offsets, strict=True)
    books.settle(Receipt(now_ms(), delivered={place: [(offset, 0)] for place, offset in places}))
    return {("not-there", offset) for offset in offsets}


def behind_an_open_transaction_in_its_target(books: Books) -> set[tuple[str, int]]:
    """Its message is there, but cannot be read yet."""
    target = f"{books.target}.open"
    books.world.create(NewTopic(target, 1))
    offset = books.ask(0, topic=target)
    books.run_intake()
    books._begin_transaction(target, 0)
    _, partition, there = books.send(offset)
    books.settle(Receipt(now_ms(), delivered={f"{target}/{partition}": [(offset, there)]}))
    return set()


def in_its_target_without_outcome(books: Books) -> set[tuple[str, int]]:
    offset = books.ask(0)
    books.run_intake()
    books.send(offset)
    return {("unaccounted", offset)}


def positions_ahead(books: Books) -> set[tuple[str, int]]:
    books.client.hset(books.keys.state, "requests", 4)
    books.client.set(books.keys.receipts, 7)
    return {("positions-ahead", 4), ("positions-ahead", 7)}


def positions_behind(books: Books) -> set[tuple[str, int]]:
    unread = books.ask()
    untold = books.write_receipt(Receipt(now_ms(), dead=[0]))
    return {("positions-behind", unread), ("positions-behind", untold)}


def requests_that_kafka_removed(books: Books) -> set[tuple[str, int]]:
    books.settle(Receipt(now_ms(), barrier=True, gone=(700, 850)))
    # written again after a crash
    books.settle(Receipt(now_ms(), barrier=True, gone=(700, 900)))
    return {("gone", 700)}


def replacement_that_waits_for_its_dead_letter(books: Books) -> set[tuple[str, int]]:
    """It came too late, and ends nothing."""
    plant_too_late_replacement(books, caller="waits")
    return set()


def lost_behind_an_ignored_replacement(books: Books) -> set[tuple[str, int]]:
    pending, too_late = plant_too_late_replacement(books)
    position, ignored = books.index.unrecorded(10)
    at = books.write_receipt(Receipt(now_ms(), ignored=ignored, read=position))
    books.index.settle(Settlement({}, at + 1, recorded=ignored))
    assert (ignored, books.index.unrecorded(10)[1]) == ([too_late], [])
    books.forget(pending)
    return {("lost", pending)}


def plant_too_late_replacement(books: Books, caller: str = "tests") -> tuple[int, int]:
    """Returns the pending request that has the id now, and the replacement."""
    first = books.ask(id="a", caller=caller)
    books.cancel("a")
    pending = books.ask(id="a", caller=caller)
    too_late = books.replace(first, in_s=60, caller=caller, id="a")
    books.run_intake()
    return pending, too_late


def delivered_beside_its_replacement(books: Books) -> set[tuple[str, int]]:
    return plant_delivered_replacement(books, lambda asked: asked)


def delivered_beside_its_replacement_after_promotion(books: Books) -> set[tuple[str, int]]:
    return plant_delivered_replacement(books, books.carry)


def plant_delivered_replacement(
    books: Books, last_record: Callable[[int], int]
) -> set[tuple[str, int]]:
    """`last_record` returns the record of a request that has its outcome."""
    ended = books.ask(0)
    books.run_intake()
    books.deliver(ended)
    too_late = books.replace(ended)
    asked = books.ask(0)
    replaced = last_record(asked)
    delivered = last_record(books.replace(asked))
    books.run_intake()
    places = [(record, books.put(record)) for record in (replaced, delivered)]
    books.settle(Receipt(now_ms(), delivered={f"{books.target}/0": places}, invalid=[too_late]))
    return {("duplicated", delivered)}


def messages_that_compaction_may_have_removed(books: Books) -> set[tuple[str, int]]:
    target = f"{books.target}.state"
    books.world.create(NewTopic(target, 1, config={"cleanup.policy": "compact"}))
    removed, misplaced = (books.ask(0, topic=target, key="k", caller="compacted") for _ in range(2))
    books.run_intake()
    assert books.send(misplaced)[2] == 0
    holes = [books.leave_a_hole(target, 0) for _ in range(2)]
    places = list(zip((removed, misplaced), holes, strict=True))
    books.settle(Receipt(now_ms(), delivered={f"{target}/0": places}))
    return {("not-there", misplaced), ("unaccounted", misplaced)}


def receipt_that_a_transaction_hides(books: Books) -> set[tuple[str, int]]:
    """Its message can be read already: this is not unaccounted."""
    offset = books.ask(0, caller="hidden")
    books.run_intake()
    books.begin_transaction(receipts_topic(books.shard.topic))
    _, partition, there = books.send(offset)
    places = {f"{books.target}/{partition}": [(offset, there)]}
    books.write_receipt(Receipt(now_ms(), delivered=places))
    return set()


def empty_redis(books: Books) -> set[tuple[str, int]]:
    books.client.delete(*books.client.scan_iter(f"blackbox:{{{books.shard}}}:*"))
    return {("positions-behind", 0)}


FAULTS: list[Fault] = [
    lost, lost_before_a_record_that_was_refused_and_would_be_valid_by_now, twice_in_its_target, two_outcomes, early, late, overdue, entries_of_ended_requests,
    entry_of_no_request, payload_without_entry, entry_without_payload, receipts_of_no_request,
    outcome_at_a_wrong_place, beyond_the_end_of_its_target, in_a_target_that_is_gone,
    behind_an_open_transaction_in_its_target, in_its_target_without_outcome, positions_ahead,
    positions_behind,
    requests_that_kafka_removed, replacement_that_waits_for_its_dead_letter,
    lost_behind_an_ignored_replacement, delivered_beside_its_replacement,
    delivered_beside_its_replacement_after_promotion, messages_that_compaction_may_have_removed,
    receipt_that_a_transaction_hides, empty_redis,
]  # fmt: skip
"""Each plants at most one fault in correct books, and returns what an audit should find."""


@pytest.mark.parametrize("shelf", [len(FAULTS)], indirect=True)
@pytest.mark.parametrize("few_rows", [tuning.FEW_ROWS, pytest.param(0, marks=pytest.mark.proof)])
def test_each_planted_fault_is_found_and_nothing_else(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, few_rows: int
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(tuning, "FEW_ROWS", few_rows)
    planted: dict[str, set[tuple[str, int]]] = {}
    for books, fault in zip(shelf.books, FAULTS, strict=True):
        books.ask()
        books.deliver_now()
        planted[fault.__name__] = fault(books)

    verdict = shelf.audit(targets=True, late_s=60)

    found: dict[str, set[tuple[str, int]]] = {fault.__name__: set() for fault in FAULTS}
    for one in verdict.exceptions:
        found[FAULTS[one.partition].__name__].add((one.kind, one.offset))
    assert found == planted
    assert not verdict.is_clean
    assert verdict.by_kind == {
        "duplicated": 4, "orphan-entry": 4, "positions-behind": 4, "late": 2, "lost": 3,
        "no-request": 2, "not-there": 5, "positions-ahead": 2, "unaccounted": 2, "early": 1,
        "gone": 1, "no-payload": 1, "orphan-payload": 1,
    }  # fmt: skip
    assert verdict.callers["waits"] == {"pending": 2, "cancelled": 1}
    assert verdict.callers["hidden"] == {"unknown": 1}
    assert verdict.callers["compacted"] == {"delivered": 2}
    assert verdict.by_kind.keys() == documented_kinds()
    [gone] = exceptions_of(verdict, lost)
    assert (gone.id, gone.caller) == (request_id(shelf.books[0].shard, 2), "<b>shop</b>")
    assert "&lt;b&gt;shop" in page(verdict)
    assert "<b>shop" not in page(verdict)
    assert "targets contain it 2 times" in exceptions_of(verdict, twice_in_its_target)[0].detail
    assert re.fullmatch(
        r"2 outcomes; first delivered at \S+/\d@\d, last dead",
        exceptions_of(verdict, two_outcomes)[0].detail,
    )
    assert re.fullmatch(
        r"delivered 9\d{4} ms after it was due", exceptions_of(verdict, late)[0].detail
    )
    assert re.fullmatch(
        r"still pending \d+ ms after it was due", exceptions_of(verdict, overdue)[0].detail
    )
    [removed] = exceptions_of(verdict, requests_that_kafka_removed)
    assert "removed the requests 700 to 899 before" in removed.detail
    assert removed.detail.endswith("at most 200 are lost")
    assert [one.detail for one in exceptions_of(verdict, entries_of_ended_requests)] == [
        "in the index, but delivered", "in the index, but replaced by 5",
        "in the index, but cancelled by 6",
    ]  # fmt: skip
    assert {
        one.detail
        for name in (positions_ahead, positions_behind)
        for one in exceptions_of(verdict, name)
    } == {
        "the position requests is 4, but the journal ends at 2",
        "the position receipts is 7, but the journal ends at 1",
        "the position requests stays 2, although 1 records wait",
        "the position receipts stays 1, although 1 outcomes wait",
    }
    [beyond] = exceptions_of(verdict, beyond_the_end_of_its_target)
    assert re.search(r"/0@90000, but this partition ends at \d+$", beyond.detail)
    for one in exceptions_of(verdict, in_a_target_that_is_gone):
        assert one.detail.endswith("@0, a topic or partition that does not exist any more")
    for fault, replaced, replacement in (
        (delivered_beside_its_replacement, 4, 5),
        (delivered_beside_its_replacement_after_promotion, 5, 6),
    ):
        [beside] = exceptions_of(verdict, fault)
        assert beside.id == request_id(Shard(beside.topic, beside.partition), replacement)
        assert re.fullmatch(
            rf"delivered at {shelf.books[0].target}/0@\d+, although the request that it replaces, at "
            rf"{replaced}, was delivered",
            beside.detail,
        )
    assert {one.detail for one in exceptions_of(verdict, empty_redis)} == {
        "the shard has no position, although 2 records wait", "the shard has no position, although 1 outcomes wait",
    }  # fmt: skip


def documented_kinds() -> set[str]:
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    [table] = re.findall(r"^## Exceptions\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    return set(re.findall(r"^\| ([a-z][a-z-]+) (?:\(.*?\) )?\| (?!meaning)", table, re.MULTILINE))


def exceptions_of(verdict: AuditVerdict, fault: Fault) -> list[PositionFinding]:
    partition = FAULTS.index(fault)
    return sorted(
        (one for one in verdict.exceptions if one.partition == partition),
        key=lambda one: one.offset,
    )


class Expected(NamedTuple):
    """What an audit should find in books: the exceptions, and how many requests are in each state."""

    exceptions: set[tuple[str, int]]
    states: dict[str, int]


def schedules_that_compaction_removed(books: Books) -> Expected:
    untold, delivered, twice, left = (books.leave_a_hole(*books.shard) for _ in range(4))
    pending = books.schedule("pending")
    books.run_intake()
    at = books.put(untold)
    books.settle(Receipt(now_ms(), delivered={f"{books.target}/0": [(untold, at)]}))
    books.cut(receipts=1)
    for ended in ([delivered, twice], [twice]):
        books.settle(Receipt(now_ms(), delivered={"elsewhere/0": [(one, one) for one in ended]}))
    assert left < pending  # a newer schedule of its id is not read yet
    books.leave(left)
    return Expected({("duplicated", twice)}, {"pending": 1})


def refusal_whose_receipt_kafka_removed(books: Books) -> Expected:
    """It is not lost. No receipt below those of the low-water mark names a request above it."""
    above = plant_marks_behind_a_refusal(books)
    books.cut(receipts=1)
    return Expected({("lost", above)}, {"pending": 2, "unknown": 1})


def marks_whose_receipts_kafka_removed(books: Books) -> Expected:
    """Nothing says which requests have had a receipt."""
    plant_marks_behind_a_refusal(books)
    books.write_receipt(Receipt(now_ms()))
    books.cut(receipts=3)
    return Expected(set(), {"pending": 1, "unknown": 2})


def plant_marks_behind_a_refusal(books: Books) -> int:
    """Returns the offset of a request that Redis has lost."""
    refused = books.schedule("refused")
    books.run_intake()
    books.settle(Receipt(now_ms(), dead=[refused]))
    pending = books.schedule("pending")
    above = books.schedule("lost")
    books.run_intake()
    books.forget(above)
    # Redis does not have it: the last mark is above it
    for mark in (Mark(pending, 1), Mark(above + 1, 2)):
        books.settle(Receipt(now_ms(), mark=mark))
    return above


def copies_in_the_history_topic(books: Books) -> Expected:
    """They are no second deliveries, and the audit does not look for messages there."""
    history = books.settings.history_topic
    books.world.create(NewTopic(history, 1))
    delivered = books.schedule("delivered", in_s=-1)
    to_history = books.schedule("to the history", in_s=-1, target=history)
    books.run_intake()
    books.deliver(delivered)
    books.send(delivered, to=history)
    books.settle(Receipt(now_ms(), delivered={f"{history}/0": [(to_history, 1)]}))
    return Expected(set(), {"delivered": 2})


OF_SCHEDULES = (
    schedules_that_compaction_removed, refusal_whose_receipt_kafka_removed,
    marks_whose_receipts_kafka_removed, copies_in_the_history_topic,
)  # fmt: skip


@pytest.mark.parametrize("topic_format", ["scheduler"])
@pytest.mark.parametrize("shelf", [len(OF_SCHEDULES)], indirect=True)
def test_of_schedules_only_those_whose_records_and_receipts_are_kept_are_judged(
    shelf: Shelf,
) -> None:
    planted = [plant(books) for plant, books in zip(OF_SCHEDULES, shelf.books, strict=True)]

    with audited(shelf.spark, shelf.settings, targets=True) as found:
        verdict = found.verdict
        counted = found.statuses.groupBy("partition", "state").count().collect()

    seen = [Expected(set(), {}) for _ in OF_SCHEDULES]
    for one in verdict.exceptions:
        seen[one.partition].exceptions.add((one.kind, one.offset))
    for row in counted:
        seen[row.partition].states[row.state] = row["count"]
    assert seen == planted
    assert verdict.read_targets == [shelf.books[0].target]
    # four schedules that compaction removed, and those of unknown state
    assert verdict.unknown == 4 + 1 + 2


def test_records_of_promotion_with_forged_numbers_are_invalid_in_an_audit(shelf: Shelf) -> None:
    [books] = shelf.books
    books.ask(3600)
    value = json.dumps({"topic": books.target, "message": "hello", "countdown": 0})
    for written_ms in (2**43, 2**53, 2**63 - 1, 2**64 - 1):
        books.write(value, [(CARRIED, json.dumps([0, 0, written_ms, True]))])
    books.run_intake()

    verdict = shelf.audit()

    assert verdict.exceptions == []
    assert verdict.states["pending"] == 5


@pytest.mark.proof
def test_a_receipt_whose_transaction_ends_during_the_audit_is_judged(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    [books] = shelf.books
    books.deliver_now()
    offset = books.ask(0)
    books.run_intake()
    # The end of a transaction reaches its partitions one after the other, here the target first.
    end = books.begin_transaction(receipts_topic(books.shard.topic))
    _, partition, there = books.send(offset)
    places = {f"{books.target}/{partition}": [(offset, there)]}
    books.write_receipt(Receipt(now_ms(), delivered=places))
    look = Topics.ends

    def look_before_the_end(*about: Any, **how: Any) -> Any:
        found = look(*about, **how)
        end()
        return found

    monkeypatch.setattr(Topics, "ends", look_before_the_end)

    verdict = shelf.audit(targets=True)

    assert (kinds(verdict), verdict.states["delivered"], verdict.unknown) == ([], 2, 0)


@pytest.mark.parametrize("targets", [pytest.param(False, marks=pytest.mark.proof), True])
def test_what_kafka_removes_during_an_audit_is_not_judged(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, *, targets: bool
) -> None:
    [books] = shelf.books
    for _ in range(3):
        books.deliver_now()
    books.ask()
    books.run_intake()
    plan, planned = module._Audit._journals, []

    def planned_before_a_trim(audit: Any) -> Any:
        planned.append(plan(audit))
        if len(planned) == 2:
            books.cut(requests=2, receipts=2)
            books.world.empty(books.target)
        return planned[-1]

    monkeypatch.setattr(module._Audit, "_journals", planned_before_a_trim)

    verdict = shelf.audit(targets=targets)

    assert (kinds(verdict), len(planned)) == ([], 2)
    assert (verdict.states["pending"], verdict.states["delivered"]) == (1, 1)


def test_an_audit_fails_if_records_that_it_must_read_again_are_gone(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    [books] = shelf.books
    books.deliver_now()
    books.ask()
    books.run_intake()
    judge = module.request_statuses

    def judged_after_a_loss(*tables: Any) -> Any:
        # As if Spark had lost the executor that held them.
        shelf.spark.catalog.clearCache()
        books.cut(receipts=1)
        return judge(*tables)

    monkeypatch.setattr(module, "request_statuses", judged_after_a_loss)

    with pytest.raises(AuditError, match="run the audit again"):
        shelf.audit()


@pytest.mark.proof
def test_an_audit_with_a_ledger_covers_records_that_kafka_removed(
    shelf: Shelf, tmp_path: Path, type_audit: Callable[..., Result]
) -> None:
    [books] = shelf.books
    path = str(tmp_path / "ledger")
    access = kafka(shelf.settings)
    books.deliver_now()
    books.deliver_now()
    gone, _ = books.ask(), books.ask(id="a")  # 2, 3
    books.run_intake()
    extend(shelf.spark, shelf.settings, access, path)
    books.cut(requests=4, receipts=2)
    books.forget(gone)

    answer = type_audit("--ledger", path)

    assert answer.exit_code == 1
    assert answer.stdout.startswith("4 requests: 2 pending, 2 delivered\n1 exceptions: 1 lost")

    # Records that neither of them has may have ended an earlier request: a receipt may name its dead
    # letter, and a request may be a cancel under its caller id.
    books.cancel("a")  # 4
    books.ask()  # 5
    books.deliver_now()  # 6
    books.cut(requests=7, receipts=3)
    books.deliver_now()  # 7
    extend(shelf.spark, shelf.settings, access, path, accept_gap=True)
    kept = Ledger.open(shelf.spark, path)
    verdict = shelf.audit(kept=kept)

    assert kept.gaps
    assert kinds(verdict) == []
    assert {state: count for state, count in verdict.states.items() if count} == {
        "delivered": 3, "unknown": 2,
    }  # fmt: skip
    assert verdict.unknown == 3


def test_a_ledger_of_several_topics_says_nothing_of_those_that_are_not_audited(
    shelf: Shelf, tmp_path: Path
) -> None:
    [books] = shelf.books
    own, target = books.shard.topic, f"{books.target}.others"
    other = f"{own}.other"
    books.world.create(*(NewTopic(name, 1) for name in (other, receipts_topic(other), target)))
    both = {"BLACKBOX_REQUEST_TOPICS": f"{other}:countdown,{own}:countdown"}
    settings = settings_of(shelf.environment | both)
    with closing(Books(books.world, settings, 0)) as others:
        others.ask(topic=target)
        others.write_receipt(Receipt(now_ms(), barrier=True, gone=(7, 9)))
    books.deliver_now()
    path = str(tmp_path / "ledger")
    extend(shelf.spark, settings, kafka(settings), path)

    verdict = shelf.audit(kept=Ledger.open(shelf.spark, path), targets=True)

    assert (kinds(verdict), verdict.requests) == ([], 1)
    assert verdict.read_targets == [books.target]


def test_requests_whose_receipts_were_lost_are_not_judged(shelf: Shelf, tmp_path: Path) -> None:
    [books] = shelf.books
    books.bind()
    delivered, refused, pending = books.ask(0), books.ask(), books.ask()
    books.run_intake()
    books.deliver(delivered)
    books.settle(Receipt(now_ms(), dead=[refused]))
    books.lose_receipts()
    books.world.create(NewTopic(receipts_topic(books.shard.topic), 1))
    bound = CliRunner().invoke(
        app, ["rebind", books.shard.topic, "--pending", "deliver"], env=shelf.environment
    )
    assert bound.exit_code == 0, bound.output
    books.bind()
    forgotten = books.ask()
    books.run_intake()
    books.forget(forgotten)
    # No mark says yet that the lost receipts name none of the requests above it.
    books.settle(Receipt(now_ms(), mark=Mark(pending, 0)))

    verdict = shelf.audit(targets=True)

    assert kinds(verdict) == []
    assert {state: count for state, count in verdict.states.items() if count} == {
        "pending": 1, "unknown": 3,
    }  # fmt: skip
    assert verdict.unknown == 3

    # The next walk found a mark behind the barrier. The ledger has the barrier, too.
    books.settle(Receipt(now_ms(), mark=Mark(forgotten, 2)))
    path = str(tmp_path / "ledger")
    extend(shelf.spark, shelf.settings, kafka(shelf.settings), path)
    books.cut(receipts=3)

    verdict = shelf.audit(kept=Ledger.open(shelf.spark, path))

    assert kinds(verdict) == [("lost", forgotten)]
    assert verdict.unknown == 2


def test_an_audit_fails_if_a_receipts_topic_is_missing(
    shelf: Shelf, type_audit: Callable[..., Result]
) -> None:
    [books] = shelf.books
    books.deliver_now()
    books.lose_receipts()

    answer = type_audit()

    assert (answer.exit_code, answer.stdout) == (1, ""), answer.output
    assert f"the topic {receipts_topic(books.shard.topic)} does not exist" in answer.stderr
    assert "blackbox rebind" in answer.stderr


def test_an_audit_fails_if_one_of_the_request_topics_does_not_exist(
    shelf: Shelf, type_audit: Callable[..., Result]
) -> None:
    topic = shelf.books[0].shard.topic
    topics = f"{topic}:countdown,{topic}.deleted:countdown"

    answer = type_audit(BLACKBOX_REQUEST_TOPICS=topics)

    assert (answer.exit_code, answer.stdout) == (1, ""), answer.output
    assert f"the request topic {topic}.deleted does not exist" in answer.stderr
    assert "blackbox rebind" in answer.stderr


@pytest.mark.proof
def test_an_audit_that_cannot_run_reports_the_cause_in_one_line(
    shelf: Shelf, tmp_path: Path, type_audit: Callable[..., Result]
) -> None:
    [books] = shelf.books
    books.write_receipt_of_a_later_version()

    def problem(*typed: str) -> str:
        answer = type_audit(*typed)
        assert (answer.exit_code, answer.stdout) == (1, ""), answer.output
        assert answer.stderr.count("\n") == 1, answer.stderr
        return answer.stderr

    assert "does not contain a ledger; `blackbox ledger` creates one" in problem(
        "--ledger", str(tmp_path)
    )
    named = f"{receipts_topic(books.shard.topic)}/0@0: the receipt has version 2"
    assert named in problem()


@pytest.mark.proof
def test_an_audit_beside_a_live_service_under_load_finds_nothing(
    world: World, spark: SparkSession
) -> None:
    service = world.start_service(poll_interval_ms=50)
    service.wait_ready()
    world.ask(100, from_s=3000, within_s=3600)
    until("they are pending", lambda: service.metric("blackbox_pending") == 100)
    world.ask(3900, within_s=60)
    until("some are delivered", lambda: service.metric("blackbox_delivered_total") > 0)

    with audited(spark, settings_of(world.environment()), targets=True) as found:
        verdict = found.verdict

    assert kinds(verdict) == []
    assert verdict.requests == 4000
    assert verdict.states["pending"] > 0, verdict
    assert verdict.states["delivered"] > 0


@pytest.mark.proof
def test_both_tiers_are_clean_at_every_moment_and_a_lost_cold_request_is_found(
    world: World, spark: SparkSession
) -> None:
    year = Year(world)

    def audit() -> AuditVerdict:
        world.flush()
        with audited(spark, year.settings) as found:
            return found.verdict

    now_ms = year.began_ms
    due_ms = now_ms + 9 * HOUR_MS
    year.ask("near", now_ms + HOUR_MS // 2)
    for name in ("a", "b", "cancelled", "replaced"):
        year.ask(name, due_ms, id=name)
    year.ask("nameless", due_ms)
    year.pass_to(now_ms)
    year.cancel("cancelled")
    year.ask("new", due_ms + HOUR_MS, id="replaced")
    year.pass_to(now_ms)
    found = audit()
    assert (found.by_kind, found.cold, found.states["pending"]) == ({}, 4, 5)

    assert year.promote(now_ms + 8 * HOUR_MS) == 3
    found = audit()
    assert (found.by_kind, found.requests, found.cold) == ({"positions-behind": 1}, 7, 4)
    year.pass_to(now_ms + 8 * HOUR_MS)
    year.cancel("b")
    year.pass_to(due_ms)
    found = audit()
    assert (found.by_kind, found.cold) == ({}, 1)
    assert {state: count for state, count in found.states.items() if count} == {
        "delivered": 3, "cancelled": 2, "replaced": 1, "pending": 1,
    }  # fmt: skip

    year.client.delete(f"blackbox:{{{year.shards[0]}}}:cold")
    found = audit()
    assert [(one.kind, one.id) for one in found.exceptions] == [
        ("lost", request_id(year.shards[0], 7))
    ]


@pytest.mark.at_length
def test_a_cancel_by_the_first_id_is_clean_before_and_after_renewal(
    world: World, spark: SparkSession
) -> None:
    year = Year(world)
    [shard], now_ms = year.shards, year.began_ms
    due_ms = now_ms + 9 * HOUR_MS

    def audit() -> AuditVerdict:
        year.pass_to(now_ms)
        with audited(spark, year.settings) as found:
            return found.verdict

    def carry(previous: int, *, is_cold: bool) -> None:
        at = json.dumps([previous, previous % 2, now_ms, is_cold])
        value = json.dumps({"topic": world.targets[0], "message": "m", "at": due_ms})
        world.send_raw(value, [(CARRIED, at)], 0)

    for _ in range(2):
        year.ask("far", due_ms)
    carry(0, is_cold=True)
    carry(1, is_cold=False)
    assert (audit().by_kind, year.standing()) == ({}, (1, 1))
    for asked in (0, 1):
        world.send_raw(None, [(CANCELS, request_id(shard, asked))], 0)
    found = audit()
    assert (found.by_kind, found.states["cancelled"], year.standing()) == ({}, 2, (0, 1))
    carry(2, is_cold=False)
    found = audit()
    assert (found.by_kind, found.states["cancelled"], year.standing()) == ({}, 2, (0, 0))
    year.pass_to(due_ms)
    assert year.delivered() == []
