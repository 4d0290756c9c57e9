"""A lost Redis restored on Spark holds what the service's own recovery would have put there."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from pyspark.sql import SparkSession
from typer.testing import CliRunner, Result

from blackbox.cli import app
from blackbox.connect import formats, kafka, own_topics
from blackbox.formats import may_have_caller_id
from blackbox.index.connection import pool
from blackbox.index.shard_index import ShardIndex
from blackbox.intake import Intake
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import receipts_topic
from blackbox.journal.writer import Writer
from blackbox.pipeline.journals import Reach, Span, reach, read_outcomes, read_requests
from blackbox.pipeline.restore.fill import Filling
from blackbox.pipeline.restore.restore import Report, Restore, RestoreRefused
from blackbox.receipt import Receipt, encode
from blackbox.recovery import Recovered, Recovery
from blackbox.request import Shard
from tests.raw_record import write_with_header
from tests.world import World, until

pytestmark = pytest.mark.service

Headers = list[tuple[str, str | bytes | None]]

LATER_S = 3600
REQUESTS = int(os.environ.get("BLACKBOX_TEST_REQUESTS", "5000"))
PENDING_OF_TEN = 2


class Interrupted(BaseException):
    """As Ctrl-C, a lost host, or kill -9 would."""


class Place:
    """A world without a service: what is written to its journals, and what Redis holds."""

    def __init__(self, world: World, session: SparkSession) -> None:
        self.world = world
        self.session = session
        self.settings = world.settings()
        self.access = kafka(self.settings)
        self.client = redis.Redis.from_url(world.redis.url)
        self.partitions = 4
        self._producer = Producer(
            {
                "bootstrap.servers": world.kafka.bootstrap_servers,
                "linger.ms": 1,
                "enable.idempotence": True,
                "max.in.flight": 1,
                "topic.metadata.refresh.interval.ms": 500,
            }
        )
        own_topics(self.settings, self.access).ensure()

    def close(self) -> None:
        self.forget()
        self.client.close()

    @property
    def shards(self) -> list[Shard]:
        return [Shard(self.world.requests, partition) for partition in range(self.partitions)]

    def restore(self, kept: Any = None) -> Restore:
        return Restore(self.session, self.settings, self.access, kept)

    def heal(self, shard: Shard) -> Recovered:
        """What the service does by itself when it opens a shard."""
        connections = pool(self.world.redis.url)
        index = ShardIndex(shard, connections, grace_s=self.settings.grace_s)
        journal = ShardJournal(shard, self.access)
        writer = Writer(shard, self.access, exactly_once=True)
        intake = Intake(formats(self.settings)[shard.topic], index, None)
        try:
            return Recovery(
                shard=shard,
                index=index,
                journal=journal,
                writer=writer,
                confirm=lambda: None,
                apply=lambda batch: intake.apply(batch, now_ms()),
                names=lambda batch: intake.names(batch, now_ms()),
                now_ms=now_ms,
            ).open()
        finally:
            for part in (index, journal, writer):
                part.close()
            connections.disconnect()

    def heal_all(self) -> None:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(self.heal, self.shards))

    def healed(self) -> dict[str, Any]:
        """What Redis holds once the service has healed it after a total loss."""
        self.forget()
        self.heal_all()
        return self.content()

    def forget(self) -> None:
        """Redis loses everything of this world."""
        for key in self._keys():
            self.client.delete(key)

    def content(self) -> dict[str, Any]:
        """All that counts in Redis, but for the receipts' labels, `largest` and the time to live.

        What does not: a payload without an entry, which expires, and in `skip` what is below the
        label. Nobody looks at either.
        """
        raw: Any = self.client
        found: dict[str, Any] = {}
        for key in sorted(self._keys()):
            name = key.decode()
            prefix, _, kind = name.rpartition("}:")
            if kind == "due":
                found[name] = raw.zrange(key, 0, -1, withscores=True)
                for member, _ in found[name]:
                    payload = f"{prefix}}}:msg:{member.decode()}"
                    found[payload] = raw.get(payload)
            elif kind == "ids":
                found[name] = raw.hgetall(key)
            elif kind == "state":
                found[name] = {k: v for k, v in raw.hgetall(key).items() if k != b"largest"}
        return found

    def pending(self) -> int:
        return sum(int(self.client.zcard(f"blackbox:{{{shard}}}:due")) for shard in self.shards)

    def ask(self, partition: int = 0, in_s: float = LATER_S, **more: Any) -> int:
        request = {"topic": self.world.targets[0], "message": "hello", "countdown": in_s}
        return self.write(json.dumps(request | more), partition)

    def cancel(self, caller_id: str, partition: int = 0) -> int:
        return self.write(json.dumps({"id": caller_id, "cancel": True}), partition)

    def write(self, value: str | bytes | None, partition: int = 0) -> int:
        return self._write(self._producer, self.world.requests, value, partition)

    def settle(self, partition: int, *offsets: int, **more: Any) -> None:
        """A receipt as of messages whose topic was deleted since, which is believed."""
        places = {"gone/0": [(offset, offset) for offset in offsets]} if offsets else {}
        self.receipt(Receipt(1, delivered=places, **more), partition)

    def receipt(self, receipt: Receipt, partition: int = 0) -> None:
        topic = receipts_topic(self.world.requests)
        self._write(self._producer, topic, encode(receipt), partition)

    def fill(self, partition: int, count: int) -> None:
        """Many requests of 200 bytes; of each ten, the last ones are pending."""
        start = {"topic": self.world.targets[0], "message": "x" * 140}
        headers: Headers = [("CALLER_SERVICE", b"tests")]
        for number in range(count):
            value = orjson.dumps(start | {"countdown": LATER_S + number % 1000})
            while True:
                try:
                    self._producer.produce(
                        self.world.requests, value, partition=partition, headers=headers
                    )
                    break
                except BufferError:
                    self._producer.poll(0.1)
        assert self._producer.flush(60) == 0
        ended = [n for n in range(count) if n % 10 < 10 - PENDING_OF_TEN]
        for first in range(0, len(ended), 1000):
            self.settle(partition, *ended[first : first + 1000])

    def abort(self, *values: str, partition: int = 0) -> None:
        self._in_transaction(values, partition).abort_transaction(30)

    def commit(self, *values: str, partition: int = 0) -> None:
        self._in_transaction(values, partition).commit_transaction(30)

    def grow(self) -> None:
        """One partition more."""
        self.partitions += 1
        admin = AdminClient({"bootstrap.servers": self.world.kafka.bootstrap_servers})
        grown = admin.create_partitions([NewPartitions(self.world.requests, self.partitions)])
        grown[self.world.requests].result(30)
        until(
            "the new partition",
            lambda: len(admin.list_topics(self.world.requests, timeout=5)
                        .topics[self.world.requests].partitions) == self.partitions,
        )  # fmt: skip

    def cut(self, topic: str, offset: int, partition: int = 0) -> None:
        """What retention does: everything below `offset` is gone."""
        admin = AdminClient({"bootstrap.servers": self.world.kafka.bootstrap_servers})
        for future in admin.delete_records([TopicPartition(topic, partition, offset)]).values():
            future.result(30)

    def _keys(self) -> list[bytes]:
        raw: Any = self.client
        return list(raw.keys(f"blackbox:{{{self.world.requests}-*"))

    def _in_transaction(self, values: tuple[str, ...], partition: int) -> Producer:
        producer = Producer(
            {
                "bootstrap.servers": self.world.kafka.bootstrap_servers,
                "transactional.id": uuid.uuid4().hex,
            }
        )
        producer.init_transactions(30)
        producer.begin_transaction()
        for value in values:
            self._write(producer, self.world.requests, value, partition)
        return producer

    def _write(
        self, producer: Producer, topic: str, value: str | bytes | None, partition: int
    ) -> int:
        at: list[int] = []

        def acknowledged(error: KafkaError | None, message: Message) -> None:
            assert error is None, error
            at.append(message.offset() or 0)

        headers = [("CALLER_SERVICE", b"tests")]

        def produced() -> bool:
            place: dict[str, Any] = {
                "partition": partition,
                "headers": headers,
                "on_delivery": acknowledged,
            }
            try:
                producer.produce(topic, value, b"k", **place)
            except KafkaException as error:  # it does not know a new partition yet
                if error.args[0].code() != KafkaError._UNKNOWN_PARTITION:
                    raise
                producer.list_topics(topic, timeout=5)
                return False
            return True

        until("the partition", produced)
        assert producer.flush(30) == 0
        return at[0]


@pytest.fixture
def place(world: World, spark: SparkSession) -> Iterator[Place]:
    place = Place(world, spark)
    yield place
    place.close()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def every_kind(place: Place) -> int:
    """Everything that can be in a journal; returns how many requests are pending then."""
    ended = [place.ask() for _ in range(6)]
    place.ask(in_s=-5)  # due when it was written
    place.ask(id="a")
    place.ask(id="a", in_s=7200)  # replaces
    place.ask(id="b")
    place.cancel("b")
    place.ask(message={"id": "no caller id"}, key="k", headers={"x": "y"}, expires_after=60)
    place.ask(id="späť", message=None)
    place.write("no JSON")
    place.write('{"topic": "orders", "id": "a"}')  # invalid: replaces nothing
    place.write(b'{"topic": "%s", "message": 1, "countdown": 9, "i\\u0064": "b"}'
                % place.world.targets[0].encode())  # fmt: skip
    write_with_header(
        place.world.kafka.bootstrap_servers, place.world.requests, b"\xff", b'{"id": "a"}'
    )
    delivered_later = place.ask(id="c")
    place.abort(json.dumps({"id": "a", "cancel": True}))
    place.commit(json.dumps({"topic": "gone", "message": "in a transaction", "countdown": 99}))
    place.settle(0, *ended[:4])
    place.settle(0, ended[4], delivered_later)
    place.settle(0, void=[ended[4], ended[3]], barrier=True)
    place.receipt(Receipt(1, dead=[ended[3]], expired=[ended[5]]))
    place.ask(1, id="a")
    place.cancel("a", 2)
    promised = place.ask(3)  # the last receipt names a message that is not there
    place.receipt(Receipt(1, delivered={f"{place.world.targets[0]}/0": [(promised, 77)]}), 3)
    place.grow()
    place.ask(4)
    place.ask(4, id="a")
    return 14


Typed = Callable[..., Result]


@pytest.fixture
def type_restore(place: Place, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Runs the command in this process, on the shared session."""
    command = import_module("blackbox.cli.restore")
    monkeypatch.setattr(command, "spark", lambda *_: nullcontext(spark))
    environment: dict[str, str | None] = dict.fromkeys(
        n for n in os.environ if n.startswith("BLACKBOX_")
    )
    environment |= place.world.environment() | {"COLUMNS": "80"}
    return lambda *typed: CliRunner().invoke(app, ["restore", *typed], env=environment)


