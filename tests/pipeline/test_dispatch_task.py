"""A long-running dispatch task; the test is its driver, so that no Spark is needed."""

from __future__ import annotations

import json
import pickle
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import redis
from confluent_kafka import KafkaError, Message, TopicPartition

from blackbox.config.settings import load
from blackbox.config.wiring import formats, kafka
from blackbox.core.intake import Intake
from blackbox.core.plan import Batch
from blackbox.embedded import EmbeddedRedis, EmbeddedStack
from blackbox.engine.metrics import Metrics, Report
from blackbox.engine.shard_pool import ShardPool
from blackbox.engine.spark import dispatch_task as module
from blackbox.engine.spark.dispatch_task import Window, lease_of, report_of
from blackbox.index.bus import Bus, Listener
from blackbox.index.connection import pool
from blackbox.index.inspector import Inspector
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.own_topics import OwnTopics
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.shard_writer import ShardWriter
from blackbox.records.clock import Clock
from blackbox.records.errors import IndexLost
from blackbox.records.receipt import Receipt
from blackbox.records.request import Record, Shard
from blackbox.support import interpreter, logs
from tests.support.world import World, until

LEASE_S = 0.1
# On a busy machine an answer takes long; what does not wait for it must take longer still.
ANSWER_S = 60.0
WINDOW_S = 600.0
GROUP = 1

Told = dict[str, Any]


class Task(threading.Thread):
    """A running window, as Spark would run it."""

    def __init__(self, window: Window) -> None:
        super().__init__(daemon=True)
        self.window = window
        self.answers: list[pa.RecordBatch] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            window = pickle.loads(pickle.dumps(self.window))
            self.answers = list(window(iter([pa.RecordBatch.from_pydict({"id": [0]})])))
        except BaseException as failure:
            self.failure = failure

    def report(self, within_s: float = ANSWER_S) -> Told:
        """What the task returns when it has ended."""
        self.join(within_s)
        assert not self.is_alive(), "the task is still running"
        assert self.failure is None, self.failure
        [[row]] = [answer.to_pylist() for answer in self.answers]
        report: Told = pickle.loads(row["report"])
        return report


