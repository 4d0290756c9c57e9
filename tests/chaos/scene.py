"""One schedule during its run: its world, its requests, and their outcomes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT
from threading import Barrier, Event, Thread
from types import TracebackType
from urllib.parse import urlsplit

from confluent_kafka import KafkaError, KafkaException, Message
from confluent_kafka.admin import AdminClient

from blackbox.embedded import EmbeddedKafka, EmbeddedRedis
from blackbox.index.inspector import Inspector
from blackbox.journal.topics import receipts_topic, topic_ids
from blackbox.records.errors import IndexLost
from blackbox.records.receipt import Receipt, decode, without_void
from blackbox.records.request import Shard
from tests.chaos import crash_points
from tests.chaos.books import Account, Asked, account, read_journal
from tests.chaos.crash_points import CRASHED, Crash
from tests.chaos.proxy import Proxy, RedisWire
from tests.chaos.schedule import Ask, Schedule, Setup
from tests.chaos.servers import Servers, WrongClock
from tests.servers.redis_cluster import ClusterServers
from tests.servers.sentinel import SentinelServers
from tests.support.world import ForkedService, ServiceProcess, World, each_of, until

WITHIN_S = 2.0
MOST_WAVES = 10
SETTLE_S = 60.0
SPARK_SETTLE_S = 180.0
LOOK_S = 0.1
SHOWN_S = 45.0
"""After this time, the markers of a committed transaction are on all brokers, and an abandoned transaction is aborted."""

TRIMMED = "removed the records below"

UNFINISHED = re.compile(
    r"(?:; recovering|: still busy; the next owner will fence it)$", re.MULTILINE
)
"""The log message of a service that closes a shard during its work."""


class Scene:
    """The environment of a fault. `dice` are only for the fault. `at` waits by the schedule's own clock.

    `ahead_s` is the number of seconds by which all its clocks are ahead.
    """

    def __init__(
        self,
        schedule: Schedule,
        setup: Setup,
        servers: Servers,
        lane: int,
        folder: Path,
        *,
        kafka: EmbeddedKafka,
        redis: EmbeddedRedis,
        redis_servers: SentinelServers | ClusterServers | None = None,
        engine: str = "process",
        company: Barrier | None = None,
    ) -> None:
        self.dice = schedule.dice("fault")
        self.setup = setup
        self.folder = folder
        self.kafka, self.redis = kafka, redis
        self.redis_servers = redis_servers
        self.world = World(kafka, redis, folder, engine, self.setup.partitions)
        self.world.kept = {"retention.ms": "-1"}  # so that blackbox trims it
        self.settings: dict[str, object] = {
            "delivery": self.setup.delivery,
            "batch_limit": self.setup.batch_limit,
            "poll_interval_ms": self.setup.poll_interval_ms,
            "hot_horizon_s": self.setup.hot_horizon_s,
            "retention_s": self.setup.retention_s,
            "renew_after_s": self.setup.renew_after_s,
            "trim_interval_s": 1,
            "retries": 1,
        }
        if redis_servers is not None:
            self.settings["redis_url"] = redis_servers.url
        self.missing_topic = f"{self.world.name}.missing"
        self.doomed_topic = f"{self.world.name}.doomed"
        self.is_doomed_asked = False
        self.unreadable: list[tuple[int, int]] = []
        self.stays_pending = 0
        self.ahead_s = 0
        self._kafka_away_ms = 0
        self._settle_s = SETTLE_S if engine == "process" else SPARK_SETTLE_S
        self._schedule = schedule
        self._servers = servers
        self._lane = lane
        self._company = company or Barrier(1)
        self._ended: set[ServiceProcess] = set()
        self._proxies: list[Proxy] = []
        self._asking: list[Thread] = []
        self._refused: list[str] = []
        self._written: list[tuple[int, Message]] = []
        self._incarnation = 0
        self._began = time.monotonic()

    def __enter__(self) -> Scene:
        self.world.__enter__()
        self._inspector = Inspector.of((self.redis_servers or self.redis).url)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._company.abort()
        self.world.__exit__(kind, error, trace)
        for proxy in self._proxies:
            proxy.close()
        self._inspector.close()

    # services

    def start(
        self, *, crash: Crash | None = None, clock: WrongClock | None = None
    ) -> ServiceProcess:
        """Start a service, without waiting for it."""
        log = self.folder / f"service-{len(self.world.services)}.log"
        environment = self.world.environment(**self.settings)
        service: ServiceProcess
        if self.world.engine == "process":
            before: list[Callable[[], None]] = []
            if crash is not None:
                before.append(partial(crash_points.install, crash))
            if clock is not None:
                before.append(clock.install)
            service = ForkedService(environment, log, before=before)
        else:
            service = ServiceProcess(environment, log)
        self.world.services.append(service)
        return service

    def wait_ready(self, service: ServiceProcess) -> None:
        """Wait until all its shards are open, or until it has crashed as planned."""

        def is_ready() -> bool:
            return service.process.poll() is not None or service.get("/readyz")[0] == 200

        until(f"{service.log} is ready", is_ready, self._settle_s, every_s=LOOK_S)

    def running(self) -> list[ServiceProcess]:
        """The services that the schedule started and did not end."""
        return [service for service in self.world.services if service not in self._ended]

    def kill(self, service: ServiceProcess) -> None:
        self._ended.add(service)
        service.kill()

    def stop(self, service: ServiceProcess) -> None:
        """Send SIGTERM after the service has installed its handler. It must end without an error and in time."""
        self._ended.add(service)
        until("it has started", lambda: "health and metrics" in service.log.read_text())
        code = service.stop(timeout_s=15)
        assert code == 0, f"{service.log} ended with {code}"

    def ask_until_crashed(self, service: ServiceProcess, within_s: float = WITHIN_S) -> None:
        """Send waves of requests until the service has ended after the planned step."""
        self._ended.add(service)
        self._ask_until(service.log, lambda: service.process.poll() is not None, within_s)
        assert service.process.poll() == CRASHED, service.log.read_text()[-2000:]

    def ask_until_lost(self, way: Proxy) -> None:
        """Send waves of requests until the proxy has lost the planned request or reply."""
        self._ask_until("something is lost", way.lost.is_set)

    def _ask_until(
        self, what: object, is_so: Callable[[], bool], within_s: float = WITHIN_S
    ) -> None:
        for _ in range(MOST_WAVES):
            self.ask(within_s)
            with suppress(AssertionError):
                until(str(what), is_so, 2 * within_s)
                return
        raise AssertionError(f"not within {MOST_WAVES} waves of requests: {what}")

    def wait_logged(self, text: str) -> None:
        """Wait until a running service logs this."""

        def is_said() -> bool:
            return any(text in service.log.read_text() for service in self.running())

        until(f"a service logs {text!r}", is_said, every_s=LOOK_S)

    def trims(self) -> int:
        """The number of trims of a journal until now."""
        return sum(service.log.read_text().count(TRIMMED) for service in self.world.services)

    def wait_trimmed(self, before: int = 0) -> None:
        """Wait until a journal is trimmed again. After a trim there is nothing to trim, so this may
        send more waves of requests.
        """

        def is_trimmed() -> bool:
            return self.trims() > before

        with suppress(AssertionError):
            until("a journal is trimmed", is_trimmed, 2 * WITHIN_S, every_s=LOOK_S)
            return
        self._ask_until("a journal is trimmed", is_trimmed)

    # requests

    def ask(self, within_s: float = WITHIN_S) -> None:
        """Start to send a wave of requests. The schedule's clock starts with it."""
        topics = [topic for topic in self.world.targets for _ in range(8)]
        if self._schedule.dice("topics").random() < 0.2:
            topics.append(self.missing_topic)
        if self.is_doomed_asked:
            topics += [self.doomed_topic] * 8
        asks = self._schedule.asks(self.setup, len(self._asking), within_s, topics)
        self._began = time.monotonic()
        sending = Thread(target=self._send, args=(asks, self._began), daemon=True)
        self._asking.append(sending)
        sending.start()

    def ask_this(self, value: str, partition: int = 0) -> None:
        """Send one more record, now."""
        self._send_one(Ask(0, partition, value))

    def _send(self, asks: list[Ask], began: float) -> None:
        for ask in asks:
            _wait(began + ask.at_s - time.monotonic())
            self._send_one(ask)
        self.world.flush()

    def _send_one(self, ask: Ask) -> None:
        def acknowledged(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._refused.append(f"{error}: {ask.value}")
            self._written.append((self._incarnation, message))

        headers = [("CALLER_SERVICE", b"chaos")]
        self.world.send_raw(ask.value, headers, ask.partition, acknowledged)

    def wait_taken_in(self) -> None:
        """Wait until all requests so far are in the index."""
        for sending in self._asking:
            sending.join()
        self.world.flush()
        ends = self._journal_ends()
        until(
            "everything is stored",
            lambda: self._pending(ends) is not None,
            SETTLE_S,
            every_s=LOOK_S,
        )

    # recreated topics and changed groups

    def delete(self, topic: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap_servers})
        [deleted] = admin.delete_topics([topic]).values()
        deleted.result()

    def create_requests_again(self) -> None:
        """Create the request topic again. Later requests are in the new topic."""
        before = self._request_topic_id()
        self.delete(self.world.requests)
        self._incarnation += 1

        def is_made() -> bool:
            with suppress(KafkaException):  # the deletion of the old topic takes a while
                self.world.create(self.world.request_topic())
                return True
            return False

        until("the topic exists again", is_made, every_s=LOOK_S)
        # A broker that does not know the new topic yet acknowledges writes to the old topic.
        until("the broker has the new one", lambda: self._request_topic_id() not in (None, before))
        until(
            "it can be written to",
            lambda: self.world.writable_partitions() == self.world.partitions,
        )

    def _request_topic_id(self) -> str | None:
        """The id that the broker reports, or None if the broker has no such topic."""
        admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap_servers})
        with suppress(KafkaException):
            return topic_ids(admin, [self.world.requests])[self.world.requests]
        return None

    def rebind(self, *, killed_after_s: float | None = None) -> None:
        """Run `blackbox rebind` as an operator does, and again if it was interrupted."""
        command = [sys.executable, "-m", "blackbox", "rebind", self.world.requests]
        run = subprocess.Popen(
            [*command, "--pending", "deliver"], text=True, stdout=PIPE, stderr=STDOUT,
            env=os.environ | self.world.environment(**self.settings),
        )  # fmt: skip
        with suppress(subprocess.TimeoutExpired):
            printed, _ = run.communicate(timeout=killed_after_s)
            assert run.returncode == 0, printed
            return
        run.kill()
        run.communicate()
        self.rebind()

    # the schedule's moments

    def at(self, second: float) -> None:
        """Wait until this moment of the schedule."""
        _wait(self._began + second - time.monotonic())

    def within(self, first: float, last: float) -> None:
        """Wait for a moment of the schedule that the dice choose."""
        self.at(self.dice.uniform(first, last))

    def last(self, shortest_s: float, longest_s: float) -> None:
        """Let the fault last for a while."""
        _wait(self.dice.uniform(shortest_s, longest_s))

    def together(self, does: Callable[[], object]) -> None:
        """Run once for all schedules that share a server, after all of them have reached this point."""
        if self._company.wait(SETTLE_S) == 0:
            try:
                does()
            except BaseException:
                self._company.abort()
                raise
        self._company.wait(SETTLE_S)

    @contextmanager
    def without_kafka(self) -> Iterator[None]:
        """To be used around what takes Kafka away and brings it back."""
        began = time.monotonic()
        yield
        self._kafka_away_ms += round((time.monotonic() - began) * 1000)

    # ways to the servers

    def way_to_redis(self) -> Proxy:
        """A proxy to Redis for services that start from now on."""
        proxy = Proxy(self._servers.proxies, urlsplit(self.redis.url).port or 0, RedisWire)
        self._proxies.append(proxy)
        self.settings["redis_url"] = f"redis://{proxy.address}/0"
        return proxy

    def way_to_kafka(self) -> Proxy:
        """A proxy to Kafka for services that start from now on."""
        proxy = self._servers.ways[self._lane]
        proxy.mend()
        self.settings["kafka_bootstrap_servers"] = proxy.address
        return proxy

    # the end

    def settle(self) -> bool:
        """Wait until every request is stored and nothing is pending. False if that takes too long."""
        for sending in self._asking:
            sending.join()
        self.world.flush()
        assert not self._refused, self._refused[:3]
        ends = self._journal_ends()
        try:
            until("nothing is due", lambda: self._is_settled(ends), self._settle_s, every_s=LOOK_S)
        except AssertionError:
            return False
        return True

    def _journal_ends(self) -> dict[Shard, int]:
        """The offset after the last record of each partition, without transaction markers."""
        topic = self.world.requests
        ends = {Shard(topic, number): 0 for number in range(self.world.partitions)}
        for incarnation, written in self._written:
            if incarnation != self._incarnation:
                continue
            partition, offset = _place(written)
            ends[Shard(topic, partition)] = max(ends[Shard(topic, partition)], offset + 1)
        # A usual consumer cannot read what is unreadable, or believes the offsets that it claims.
        others = () if self.unreadable else each_of(self.kafka.bootstrap_servers, topic)
        for partition, offset in [*map(_place, others), *self.unreadable]:
            ends[Shard(topic, partition)] = max(ends[Shard(topic, partition)], offset + 1)
        return ends

    def _is_settled(self, ends: dict[Shard, int]) -> bool:
        pending = self._pending(ends)
        return pending is not None and pending <= self.stays_pending

    def _pending(self, ends: dict[Shard, int]) -> int | None:
        """The number of pending requests, or None while some partitions are not read up to these ends."""
        pending = 0
        for shard, end in ends.items():
            try:
                standing = self._inspector.shard_stats(shard, 0)
            except IndexLost:
                return None
            if standing.positions is None or standing.positions.requests < end:
                return None
            pending += standing.pending + standing.cold
        return pending

    def account(self) -> Account:
        """Compare all requests with the messages that a consumer reads.

        Reads again while messages are missing. A commit is valid before its markers are on every broker.
        A read_committed consumer stops at a broker that was down and does not have them.
        """
        books = self._account()
        missing = len(books.lost)
        deadline = time.monotonic() + SHOWN_S
        while books.lost and time.monotonic() < deadline:
            _wait(LOOK_S)
            books = self._account()
        books.shown_later = missing - len(books.lost)
        return books

    def _account(self) -> Account:
        world, servers = self.world, self.kafka.bootstrap_servers
        read = [*world.targets, world.dead_letters]
        found: dict[str | None, list[Message]] = {topic: [] for topic in read}
        for message in each_of(servers, *read):
            found[message.topic()].append(message)
        written = sorted(self._written, key=_time_and_place)
        unreadable = [
            Asked(f"{world.requests}/{p}@{o}", (p, o), "", None) for p, o in self.unreadable
        ]
        return account(
            [*read_journal([message for _, message in written]), *unreadable],
            [message for target in world.targets for message in found[target]],
            found[world.dead_letters],
            now_ms=time.time_ns() // 1_000_000 + self.ahead_s * 1000,
            doomed=frozenset({self.missing_topic, self.doomed_topic}),
            went_down=self._went_down() if self.is_doomed_asked else (),
            away_ms=self._kafka_away_ms,
        )

    def _went_down(self) -> list[tuple[int, int]]:
        """The requests whose messages were delivered to the doomed topic. Only the receipts show them."""
        return [
            (partition, offset)
            for partition, found in self._receipts().items()
            for _, receipt in without_void(found)
            for at, places in receipt.delivered.items()
            if at.startswith(self.doomed_topic)
            for offset, _ in places
        ]

    def torn(self) -> int:
        """The number of torn transactions that recovery found."""
        found = self._receipts().values()
        return sum(bool(receipt.void) for partition in found for _, receipt in partition)

    def _receipts(self) -> dict[int, list[tuple[int, Receipt]]]:
        """The receipts of each partition with their offsets, as a read_committed consumer reads them."""
        receipts: dict[int, list[tuple[int, Receipt]]] = {}
        topic = receipts_topic(self.world.requests)
        for message in each_of(self.kafka.bootstrap_servers, topic):
            partition, offset = _place(message)
            receipts.setdefault(partition, []).append((offset, decode(message.value())))
        return receipts

    def complaints(self, books: Account, *, may_revive: bool) -> list[str]:
        """Violations of guarantees. At-least-once may repeat a batch each time an owner ends."""
        services = self.world.services
        logs = [service.log.read_text() for service in services]
        given_up = sum(len(UNFINISHED.findall(log)) for log in logs)
        # A worker of Spark owns some of the shards, and ends without its service.
        owners = len(services) - 1 + sum(log.count("WindowLost") for log in logs)
        ends = given_up + owners * self.world.partitions
        repeated = ends * self.setup.batch_limit
        may_repeat = repeated if self.setup.delivery == "at-least-once" else 0
        found = books.complaints(may_repeat=may_repeat, may_revive=may_revive)
        for service in self.running():
            if (code := service.process.poll()) is not None:
                found.append(f"{service.log.name} ended by itself with {code}")
        return found

    def delete_topics(self) -> None:
        """Delete the topics, because a broker serves hundreds of schedules."""
        world = self.world
        ours = [world.requests, receipts_topic(world.requests), world.dead_letters, *world.targets]
        admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap_servers})
        for future in admin.delete_topics(ours).values():
            with suppress(Exception):
                future.result()


def _time_and_place(written: tuple[int, Message]) -> tuple[int, tuple[int, int]]:
    incarnation, message = written
    return incarnation, _place(message)


def _place(message: Message) -> tuple[int, int]:
    partition, offset = message.partition(), message.offset()
    assert partition is not None
    assert offset is not None
    return partition, offset


def _wait(seconds: float) -> None:
    if seconds > 0:
        Event().wait(seconds)