def test_a_restored_index_is_the_one_that_the_service_would_make(
    place: Place, type_restore: Typed
) -> None:
    count = every_kind(place)
    ends = reach(place.settings, place.access)

    dry = json.loads(type_restore("--dry-run", "--json").stdout)
    assert (dry["pending"], dry["notes"]) == (count - 1, [])
    assert place.content() == {}, "a dry run changes nothing"
    assert reach(place.settings, place.access) == ends

    done = type_restore()
    restored = place.content()
    rows = [line.split() for line in done.stdout.splitlines() if place.world.name in line]
    assert [row[-1] for row in rows] == ["yes"] * place.partitions
    assert place.pending() == sum(int(row[2]) for row in rows) == count

    refused = type_restore("--json")
    assert (refused.exit_code, refused.stdout) == (3, "")
    assert "the index is not empty: " in refused.stderr
    assert type_restore("--replace").exit_code == 0
    assert place.content() == restored, "it can be run twice"

    assert [place.heal(shard).outcomes for shard in place.shards] == [0] * place.partitions
    assert place.content() == restored, "the service takes it as it is"
    assert restored == place.healed()


def test_requests_written_meanwhile_are_left_to_the_service(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = REQUESTS // place.partitions * place.partitions
    for shard in place.shards:
        place.fill(shard.partition, count // place.partitions)
    place.ask(id="a")

    def meanwhile() -> None:
        place.ask(1)
        place.cancel("a")

    before(monkeypatch, Restore, "_fill", meanwhile)
    report = place.restore().run()
    assert report.scanned == count + 1
    assert report.pending == place.pending() == count * PENDING_OF_TEN // 10 + 1

    place.heal_all()
    assert place.content() == place.healed()
    assert place.pending() == report.pending


def interrupt() -> None:
    raise Interrupted


def test_an_interrupted_restore_leaves_nothing_that_counts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = place.ask()
    first = place.ask(id="a")
    place.ask(1, id="a")
    place.settle(0, offset)

    before(monkeypatch, Restore, "_finish", interrupt)
    with pytest.raises(Interrupted):
        place.restore().run()
    assert place.pending() == 2
    place.settle(0, first)
    place.restore().run()
    restored = place.content()
    assert restored == place.healed(), "another restore starts over"

    place.forget()
    before(monkeypatch, Filling, "_fill_chosen", interrupt)
    with pytest.raises(Interrupted):
        place.restore().run()
    place.heal_all()
    assert place.content() == restored, "a service begins it anew"


def test_who_takes_over_meanwhile_keeps_its_index(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for partition in (0, 0, 1):
        place.ask(partition)
    place.ask(2, id="a")

    before(monkeypatch, Restore, "_fill", lambda: place.heal(place.shards[0]))
    theirs, mine, *_ = place.restore().run().shards

    assert not theirs.checked
    assert "has taken the index over" in (theirs.problem or "")
    assert mine.checked
    expected = place.content()

    place.forget()
    reports: list[Report] = []
    before(monkeypatch, Filling, "_fill_chosen", lambda: reports.append(place.restore().run()))
    reports.append(place.restore().run())

    assert [[one.checked for one in report.shards[:3]] for report in reports] == [
        [True] * 3, [False] * 3,
    ]  # fmt: skip
    assert place.content() == expected == place.healed()


def test_what_nobody_has_any_more_is_named(place: Place) -> None:
    offsets = [place.ask() for _ in range(4)]
    place.settle(0, *offsets[:3])
    place.settle(0)
    place.cut(place.world.requests, 2)
    place.cut(receipts_topic(place.world.requests), 1)

    report = place.restore().run()

    name = place.shards[0]
    assert [note.partition(",")[0] for note in report.notes] == [
        f"{name}: requests 0 to 1 are unknown",
        f"{name}: receipts 0 to 0 are unknown",
    ]
    assert report.pending == 2
    assert place.content() == place.healed()


def test_receipts_of_a_topic_that_was_made_anew_are_refused(place: Place) -> None:
    place.ask()
    place.settle(0, 70_000)

    with pytest.raises(
        RestoreRefused, match=r"speaks of the request 70000, .* is 1; was the topic"
    ):
        place.restore().run()

    assert place.content() == {}


class Files:
    """Journals as the ledger keeps them, up to given offsets."""

    gaps: Mapping[Shard, Sequence[Span]] = {}

    def check(self, *asked: object) -> None:
        """They were read here."""

    def __init__(self, place: Place, held: Reach) -> None:
        self.reach = held
        self._requests = read_requests(
            place.session, place.settings, place.access, held.requests, whole=True
        ).localCheckpoint()
        self._outcomes = read_outcomes(place.session, place.access, held.receipts).localCheckpoint()

    def requests(self) -> Any:
        return self._requests

    def outcomes(self) -> Any:
        return self._outcomes


def test_what_left_kafka_comes_from_the_ledger(place: Place) -> None:
    count = every_kind(place)
    name = place.world.requests
    own_topics(place.settings, place.access).ensure()
    whole = reach(place.settings, place.access)
    kept = Files(place, Reach(upto(whole.requests, 12), upto(whole.receipts, 2)))
    expected = place.healed()
    place.forget()
    place.cut(name, 11)
    place.cut(receipts_topic(name), 2)

    report = place.restore(kept).run()

    assert (report.pending, report.notes) == (count, [])
    assert place.content() == expected


def upto(spans: Mapping[Shard, Span], offset: int) -> dict[Shard, Span]:
    return {shard: Span(0, min(offset, span.end)) for shard, span in spans.items()}


# with a service


def test_a_restore_between_two_services_delivers_each_message_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = place.world
    service = world.start_service().wait_ready()
    world.ask(100, within_s=0.2)
    world.ask(100, from_s=6, within_s=6.5)
    until("the first are out", lambda: len(world.received(None)) >= 100)
    with pytest.raises(
        RestoreRefused, match=r"the service runs: .* has 1 members; stop the service"
    ):
        place.restore().run()
    service.stop()
    place.forget()

    before(monkeypatch, Restore, "_finish", interrupt)
    with pytest.raises(Interrupted):
        until_alone(place.restore().run)
    report = place.restore().run()
    world.start_service()

    assert world.wait_delivered(60).is_exact
    assert (report.scanned, report.pending <= 100) == (200, True)


def until_alone(run: Callable[[], Any]) -> Any:
    """A member that has left may be counted for a moment more."""

    def tried() -> Any:
        try:
            return run()
        except RestoreRefused:
            return None

    return until("the group is empty", tried)


def test_a_ledger_that_cannot_be_used_is_named(type_restore: Typed, tmp_path: Path) -> None:
    manifests = tmp_path / "manifest"

    absent = type_restore("--ledger", str(tmp_path))
    manifests.mkdir()
    (manifests / f"{1:020d}.json").write_text('{"format": 99}')
    strange = type_restore("--ledger", str(tmp_path))

    assert [absent.exit_code, strange.exit_code] == [1, 1]
    assert f"{tmp_path} holds no ledger; `blackbox ledger` makes one" in absent.stderr
    assert "has the format 99" in strange.stderr


# what may have a caller id


@pytest.mark.parametrize(
    ("asked", "may"),
    [
        ({"topic": "t", "message": "x", "countdown": 1}, False),
        ({"topic": "t", "message": "id", "countdown": 1, "id": "a"}, True),
        ({"id": "a", "cancel": True}, True),
    ],
)
def test_a_caller_id_shows_in_the_bytes_of_a_record(asked: dict[str, Any], may: bool) -> None:
    assert may_have_caller_id("countdown")(orjson.dumps(asked)) is may


def test_a_caller_id_may_be_spelled_with_escapes() -> None:
    assert may_have_caller_id("countdown")(rb'{"\u0069d": "a", "cancel": true}')


def test_a_record_of_another_format_has_to_be_parsed() -> None:
    assert may_have_caller_id("scheduler")(b"{}")
    assert not may_have_caller_id("countdown")(None)


def before(
    monkeypatch: pytest.MonkeyPatch, whose: type, step: str, do: Callable[[], object]
) -> None:
    """Let something happen once, before a step of the next restore."""
    method = getattr(whose, step)

    def once(self: Any, *given: Any, **more: Any) -> Any:
        monkeypatch.setattr(whose, step, method)
        do()
        return method(self, *given, **more)

    monkeypatch.setattr(whose, step, once)


def test_a_cold_tier_is_left_to_the_service(place: Place) -> None:
    place.settings = place.settings.model_copy(update={"hot_horizon_s": 60})

    with pytest.raises(RestoreRefused, match="BLACKBOX_HOT_HORIZON_S=60: restore does not know"):
        place.restore().run()


def test_a_request_that_was_carried_from_a_cold_tier_ends_the_restore_of_its_shard(
    place: Place,
) -> None:
    request = json.dumps({"topic": "orders", "message": "x", "countdown": 600})
    place.world.send_raw(request, [], 0)
    place.world.send_raw(request, [("blackbox-carried", b"[0,0,1,false]")], 0)
    place.world.flush()

    first, *others = place.restore().run().shards

    assert "was carried from the cold tier; restore does not know" in (first.problem or "")
    assert all(other.problem is None for other in others)
    place.heal_all()
    assert place.content() == place.healed()