class Driver:
    """Repeats a lease, as a driver does, and receives the reports; ends every task it started."""

    def __init__(self, world: World, **more: object) -> None:
        self.world = world
        self.settings = load(
            **{
                "kafka_bootstrap_servers": world.kafka.bootstrap_servers,
                "redis_url": world.redis.url,
                "request_topics": f"{world.requests}:countdown",
                "dead_letter_topic": world.dead_letters,
                "group_id": world.name,
                "poll_interval_ms": 60_000,
            }
            | more
        )
        self.access = kafka(self.settings)
        self.run = uuid.uuid4().hex
        self.shards = [Shard(world.requests, partition) for partition in range(4)]
        self.bus = Bus(world.redis.url, world.name)
        self._lease_bus = Bus(world.redis.url, world.name)
        self.reports = Listener(world.redis.url, world.name, (report_of(self.run),))
        self.tasks: list[Task] = []
        self.lease: dict[str, Any] | None = None
        self._before = len(world.received(world.targets[0]))
        self._closing = threading.Event()
        self._renewing = threading.Thread(target=self._renew, daemon=True)
        self._renewing.start()
        assert self.reports.next(0.05) is None

    def close(self) -> None:
        self.lease = {}
        for task in self.tasks:
            task.join(ANSWER_S)
        self._closing.set()
        self._renewing.join()
        self.bus.close()
        self._lease_bus.close()
        self.reports.close()
        assert not any(task.is_alive() for task in self.tasks)

    def start(self, *shards: Shard, number: int = 5, length_s: float = WINDOW_S) -> Task:
        window = Window(
            run=self.run,
            settings=self.settings,
            access=self.access,
            group=GROUP,
            number=number,
            shards=frozenset(shards),
            length_s=length_s,
        )
        self.tasks.append(Task(window))
        self.tasks[-1].start()
        return self.tasks[-1]

    def grant(self, *shards: Shard, number: int = 5) -> None:
        """Name these shards in every lease from now on."""
        self.lease = {"0": [99, []], str(GROUP): [number, [list(shard) for shard in shards]]}

    def next_report(self) -> Told | None:
        """The next report that has arrived."""
        note = self.reports.next(0.05)
        return note[1] if note is not None else None

    def wait_open(self, *shards: Shard) -> Told:
        """Wait for a report that exactly these shards are open."""
        wanted = [list(shard) for shard in shards]

        def is_open() -> Told | None:
            report = self.next_report()
            return report if report is not None and report["open"] == wanted else None

        return until(f"{wanted} are open", is_open, ANSWER_S)

    def receipts(self, shard: Shard) -> int:
        """The end offset of the shard's receipts."""
        journal = ShardJournal(shard, self.access)
        try:
            return journal.receipt_bounds().end
        finally:
            journal.close()

    def run_intake(self, shard: Shard, *in_s: float) -> list[int]:
        """Write requests to Kafka and then to the index, as intake would; returns their due times."""
        index = ShardIndex(shard, pool(self.world.redis.url), grace_s=3600)
        try:
            kept = index.load()
            assert kept is not None
            intake = Intake(formats(self.settings)[shard.topic], index, None)
            start, due = kept.positions.requests, []
            for offset, countdown_s in enumerate(in_s, start):
                body = f"{shard.partition}-{offset}"
                asked = {
                    "topic": self.world.targets[0], "message": body, "countdown": countdown_s,
                }  # fmt: skip
                value = json.dumps(asked).encode()
                written_ms = self._write(value, shard.partition)
                record = Record(offset, written_ms, None, value, [])
                taken = intake.parse_and_store(
                    Batch(offset, offset + 1, [record]), Clock().latest_ms()
                )
                assert taken.first_due_ms is not None
                due.append(taken.first_due_ms)
            return due
        finally:
            index.close()

    def request_position(self, shard: Shard) -> int:
        with closing(Inspector.of(self.world.redis.url)) as inspector:
            found = inspector.positions(shard)
        assert found is not None
        return found.requests

    def write_unread(self, shard: Shard) -> None:
        """Write a request that intake does not read."""
        asked = {"topic": self.world.targets[0], "message": "unread", "countdown": 0}
        self._write(json.dumps(asked).encode(), shard.partition)

    def remove(self, shard: Shard, end: int) -> None:
        """Remove the requests below `end` from Kafka, as retention does."""
        admin = self.access.admin()
        [removed] = admin.delete_records([TopicPartition(*shard, end)]).values()
        removed.result(ANSWER_S)

    def _write(self, value: bytes, partition: int) -> int:
        """Its timestamp in Kafka."""
        written: list[int] = []

        def acknowledged(error: KafkaError | None, message: Message) -> None:
            assert error is None, error
            written.append(message.timestamp()[1])

        self.world.send_raw(value, [], partition, acknowledged)
        self.world.flush()
        return written[0]

    def received(self) -> list[Message]:
        """The messages delivered since this driver started."""
        return self.world.received(self.world.targets[0])[self._before :]

    def wait_received(self, count: int, timeout_s: float = ANSWER_S) -> list[Message]:
        def received() -> list[Message] | None:
            found = self.received()
            return found if len(found) >= count else None

        return until(f"{count} messages", received, timeout_s)

    def _renew(self) -> None:
        while not self._closing.wait(LEASE_S):
            if self.lease is not None:
                with suppress(IndexLost):
                    self._lease_bus.send(lease_of(self.run), self.lease)


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the setup of a Python worker out of the test process; make reports frequent."""
    monkeypatch.setattr(logs, "to_stderr", lambda: None)
    monkeypatch.setattr(interpreter, "tune", lambda: None)
    monkeypatch.setattr(module, "REPORT_S", 0.1)


def prepare(world: World) -> None:
    """The preparations of a driver before it starts Spark."""
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    OwnTopics(access, [world.requests], world.dead_letters).ensure()


@pytest.fixture(scope="module")
def shared(stack: EmbeddedStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One world for all tests here: creating topics takes longer than most of them."""
    with World(stack.kafka, stack.redis, tmp_path_factory.mktemp("world")) as world:
        prepare(world)
        yield world


