"""The journals keep pending requests, not old ones: they are trimmed, and a lost Redis is rebuilt from the rest."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import redis
from confluent_kafka import KafkaError, Message, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)

from blackbox.embedded import EmbeddedKafka, EmbeddedRedis
from blackbox.journal.topics import receipts_topic
from blackbox.records.cancel import HEADER as CANCELS
from blackbox.records.cancel import REPLACES
from blackbox.records.request import Shard, request_id
from tests.support.world import AT_LENGTH, World, both_engines_at_length, until

pytestmark = [pytest.mark.service, pytest.mark.fault, pytest.mark.timeout(1500)]


@dataclass(frozen=True)
class Sizes:
    """How long requests wait, how long records are kept, and the faults, `apart_s` seconds apart."""

    longest_s: float
    retention_s: int
    trim_interval_s: int
    renew_after_s: int
    horizon_s: int
    flushes: int
    kills: int
    apart_s: float
    pause_s: float


SIZES = (
    Sizes(300, 30, 5, 20, 20, flushes=3, kills=5, apart_s=30, pause_s=1)
    if AT_LENGTH
    else Sizes(20, 4, 2, 6, 8, flushes=2, kills=1, apart_s=8, pause_s=0.2)
)
AT_ONCE = 100

IN_TIME_S = 8.0
"""A cancel that is read this long before the due time is in time, whatever has to be recovered."""


@dataclass
class Asked:
    """A request as its caller knows it; it was cancelled or replaced `ended_s` before its due time."""

    number: int
    caller_id: str
    countdown_s: float
    place: tuple[int, int] = (-1, -1)
    at_ms: int = 0
    ended_in_time: bool = False
    ended: bool = False

    @property
    def due_ms(self) -> int:
        return self.at_ms + int(1000 * self.countdown_s)


@dataclass
class Books:
    """The records of callers: requests, one in twenty of which is cancelled or replaced in one of four ways."""

    world: World
    longest_s: float
    dice: random.Random = field(default_factory=lambda: random.Random(7))
    asked: list[Asked] = field(default_factory=list)
    new_from: int = 0

    def write(self, count: int) -> None:
        self.new_from = len(self.asked)
        for _ in range(count):
            self._ask(self.dice.uniform(0, self.longest_s))
        self.world.flush()
        waiting = [one for one in self.asked[-20 * count :] if not one.ended]
        for one in self.dice.sample(waiting, min(len(waiting), max(1, count // 20))):
            self._end(one)
        self.world.flush()

    def _ask(
        self, countdown_s: float, caller_id: str = "", headers: tuple[tuple[str, str], ...] = (),
        partition: int | None = None,
    ) -> None:  # fmt: skip
        one = Asked(len(self.asked), caller_id or f"c{len(self.asked)}", countdown_s)
        self.asked.append(one)

        def acknowledged(error: KafkaError | None, message: Message) -> None:
            assert error is None, error
            one.place = message.partition() or 0, message.offset() or 0
            one.at_ms = message.timestamp()[1]

        request = {
            "topic": self.world.targets[0], "message": f"{one.number:07d}", "countdown": countdown_s,
            "id": one.caller_id,
        }  # fmt: skip
        self.world.send_raw(
            json.dumps(request), [("CALLER_SERVICE", b"tests"), *headers], partition, acknowledged,
            key=one.caller_id.encode(),
        )  # fmt: skip

    def _end(self, one: Asked) -> None:
        one.ended = True
        left_s = (one.due_ms - time.time_ns() // 1_000_000) / 1000
        one.ended_in_time = left_s > IN_TIME_S
        if not one.ended_in_time:
            return  # a race with two valid results
        partition, offset = one.place
        id = request_id(Shard(self.world.requests, partition), offset)
        how = self.dice.choice(["cancel", "replace", "cancel by id", "replace by id"])
        if one.number < self.new_from:  # it may have been carried to another record since
            how = how.removesuffix(" by id")
        if how == "cancel":
            value = json.dumps({"id": one.caller_id, "cancel": True})
            self.world.send_raw(value, partition=partition, key=one.caller_id.encode())
        elif how == "cancel by id":
            self.world.send_raw(None, [(CANCELS, id)], partition)
        elif how == "replace":
            self._ask(self.dice.uniform(5, SIZES.longest_s), one.caller_id, partition=partition)
        else:
            self._ask(
                self.dice.uniform(5, SIZES.longest_s),
                partition=partition,
                headers=((REPLACES, id),),
            )


def delivered(world: World) -> dict[int, list[int]]:
    """When each message was delivered, epoch ms."""
    found: dict[int, list[int]] = {}
    for message in world.received(world.targets[0]):
        found.setdefault(int(message.value() or b""), []).append(message.timestamp()[1])
    return found


def starts(world: World, topic: str) -> dict[int, int]:
    """The first offset that each partition keeps."""
    return offsets(world, topic, OffsetSpec.earliest())  # type: ignore[no-untyped-call]


def ends(world: World, topic: str) -> dict[int, int]:
    """The offset of the next record of each partition."""
    return offsets(world, topic, OffsetSpec.latest())  # type: ignore[no-untyped-call]


def offsets(world: World, topic: str, spec: OffsetSpec) -> dict[int, int]:
    admin = AdminClient({"bootstrap.servers": world.kafka.bootstrap_servers})
    places = {TopicPartition(topic, p): spec for p in range(world.partitions)}
    return {at.partition: asked.result().offset for at, asked in admin.list_offsets(places).items()}


def keep(world: World, topic: str, **settings: object) -> None:
    """Configure a topic by hand: `retention_ms=-1`."""
    admin = AdminClient({"bootstrap.servers": world.kafka.bootstrap_servers})
    entries = [
        ConfigEntry(name.replace("_", "."), str(value), incremental_operation=AlterConfigOpType.SET)
        for name, value in settings.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    for answer in admin.incremental_alter_configs([resource]).values():
        answer.result()


@pytest.fixture
def forgetful_kafka(tmp_path: Path) -> Iterator[EmbeddedKafka]:
    """A service that trims every few seconds."""
    kafka = EmbeddedKafka(
        tmp_path / "kafka",
        settings={"log.retention.check.interval.ms": "2000", "log.segment.delete.delay.ms": "0"},
    )
    kafka.start()
    yield kafka
    kafka.stop()


@pytest.mark.proof
@both_engines_at_length
def test_trimmed_journals_rebuild_all_pending_requests(
    fragile_world: World,
) -> None:
    keep(fragile_world, fragile_world.requests, retention_ms=-1)
    nothing_is_lost(fragile_world, 0)


@pytest.mark.proof
@both_engines_at_length
def test_trimmed_journals_rebuild_all_requests_while_cold_ones_are_renewed(
    fragile_world: World,
) -> None:
    keep(fragile_world, fragile_world.requests, retention_ms=-1)
    nothing_is_lost(fragile_world, SIZES.horizon_s)


@both_engines_at_length
@pytest.mark.at_length
def test_journals_with_a_retention_rebuild_all_requests_that_are_renewed(
    forgetful_kafka: EmbeddedKafka, own_redis: EmbeddedRedis, tmp_path: Path, engine: str
) -> None:
    with World(forgetful_kafka, own_redis, tmp_path, engine) as world:
        # Killed or emptied servers are back, and promotion has run, well before Kafka removes anything.
        longest_s, kept_ms = (300, 60_000) if AT_LENGTH else (32, 26_000)
        keep(world, world.requests, retention_ms=kept_ms, segment_ms=kept_ms // 6)
        nothing_is_lost(world, SIZES.horizon_s, longest_s)


def nothing_is_lost(world: World, horizon_s: int, longest_s: float = SIZES.longest_s) -> None:
    """Write requests, cancels and replacements while Redis is emptied and the service is killed."""
    settings: dict[str, Any] = {
        "retention_s": SIZES.retention_s, "trim_interval_s": SIZES.trim_interval_s,
        "renew_after_s": SIZES.renew_after_s, "hot_horizon_s": horizon_s, "max_countdown_s": 3600,
    }  # fmt: skip
    service = world.start_service(**settings).wait_ready()
    client = redis.Redis.from_url(world.redis.url)
    books = Books(world, longest_s)
    faults = ["flush"] * SIZES.flushes + ["kill"] * SIZES.kills
    random.Random(3).shuffle(faults)
    pace = Event()
    for fault in faults:
        began = time.monotonic()
        while time.monotonic() - began < SIZES.apart_s:
            books.write(AT_ONCE)
            pace.wait(SIZES.pause_s)
        if fault == "flush":
            client.flushall()
        else:
            service.kill()
            service = world.start_service(**settings).wait_ready()

    def has_come() -> bool:
        return delivered(world).keys() >= {one.number for one in books.asked if not one.ended}

    with suppress(AssertionError):
        until("everything is delivered", has_come, longest_s + 60, every_s=1)
    found = delivered(world)
    lost = [one for one in books.asked if not one.ended and one.number not in found]
    twice = {number: at_ms for number, at_ms in found.items() if len(at_ms) > 1}
    early = [one for one in books.asked if any(at < one.due_ms for at in found.get(one.number, ()))]
    in_spite = [one for one in books.asked if one.ended_in_time and one.number in found]
    letters = Counter(
        dict(m.headers() or [])["blackbox-reason"] for m in world.received(world.dead_letters)
    )
    print(
        f"asked {len(books.asked)}, delivered {len(found)}, ended in time "
        f"{sum(one.ended_in_time for one in books.asked)}; lost {len(lost)}, twice {len(twice)}, "
        f"early {len(early)}, delivered though ended {len(in_spite)}; dead letters {letters}; "
        f"starts {starts(world, world.requests)} {starts(world, receipts_topic(world.requests))}"
    )
    if lost or twice:
        for log in sorted(world.folder.glob("service-*.log")):
            print(log.read_text())
    assert (lost[:5], dict(list(twice.items())[:5]), early[:5], in_spite[:5]) == ([], {}, [], [])
    assert all(start > 0 for start in starts(world, world.requests).values())
