"""The format `scheduler` on real servers, with a client that knows only its record contract."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import redis
from confluent_kafka import Message
from confluent_kafka.admin import (
    NewTopic,
)

from tests.service.test_undeliverable import reasons
from tests.support.world import World, both_engines_at_length, read_all, until

pytestmark = pytest.mark.service

Headers = list[tuple[str, str | bytes | None]]

COMPACTED = {
    "cleanup.policy": "compact",
    "retention.ms": "-1",
    "min.cleanable.dirty.ratio": "0.01",
    "segment.ms": "500",
    "delete.retention.ms": "500",
    "max.compaction.lag.ms": "1000",
}


@pytest.fixture
def schedules(world: World) -> World:
    world.format_name = "scheduler"
    return world


@pytest.fixture
def compacted(schedules: World) -> World:
    schedules.requests = f"{schedules.name}.schedules"
    schedules.create(NewTopic(schedules.requests, schedules.partitions, config=COMPACTED))
    return schedules


def forget(world: World) -> None:
    """As if Redis had lost this world."""
    client = redis.Redis.from_url(world.redis.url)
    client.delete(*client.scan_iter(f"blackbox:{{{world.requests}-*"))
    client.close()


def start(world: World, **grace: Any) -> None:
    world.start_service(history_topic=history(world), **grace).wait_ready()


def history(world: World) -> str:
    return f"{world.name}.history"


def schedule(
    world: World, key: str | bytes | None, value: bytes | None, epoch: object, *more: str, **named: str
) -> None:  # fmt: skip
    """Schedule `value` for the first target with the key `target-key`; `more` headers are delivered unchanged."""
    terms: Headers = [
        ("scheduler-epoch", str(epoch)),
        ("scheduler-target-topic", named.get("to", world.targets[0])),
        ("scheduler-target-key", "target-key"),
        *((name, "passes") for name in more),
    ]
    world.send_raw(value, terms, key=key.encode() if isinstance(key, str) else key)


def cancel(world: World, key: str) -> None:
    world.send_raw(None, key=key.encode())


def in_s(seconds: float) -> int:
    """The first unix second that is at least this far away."""
    return int(time.time() + seconds) + 1


def came(world: World, topic: str, count: int) -> list[Message]:
    def found() -> list[Message]:
        records = read_all(world.kafka.bootstrap_servers, topic)
        return records if len(records) >= count else []

    return until(f"{count} on {topic}", found)


def tombstones(world: World) -> list[Message]:
    """The tombstones of blackbox, which have its headers."""
    return [
        record
        for record in read_all(world.kafka.bootstrap_servers, world.requests)
        if record.value() is None and record.headers()
    ]


def headers(record: Message) -> list[tuple[str, bytes | None]]:
    found: Any = record.headers()
    return list(found or [])


def keys(records: Sequence[Message]) -> Counter[str]:
    return Counter((record.key() or b"").decode() for record in records)


def values(records: Sequence[Message]) -> Counter[bytes | None]:
    return Counter(record.value() for record in records)


@both_engines_at_length
def test_a_schedule_is_delivered_recorded_and_ended_in_its_own_partition(schedules: World) -> None:
    start(schedules)
    at_s = in_s(2)
    given: Headers = [
        ("trace", b"\xff"),
        ("scheduler-epoch", str(at_s)),
        ("scheduler-target-topic", schedules.targets[0]),
        ("scheduler-target-key", b"\x00vid1"),
        ("scheduler-epoch", "0"),
        ("empty", None),
    ]
    schedules.send_raw(b"\x00video 1", given, 2, key="vid1-öffnen".encode())
    schedules.flush()
    [message] = came(schedules, schedules.targets[0], 1)
    [asked] = [
        m for m in read_all(schedules.kafka.bootstrap_servers, schedules.requests) if m.value()
    ]
    [tombstone] = until("a tombstone", lambda: tombstones(schedules))
    [copy] = came(schedules, history(schedules), 1)

    passed = [(n, v.encode() if isinstance(v, str) else v) for n, v in given]
    delivered = headers(message)
    assert message.timestamp()[1] >= at_s * 1000
    assert (message.key(), message.value()) == (b"\x00vid1", b"\x00video 1")
    assert delivered[:9] == [
        *passed,
        ("scheduler-timestamp", str(asked.timestamp()[1] // 1000).encode()),
        ("scheduler-key", "vid1-öffnen".encode()),
        ("scheduler-topic", schedules.requests.encode()),
    ]
    assert [n for n, _ in delivered[9:]] == ["blackbox-id", "blackbox-due-ms", "blackbox-source"]
    assert (copy.key(), copy.value(), headers(copy)) == (b"\x00vid1", b"\x00video 1", delivered)
    assert (tombstone.key(), tombstone.partition()) == ("vid1-öffnen".encode(), 2)
    assert headers(tombstone) == delivered


@both_engines_at_length
def test_the_same_key_reschedules_and_a_null_value_cancels(schedules: World) -> None:
    at_s = in_s(3)
    for number in range(100):
        schedule(schedules, "moved", b"%d" % number, at_s + (number % 2) * 3600 * (number < 99))
        schedule(schedules, f"c{number}", b"cancelled", at_s)
        cancel(schedules, f"c{number}")
    schedule(schedules, "past", b"past", 1)
    schedules.flush()
    start(schedules)
    assert values(came(schedules, schedules.targets[0], 2)) == {b"99": 1, b"past": 1}
    assert keys(until("two tombstones", lambda: tombstones(schedules))) == {"moved": 1, "past": 1}
    cancel(schedules, "moved")
    schedule(schedules, "last", b"last", 0)
    schedules.flush()
    assert len(came(schedules, schedules.targets[0], 3)) == 3


@both_engines_at_length
def test_of_1000_overdue_schedules_only_the_500_not_cancelled_are_delivered(
    schedules: World,
) -> None:
    for number in range(1000):
        schedule(schedules, f"s{number}", b"%d" % number, 1)
    for number in range(0, 1000, 2):
        cancel(schedules, f"s{number}")
    schedule(schedules, "last", b"last", 1)
    schedules.flush()
    start(schedules)
    fired = values(came(schedules, schedules.targets[0], 501))
    assert fired == Counter([b"%d" % number for number in range(1, 1000, 2)] + [b"last"])


@both_engines_at_length
def test_an_invalid_schedule_becomes_a_dead_letter_without_a_tombstone(schedules: World) -> None:
    start(schedules)
    at_s = in_s(3600)
    schedule(schedules, None, b"v", at_s)
    schedule(schedules, "  ", b"v", at_s)
    schedule(schedules, b"\xff", b"v", at_s)
    schedule(schedules, "k1", b"v", -1)
    schedules.send_raw(b"v", [("scheduler-epoch", str(at_s))], key=b"k2")
    schedules.send_raw(b"v", [("scheduler-target-topic", schedules.targets[0])], key=b"k3")
    schedule(schedules, "k4", b"v", at_s, to=schedules.requests)
    schedules.flush()
    wanted = {"bad-id": 3, "bad-due-time": 2, "bad-topic": 1, "forbidden-topic": 1}
    until("seven dead letters", lambda: reasons(schedules) == wanted)
    schedule(schedules, "last", b"last", 0)
    schedules.flush()
    until("the last one's tombstone", lambda: keys(tombstones(schedules)) == {"last": 1})
    assert len(came(schedules, history(schedules), 1)) == 1


def test_with_a_grace_interval_a_late_schedule_is_dead_lettered_with_a_tombstone(
    schedules: World,
) -> None:
    schedule(schedules, "late", b"late", int(time.time()) - 100)
    schedule(schedules, "fresh", b"fresh", int(time.time()))
    schedules.flush()
    start(schedules, scheduler_grace_s=50)
    assert values(came(schedules, schedules.targets[0], 1)) == {b"fresh": 1}
    until("a dead letter", lambda: reasons(schedules) == {"expired": 1})
    until("tombstones", lambda: keys(tombstones(schedules)) == {"late": 1, "fresh": 1})
    assert values(read_all(schedules.kafka.bootstrap_servers, history(schedules))) == {b"fresh": 1}


def test_bursts_of_schedules_whose_copies_exceed_one_record_batch_are_delivered_in_time(
    schedules: World,
) -> None:
    schedules.create(NewTopic(history(schedules), 1, config={"max.message.bytes": "65536"}))
    start(schedules)
    first_s, count = in_s(2), 200
    for number in range(2 * count):
        at_s = first_s + number % 2
        terms: Headers = [
            ("scheduler-epoch", str(at_s)),
            ("scheduler-target-topic", schedules.targets[0]),
            ("scheduler-target-key", str(at_s)),
        ]
        schedules.send_raw(b"x" * 1500, terms, 0, key=b"s%d" % number)
    schedules.flush()
    messages = came(schedules, schedules.targets[0], 2 * count)
    assert len(messages) == len(came(schedules, history(schedules), 2 * count)) == 2 * count
    assert max(m.timestamp()[1] - 1000 * int(m.key() or b"") for m in messages) < 3000
    assert "recovering" not in schedules.services[0].log.read_text()


@pytest.mark.proof
def test_each_schedule_has_one_delivery_and_tombstone_although_owners_are_killed(
    schedules: World,
) -> None:
    at_s = in_s(3)
    ids = {f"s{number}" for number in range(2000)}
    for number in range(2000):
        schedule(schedules, f"s{number}", b"v", at_s + number % 3)
    schedules.flush()
    for _ in range(3):
        service = schedules.start_service(history_topic=history(schedules), batch_limit=50)
        service.wait_ready()
        until("it delivers", lambda s=service: s.metric("blackbox_delivered_total") > 100)  # type: ignore[misc]
        service.kill()
    start(schedules)
    until("all have ended", lambda: len(tombstones(schedules)) >= len(ids))
    once = dict.fromkeys(ids, 1)
    assert keys(tombstones(schedules)) == once
    for topic in (schedules.targets[0], history(schedules)):
        records = read_all(schedules.kafka.bootstrap_servers, topic)
        assert Counter((dict(headers(m))["scheduler-key"] or b"").decode() for m in records) == once


@pytest.mark.proof
@both_engines_at_length
def test_no_tombstone_is_written_after_a_newer_schedule_of_its_id(schedules: World) -> None:
    """Callers schedule again exactly when the earlier schedule is delivered."""
    start(schedules)
    ids = [f"s{number}" for number in range(40)]
    until_s = time.time() + 6
    while time.time() < until_s:
        for key in ids:
            schedule(schedules, key, b"%d" % time.time_ns(), int(time.time()))
        schedules.flush()
    last = {key: b"last of " + key.encode() for key in ids}
    at_s = in_s(2)
    for key, value in last.items():
        schedule(schedules, key, value, at_s)
    schedules.flush()

    def fired() -> set[bytes | None]:
        records = read_all(schedules.kafka.bootstrap_servers, schedules.targets[0])
        return {record.value() for record in records} & set(last.values())

    until("the last schedule of each is delivered", lambda: fired() == set(last.values()))
    ended: dict[tuple[int | None, bytes | None], int] = {}
    for record in read_all(schedules.kafka.bootstrap_servers, schedules.requests):
        place = record.partition(), record.key()
        if record.value() is not None:
            ended[place] = record.offset() or 0
        elif place in ended:
            source = dict(headers(record))["blackbox-source"] or b""
            assert int(source.rpartition(b"@")[2]) == ended[place]


@pytest.mark.proof
@pytest.mark.usefixtures("quick_cleaner")
def test_a_lost_index_is_rebuilt_from_a_compacted_topic(compacted: World) -> None:
    start(compacted)
    at_s = in_s(8)
    for number in range(200):
        schedule(compacted, f"s{number}", b"first", at_s)
        schedule(compacted, f"s{number}", b"%d" % number, 1 if number % 2 else at_s)
    compacted.flush()
    until("half have ended", lambda: len(tombstones(compacted)) >= 100)
    compacted.services[0].kill()

    def is_compacted() -> bool:
        for partition in range(compacted.partitions):
            compacted.send_raw(None, key=b"rolls segments", partition=partition)
        compacted.flush()
        records = read_all(compacted.kafka.bootstrap_servers, compacted.requests)
        return not any(record.value() == b"first" for record in records)

    until("the log is cleaned", is_compacted, 90, every_s=0.5)
    forget(compacted)
    start(compacted)
    fired = values(came(compacted, compacted.targets[0], 200))
    assert fired == Counter(b"%d" % number for number in range(200))