@pytest.fixture
def driver(shared: World) -> Iterator[Driver]:
    driver = Driver(shared)
    yield driver
    driver.close()


def test_a_task_opens_its_shards_delivers_and_returns_its_metrics(driver: Driver) -> None:
    mine = driver.shards[:2]
    driver.grant(*mine)
    task = driver.start(*mine)
    opened = driver.wait_open(*mine)
    assert (opened["group"], opened["number"]) == (GROUP, 5)
    assert opened["owned"] == [list(shard) for shard in mine]
    assert opened["stuck"] == []
    assert 0 <= opened["at_ms"] - opened["opened_ms"] < ANSWER_S * 1000

    for shard in mine:
        driver.run_intake(shard, 0, 0)
        driver.bus.send("soon", [*shard, 0])
    bodies = sorted(message.value() or b"" for message in driver.wait_received(4))
    assert [body[:2] for body in bodies] == [b"0-", b"0-", b"1-", b"1-"]
    assert len(set(bodies)) == 4
    driver.lease = {}
    report = task.report()

    assert (report["group"], report["number"], report["open"]) == (GROUP, 5, [])
    assert report["opened_ms"] == opened["opened_ms"]
    metrics = Metrics()
    metrics.absorb(Report(*report["metrics"]), Report())
    value = metrics.registry.get_sample_value
    topic = driver.world.requests
    assert value("blackbox_delivered_total", {"topic": topic}) == 4
    assert value("blackbox_lateness_seconds_count") == 4
    assert value("blackbox_recoveries_total", {"shard": str(mine[1])}) == 1
    assert value("blackbox_shard_open", {"shard": str(mine[0])}) is None


def test_reports_contain_the_metrics_of_the_shards(driver: Driver) -> None:
    shard = driver.shards[3]
    driver.grant(shard)
    driver.start(shard)
    driver.wait_open(shard)
    driver.run_intake(shard, 3600, 3600, 3600)
    driver.bus.send("soon", [*shard, 0])

    def pending() -> bool:
        report = driver.next_report()
        gauges = Report(*report["metrics"]).gauges if report is not None else ()
        return ["pending", [str(shard)], 3] in list(map(list, gauges))

    until("a report shows three requests", pending, ANSWER_S)


def test_a_message_that_intake_announces_does_not_wait_for_the_poll(driver: Driver) -> None:
    shard = driver.shards[0]
    driver.grant(shard)
    driver.start(shard)
    driver.wait_open(shard)
    [due_ms] = driver.run_intake(shard, 0.4)
    driver.bus.send("soon", [*shard, due_ms])
    driver.bus.send("soon", [*driver.shards[2], due_ms])  # a shard of another task

    [message] = driver.wait_received(1, timeout_s=30)  # the next poll is a minute after the first
    assert message.timestamp()[1] >= due_ms


@pytest.fixture
def polling(shared: World) -> Iterator[Driver]:
    driver = Driver(shared, poll_interval_ms=50, wake_up=False)
    yield driver
    driver.close()


def test_a_shard_is_opened_past_requests_that_kafka_removed_before_intake_read_them(
    driver: Driver,
) -> None:
    shard = driver.shards[2]
    driver.grant(shard)
    driver.start(shard)
    driver.wait_open(shard)
    position = driver.request_position(shard)
    for _ in range(2):
        driver.write_unread(shard)
    first = position + 2
    driver.remove(shard, first)

    driver.bus.send("removed", [*shard, first, "they are gone"])

    until("it is past them", lambda: driver.request_position(shard) == first, ANSWER_S)
    until("they are counted", lambda: gone_in(driver.next_report()) == 2, ANSWER_S)
    driver.wait_open(shard)
    recoveries = driver.receipts(shard)
    driver.bus.send("removed", [*shard, first, "they are gone"])  # intake may repeat it
    driver.run_intake(shard, 0)
    driver.bus.send("soon", [*shard, 0])
    driver.wait_received(1)
    assert driver.receipts(shard) == recoveries + 2, "the receipt of a delivery and its marker"


def gone_in(report: Told | None) -> float:
    if report is None:
        return 0
    counters = Report(*report["metrics"]).counters
    return sum(value for name, _, value in counters if name == "gone")


