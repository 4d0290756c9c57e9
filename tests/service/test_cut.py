"""A request topic that lost its end, as after an unclean election: Kafka stops, its log is cut, Kafka starts."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from blackbox.embedded import EmbeddedKafka, EmbeddedRedis
from tests.service.test_binding import bodies, rebind, why_not_open
from tests.world import World, until

pytestmark = [pytest.mark.service, pytest.mark.fault, pytest.mark.timeout(300)]

KEPT, EACH, AT_ONCE = 50, 100, 10


@pytest.fixture
def two_shards(tmp_path: Path, own_redis: EmbeddedRedis) -> Iterator[World]:
    kafka = EmbeddedKafka(tmp_path / "kafka")
    kafka.start()
    with World(kafka, own_redis, tmp_path, partitions=2) as world:
        yield world
    kafka.stop()


def cut(kafka: EmbeddedKafka, topic: str, partition: int) -> None:
    """Leave the batches of records below KEPT, and nothing that remembers the others."""
    folder = kafka.folder / "data" / f"{topic}-{partition}"
    log = folder / f"{0:020d}.log"
    data, at = log.read_bytes(), 0
    while at + 27 <= len(data):
        base, length = struct.unpack(">qi", data[at : at + 12])
        if length <= 0 or base >= KEPT:
            break
        at += 12 + length
    log.write_bytes(data[:at])
    for pattern in ("*.index", "*.timeindex", "*.txnindex", "*.snapshot"):
        for path in folder.glob(pattern):
            path.unlink()


def test_requests_that_only_redis_still_has_and_those_in_their_places_are_delivered_once(
    two_shards: World,
) -> None:
    world = two_shards
    service = world.start_service().wait_ready()
    for _ in range(EACH // AT_ONCE):
        for partition in (0, 1):
            world.ask(AT_ONCE, from_s=60, within_s=62, partition=partition)
    until("they are taken in", lambda: service.metric("blackbox_pending") == 2 * EACH)
    world.kafka.stop()
    for partition in (0, 1):
        cut(world.kafka, world.requests, partition)
    world.kafka.start()
    assert "Kafka lost records" in why_not_open(service)

    another = World(world.kafka, world.redis, world.folder)  # whose producer knows no earlier log
    another.requests, another.targets, another.asked = world.requests, world.targets, world.asked
    another.ask(EACH, from_s=40, within_s=41, partition=0)  # more than were cut off
    service.stop()
    again = world.start_service()
    assert "the record at 99 is not the one that was read there" in why_not_open(again, "record at")

    print(told := rebind(world, "deliver"))
    assert told.count("became shorter; 50 asked for again") == 2
    again.wait_ready()
    until("all is delivered", lambda: set(bodies(world)) == set(world.asked), 120)
    assert Counter(Counter(bodies(world)).values()) == {1: 3 * EACH}
