"""Clients that have lost all brokers, and would wait forever, are replaced."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue

import pytest

from blackbox.journal import kafka_access as access_module
from blackbox.journal.kafka_access import ConnectionMonitor, KafkaAccess
from blackbox.journal.membership import Membership
from blackbox.journal.partition_reader import PartitionReader
from blackbox.journal.readable_bounds import ReadableBounds
from blackbox.journal.request_reader import RequestReader
from blackbox.journal.target_topics import TargetTopics
from blackbox.records.request import Shard
from tests.support.world import World, until

pytestmark = pytest.mark.service

NO_BROKERS = '{"brokers": {}}'


@pytest.fixture
def access(world: World) -> KafkaAccess:
    return KafkaAccess(world.kafka.bootstrap_servers, world.name)


class Monitors:
    """The connection monitors of all clients."""

    def __init__(self) -> None:
        self.made: list[ConnectionMonitor] = []

    def make(self, patience_s: float) -> ConnectionMonitor:
        self.made.append(ConnectionMonitor(patience_s))
        return self.made[-1]

    def lose(self) -> None:
        """Report to all existing clients that they have been disconnected for a long time."""
        for monitor in self.made:
            for _ in range(20):
                monitor(NO_BROKERS)


@pytest.fixture
def monitors(monkeypatch: pytest.MonkeyPatch) -> Monitors:
    monitors = Monitors()
    monkeypatch.setattr(access_module, "ConnectionMonitor", monitors.make)
    return monitors


def test_a_new_consumer_continues_reading_requests_where_the_last_one_stopped(
    world: World, access: KafkaAccess, monitors: Monitors
) -> None:
    read: list[bytes] = []
    reader = RequestReader(access, most_records=100, gather_s=0.01)

    def have(count: int) -> bool:
        batches, lost = reader.read()
        assert not lost
        read.extend(one.value or b"" for batch in batches.values() for one in batch.records)
        return len(read) >= count

    shards = [Shard(world.requests, partition) for partition in range(2)]
    for shard in shards:
        reader.start(shard, 0)
    for half in (range(100), range(100, 200)):
        for number in half:
            world.send_raw(b"%d" % number, partition=number % 2)
        world.flush()
        until("they are read", partial(have, half[-1] + 1))
        monitors.lose()
    reader.close()
    assert len(monitors.made) == 2
    assert sorted(read) == sorted(b"%d" % number for number in range(200))


def test_waiting_for_records_continues_with_a_new_consumer(
    world: World, access: KafkaAccess, monitors: Monitors
) -> None:
    ends = ReadableBounds(access)
    first = {(world.requests, 0): 0}
    assert not ends.wait_for_records(first, 0.1)
    monitors.lose()
    world.send_raw(b"news", partition=0)
    world.flush()
    until("the record is noticed", lambda: ends.wait_for_records(first, 0.5))
    assert len(monitors.made) == 2
    ends.close()


def test_a_member_without_brokers_loses_its_shards_and_gets_them_again(
    world: World, access: KafkaAccess, monitors: Monitors
) -> None:
    told: SimpleQueue[tuple[str, Shard]] = SimpleQueue()

    def lost(shards: Sequence[Shard]) -> None:
        for shard in shards:
            told.put(("lost", shard))

    member = Membership(
        access,
        [world.requests],
        gained=lambda shard: told.put(("gained", shard)),
        lost=lost,
    )
    member.start()
    until("it has them", lambda: len(member.owned()) == world.partitions)
    before = {told.get(timeout=30) for _ in range(world.partitions)}
    monitors.lose()
    again = [told.get(timeout=30) for _ in range(2 * world.partitions)]
    assert {what for what, _ in again[: world.partitions]} == {"lost"}
    assert set(again[world.partitions :]) == before
    member.close()


def test_a_lookup_of_targets_without_an_answer_uses_a_new_client(
    world: World, access: KafkaAccess
) -> None:
    targets = TargetTopics(access)
    targets._admin = KafkaAccess("127.0.0.1:1", world.name, {"log_level": "0"}).admin()
    assert targets.unavailable([world.targets[0]]) == {}


def test_a_reader_that_was_closed_uses_new_clients(world: World, access: KafkaAccess) -> None:
    world.send_raw(b"x", partition=0)
    world.flush()
    reader = PartitionReader(access)
    nowhere = KafkaAccess("127.0.0.1:1", world.name, {"log_level": "0"})
    reader._consumer, reader._admin = nowhere.consumer(), nowhere.admin()
    reader.close()
    assert reader.bounds(world.requests, 0).end == reader.log_end(world.requests, 0) == 1
    reader.close()