def test_a_request_that_is_not_announced_is_found_by_the_poll(polling: Driver) -> None:
    shard = polling.shards[0]
    polling.grant(shard)
    polling.start(shard)
    polling.wait_open(shard)
    polling.run_intake(shard, 0)
    polling.wait_received(1)


def test_the_index_is_polled_once_per_poll_interval(
    polling: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NOTES_AWAITED_S", 60.0)
    looks: list[float] = []
    read: list[float] = []

    def monotonic() -> float:
        read.append(time.monotonic())
        return read[-1]

    # The time by which the task decided to poll: a busy machine may call `poll` later.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(ShardPool, "poll", lambda _: looks.append(read[-1]))
    polling.grant()
    polling.start()
    until("twenty polls", lambda: len(looks) >= 20, ANSWER_S)
    shortest_s = min(later - earlier for earlier, later in pairwise(looks))
    assert shortest_s > 0.0499, "a slightly late poll is followed by a punctual one"


def test_a_task_follows_its_lease_to_other_shards(driver: Driver) -> None:
    one, two, three = driver.shards[:3]
    driver.grant(one, two)
    driver.start(one, two)
    driver.wait_open(one, two)

    driver.grant(two, three)
    report = driver.wait_open(two, three)
    assert report["owned"] == [list(two), list(three)]
    gauges = Report(*report["metrics"]).gauges
    assert str(one) not in {position for _, positions, _ in gauges for position in positions}

    driver.grant()
    report = driver.wait_open()
    assert report["owned"] == []
    driver.run_intake(two, 0)
    driver.grant(two)
    driver.wait_received(1)


def test_a_released_shard_is_not_dispatched(driver: Driver) -> None:
    shard = driver.shards[0]
    driver.grant(shard)
    driver.start(shard)
    driver.wait_open(shard)
    driver.grant()
    driver.wait_open()
    driver.run_intake(shard, 0)
    driver.bus.send("soon", [*shard, 0])
    until("another report", driver.next_report, ANSWER_S)
    assert driver.received() == []

    driver.grant(shard)
    driver.wait_received(1)


@pytest.mark.parametrize(
    "lease",
    [{str(GROUP): [6, []]}, {"0": [9, []]}, {}],
    ids=["a later window", "other groups only", "nothing"],
)
def test_a_task_that_the_lease_no_longer_names_ends_at_once(
    driver: Driver, lease: dict[str, Any]
) -> None:
    shard = driver.shards[0]
    driver.grant(shard)
    task = driver.start(shard)
    driver.wait_open(shard)
    driver.lease = lease
    assert task.report()["open"] == [], "long before its window is over"


def test_a_lease_of_another_window_or_application_changes_nothing(
    driver: Driver,
) -> None:
    shard = driver.shards[0]
    driver.grant(driver.shards[1], number=4)
    task = driver.start(shard)
    driver.wait_open(shard)
    driver.bus.send(lease_of("another"), {})
    driver.bus.send(lease_of(driver.run + "0"), {})
    for _ in range(5):
        report = until("a report", driver.next_report, ANSWER_S)
        assert report["open"] == report["owned"] == [list(shard)]
    assert task.is_alive()


def test_a_window_shorter_than_the_trim_interval_writes_all_its_marks(
    world: World,
) -> None:
    prepare(world)
    driver = Driver(world, trim_interval_s=86_400)
    with closing(driver):
        shards = driver.shards[:2]
        driver.grant(*shards)
        driver.start(*shards, length_s=20.0)
        driver.wait_open(*shards)
        for shard in shards:
            driver.run_intake(shard, 0.0)
            driver.bus.send("soon", [*shard, 0])
        driver.wait_received(2)

        def marked(shard: Shard) -> bool:
            with closing(ShardJournal(shard, driver.access)) as journal:
                found = list(journal.receipts(*journal.receipt_bounds()))
                return any(receipt.mark is not None for _, receipt in found)

        # The walks are 10 s apart: a shard that opened after the first walk is included in the second.
        until("each shard has a mark", lambda: all(map(marked, shards)), 18.0, every_s=0.2)


def test_a_window_ends_when_its_time_is_over(driver: Driver) -> None:
    shard = driver.shards[0]
    driver.grant(shard)
    began = time.monotonic()
    assert driver.start(shard, length_s=1.0).report()["open"] == []
    assert time.monotonic() - began >= 1.0


def test_a_task_ends_without_its_driver(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = driver.shards[0]
    driver.grant(shard)
    task = driver.start(shard)
    driver.wait_open(shard)
    # Only now: on a busy machine, a task may need longer to hear its first lease.
    monkeypatch.setattr(module, "ABANDONED_S", 0.5)
    driver.lease = None
    monkeypatch.setattr(module, "ABANDONED_S", 0.5)
    task.report()


def test_a_task_that_never_receives_a_lease_ends(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ABANDONED_S", 0.3)
    driver.start(driver.shards[0]).report()


def test_no_shard_is_opened_without_a_fresh_lease(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_VALID_S", 0.0)
    shard = driver.shards[0]
    receipts = driver.receipts(shard)
    driver.start(shard)
    for _ in range(2):
        report = until("a report", driver.next_report, ANSWER_S)
        assert (report["owned"], report["open"], report["opened_ms"]) == ([list(shard)], [], None)
    assert driver.receipts(shard) == receipts

    monkeypatch.setattr(module, "LEASE_VALID_S", 3.0)
    driver.grant(shard)
    driver.wait_open(shard)


def test_a_shard_to_be_recovered_stays_closed_until_a_new_lease(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = driver.shards[0]
    driver.grant(shard)
    driver.start(shard)
    driver.wait_open(shard)
    driver.lease = None  # as if the driver were gone, and the shard had another owner
    monkeypatch.setattr(module, "LEASE_VALID_S", 0.0)  # the last lease is outdated

    writer = ShardWriter(shard, driver.access, exactly_once=True)
    writer.open()
    driver.run_intake(shard, 0)
    driver.bus.send("soon", [*shard, 0])
    driver.wait_open()
    writer.begin()
    writer.commit(Receipt(at_ms=1, barrier=True))  # this owner is not fenced
    assert driver.received() == []
    writer.close()

    monkeypatch.setattr(module, "LEASE_VALID_S", 3.0)
    driver.grant(shard)
    driver.wait_open(shard)
    driver.wait_received(1)


@pytest.fixture
def fragile(fragile_world: World) -> Iterator[Driver]:
    prepare(fragile_world)
    driver = Driver(fragile_world, poll_interval_ms=200)
    yield driver
    driver.close()


def test_a_task_outlives_an_outage_of_redis(fragile: Driver, own_redis: EmbeddedRedis) -> None:
    shard = fragile.shards[0]
    fragile.grant(shard)
    task = fragile.start(shard)
    fragile.wait_open(shard)
    fragile.run_intake(shard, 0.8)
    own_redis.kill()
    until("no report arrives", lambda: fragile.next_report() is None, ANSWER_S)
    own_redis.start()
    fragile.wait_received(1)
    fragile.wait_open(shard)
    assert task.is_alive()


def test_a_task_without_redis_ends_with_its_window(
    fragile: Driver, own_redis: EmbeddedRedis
) -> None:
    own_redis.kill()
    task = fragile.start(fragile.shards[0], length_s=0.5)
    report = task.report()
    assert (report["open"], report["opened_ms"]) == ([], None)
    own_redis.start()


def test_a_task_leaves_no_connection_behind(fragile: Driver, own_redis: EmbeddedRedis) -> None:
    with redis.Redis.from_url(own_redis.url) as client:

        def connections() -> int:
            return len(client.client_list())

        fragile.grant(*fragile.shards)
        until("the driver is connected", lambda: connections() == 3, ANSWER_S)
        before = connections()
        task = fragile.start(*fragile.shards)
        fragile.wait_open(*fragile.shards)
        assert connections() > before
        fragile.lease = {}
        task.report()
        until("its connections are gone", lambda: connections() == before, ANSWER_S)


def test_the_description_of_a_window_shows_no_secret() -> None:
    settings = load(kafka_bootstrap_servers="k:1", redis_url="redis://:hunter2@r:1/0")
    window = Window("run", settings, kafka(settings), 0, 1, frozenset(), 1.0)
    assert "hunter2" not in repr(window)
