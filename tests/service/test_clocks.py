"""Clocks that are an hour wrong, one or two of three at a time, and are set while requests are pending.

Each row on a Kafka and a Redis of its own. With BLACKBOX_TEST_AT_LENGTH=1 all rows; `-rP` shows their results.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.chaos.servers import FAKETIME, FrailKafka, FrailRedis, WrongClock
from tests.conftest import missing_tool
from tests.support.world import AT_LENGTH, ForkedService, World, until

pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]

HOUR_S = 3600
COUNT = 100
FAR = 4
LAST_S = 5.0
METRICS = ("redis_clock_skew", "kafka_clock_ahead", "kafka_clock_behind")

WRONG = [by for by in product((-1, 0, 1), repeat=3) if 1 <= sum(map(abs, by)) <= 2]
"""By how many hours the clocks of the host, of Redis and of Kafka are ahead."""

ROWS = WRONG if AT_LENGTH else [(1, 1, 0), pytest.param((0, 0, -1), marks=pytest.mark.proof)]


class Seen:
    """Requests, and when their messages could be read, by a correct clock."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.due_s: dict[str, float] = {}
        self.came_s: dict[str, list[float]] = {}
        self._known = 0

    def ask(self, name: str, count: int, within_s: float, from_s: float = 1.0) -> None:
        for number in range(count):
            body, countdown_s = f"{name}-{number}", from_s + within_s * number / count
            self.due_s[body] = time.monotonic() + countdown_s
            request = {"topic": self._world.targets[0], "message": body, "countdown": countdown_s}
            self._world.send_raw(json.dumps(request))
        self._world.flush()

    def look(self) -> None:
        found = self._world.received()
        now_s = time.monotonic()
        for message in found[self._known :]:
            if message.topic() != self._world.targets[0]:
                continue
            self.came_s.setdefault((message.value() or b"").decode(), []).append(now_s)
        self._known = len(found)

    def time_s(self) -> float:
        self.look()
        return time.monotonic()

    def has_come(self, name: str) -> bool:
        self.look()
        return all(body in self.came_s for body in self.due_s if body.startswith(name))

    def early_s(self) -> list[float]:
        early = (self.due_s[body] - came[0] for body, came in self.came_s.items())
        return [by_s for by_s in early if by_s > 0.001]  # due times are whole milliseconds


def kafka_ahead_s(world: World) -> float:
    """How far Kafka's timestamps are ahead of a correct clock."""
    stamped_ms: list[int] = []
    producer = Producer({"bootstrap.servers": world.kafka.bootstrap_servers})
    producer.produce(
        world.targets[1], b"", on_delivery=lambda _, m: stamped_ms.append(m.timestamp()[1])
    )
    assert producer.flush(10) == 0
    return stamped_ms[0] / 1000 - time.time()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clocks")


@pytest.fixture
def clocks(folder: Path) -> list[WrongClock]:
    return [WrongClock(folder / name) for name in ("host", "redis", "kafka")]


@pytest.fixture
def own_world(folder: Path, clocks: list[WrongClock], by: tuple[int, int, int]) -> Iterator[World]:
    """Its servers start with wrong clocks."""
    if not FAKETIME:
        missing_tool("libfaketime is not installed; on Debian: apt-get install faketime")
    for clock, hours in zip(clocks, by, strict=True):
        clock.set_wrong_by(hours * HOUR_S)
    with ExitStack() as ending:
        kafka, redis = FrailKafka(folder / "k", clocks[2]), FrailRedis(folder / "r", clocks[1])
        for server in (kafka, redis):
            server.start()
            ending.callback(server.stop)
        yield ending.enter_context(World(kafka, redis, folder))


@pytest.mark.parametrize("by", ROWS, ids=lambda by: "host{:+d}-redis{:+d}-kafka{:+d}".format(*by))
def test_wrong_clocks_make_no_message_early(
    own_world: World, clocks: list[WrongClock], by: tuple[int, int, int]
) -> None:
    """Clocks are corrected while requests wait, except a slow Kafka clock: its earlier timestamps would seem early."""
    world, kafka_by = own_world, by[2]
    log = world.folder / "service.log"
    service = ForkedService(world.environment(), log, before=[clocks[0].install])
    world.services.append(service)
    service.wait_ready()
    seen = Seen(world)
    seen.ask("far", FAR, 0.0, HOUR_S / 2)
    seen.ask("first", COUNT, LAST_S)
    last_s = time.monotonic() + LAST_S

    def alarm_s() -> float:
        seen.look()
        return max(abs(service.metric(f"blackbox_{name}_seconds")) for name in METRICS)

    until("a metric shows it", lambda: alarm_s() > HOUR_S - 60)
    until("all of them would be due", lambda: seen.time_s() > last_s)
    for clock in clocks if kafka_by >= 0 else clocks[:2]:
        clock.set_wrong_by(0)
    if kafka_by > 0:
        until("Kafka's clock is right", lambda: kafka_ahead_s(world) < 60)
    seen.ask("second", COUNT, LAST_S)
    until("the later requests are delivered", lambda: seen.has_come("second"))
    if kafka_by <= 0:
        until("the first are also delivered", lambda: seen.has_come("first"))

    late_s = [came[0] - seen.due_s[body] for body, came in seen.came_s.items()]
    print(f"| {by} | {len(seen.due_s)} | {len(late_s)} | {max(late_s):.2f} s |")
    assert seen.early_s() == []
    assert [body for body, came in seen.came_s.items() if len(came) > 1] == []
    pending = sum(body not in seen.came_s for body in seen.due_s)
    until("the rest is pending", lambda: service.metric("blackbox_pending") == pending)


@pytest.mark.proof
@pytest.mark.parametrize("by", [(0, 0, 0)])
def test_a_kafka_clock_that_is_set_back_makes_no_message_early(
    own_world: World, clocks: list[WrongClock], by: tuple[int, int, int]
) -> None:
    """No process knows of it until a receipt is timestamped."""
    service = own_world.start_service()
    service.wait_ready()
    seen = Seen(own_world)
    seen.ask("first", COUNT, LAST_S)
    until("the first are delivered", lambda: seen.has_come("first"))
    clocks[2].set_wrong_by(-HOUR_S)
    until("Kafka's clock is wrong", lambda: kafka_ahead_s(own_world) < 60 - HOUR_S)
    seen.ask("second", COUNT, LAST_S, 3.0)
    until("the second are delivered", lambda: seen.has_come("second"))

    assert seen.early_s() == []
    assert [body for body, came in seen.came_s.items() if len(came) > 1] == []
    assert "possibly because it was set back" in service.log.read_text()
    assert "recovering" not in service.log.read_text()
