"""A record that a broker refused, although it accepted later ones, does not count as delivered.

A newly elected leader does not know a new producer, and accepts whatever it sends
first. librdkafka then reports the refused records as delivered, without an offset.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from blackbox.client.request_writer import RequestWriter
from blackbox.embedded import EmbeddedStack
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.transactions import Transactions
from tests.servers.moving_leader import MovingLeader, moving_leader
from tests.support.world import World, read_all, until

pytestmark = pytest.mark.service

LARGE = "x" * 900_000
"""So large that each record is sent in its own request."""


@pytest.fixture(scope="module")
def leader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MovingLeader]:
    with moving_leader(tmp_path_factory.mktemp("kafka"), ".TB", ".orders") as leader:
        yield leader


@pytest.fixture
def world(leader: MovingLeader, stack: EmbeddedStack, tmp_path: Path) -> Iterator[World]:
    with World(leader.kafka, stack.redis, tmp_path, "process") as world:
        yield world


def test_a_request_that_a_broker_refused_once_keeps_its_order(
    world: World, leader: MovingLeader
) -> None:
    with RequestWriter(leader.bootstrap_servers, request_topic=world.requests) as writer:
        asked = [writer.write(LARGE.encode(), partition=0) for _ in range(3)]
        assert [one.place[1] for one in asked] == [0, 1, 2]
    assert world.requests in leader.refused


def test_a_transaction_contains_all_records_although_a_broker_refused_one(
    world: World, leader: MovingLeader
) -> None:
    access = KafkaAccess(leader.bootstrap_servers, world.name)
    transactions = Transactions(access, f"{world.name}-unit", "unit")
    transactions.open()
    transactions.begin()
    for number in range(3):
        transactions.producer.produce(world.requests, LARGE, f"{number}", partition=0)
    transactions.commit()
    transactions.close()
    assert world.requests in leader.refused
    assert keys(world, world.requests) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_message_that_a_broker_refused_once_is_delivered(
    world: World, leader: MovingLeader, delivery: str
) -> None:
    orders = world.targets[0]
    for _ in range(3):
        large = {"topic": orders, "message": LARGE, "key": "k", "countdown": 0}
        world.send_raw(json.dumps(large), partition=0)
    world.flush()
    service = world.start_service(
        kafka_bootstrap_servers=leader.bootstrap_servers, delivery=delivery
    ).wait_ready()
    until("nothing is pending", lambda: service.metric("blackbox_pending") == 0)
    assert orders in leader.refused
    delivered = len(keys(world, orders))
    assert delivered == 3 if delivery == "exactly-once" else delivered >= 3


def keys(world: World, topic: str) -> list[bytes | None]:
    return [message.key() for message in read_all(world.kafka.bootstrap_servers, topic)]
