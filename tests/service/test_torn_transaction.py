"""A transaction whose receipt can be read but whose messages cannot: they are delivered again."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import NewTopic

from blackbox.embedded import EmbeddedStack
from blackbox.journal.topics import receipts_topic
from blackbox.records.receipt import Receipt, decode, encode
from blackbox.records.recurrence import HEADER as FOLLOWS
from blackbox.records.request import Shard, request_id
from tests.servers.two_brokers import PlacedWorld, TwoBrokers
from tests.support.world import World, read_all, until

pytestmark = pytest.mark.service

TORN = 50


def test_outcomes_of_a_receipt_whose_messages_were_aborted_are_void(world: World) -> None:
    receipts = receipts_topic(world.requests)
    world.create(NewTopic(receipts, world.partitions))
    world.ask(2 * TORN, within_s=0, partition=0)
    torn = Receipt(1, delivered={f"{world.targets[0]}/0": aborted(world, world.targets[0])})
    write_receipt(world, torn)

    service = world.start_service().wait_ready()

    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
    assert verdict.delivered == 2 * TORN
    until("nothing is pending", lambda: service.metric("blackbox_pending") == 0)
    found = [decode(one.value()) for one in read_all(world.kafka.bootstrap_servers, receipts)]
    assert [one.void for one in found if one.void] == [list(range(TORN))]


def test_requests_whose_messages_a_transaction_hides_are_in_doubt_until_it_ends(
    world: World,
) -> None:
    hidden, others = f"{world.name}.hidden", world.targets
    receipts = receipts_topic(world.requests)
    world.create(NewTopic(receipts, world.partitions), NewTopic(hidden, 1))
    stranger = transaction(world, "stranger")
    stranger.produce(hidden, "elsewhere", partition=0)
    assert stranger.flush(10) == 0
    world.targets = [hidden]
    world.ask(TORN, within_s=0, partition=0)
    ours = transaction(world, "ours")
    places = delivered(ours, world)
    ours.commit_transaction(10)
    write_receipt(world, Receipt(1, delivered={f"{hidden}/0": places}))
    world.targets = others
    world.ask(TORN, within_s=0, partition=0)

    service = world.start_service().wait_ready()
    until("the others are delivered", lambda: service.metric("blackbox_delivered_total") == TORN)
    assert service.metric("blackbox_pending") == service.metric("blackbox_in_doubt") == TORN
    service.kill()
    redis.Redis.from_url(world.redis.url).flushall()
    service = world.start_service().wait_ready()
    until("they are doubtful again", lambda: service.metric("blackbox_in_doubt") == TORN)

    stranger.abort_transaction(10)

    until("nothing is pending", lambda: service.metric("blackbox_pending") == 0)
    world.targets = [*others, hidden]
    verdict = world.wait_delivered()
    assert (verdict.lost, verdict.duplicated) == ([], []), verdict


@pytest.mark.parametrize(
    ("torn", "messages"), [("nothing", 1), ("the message", 0), ("the next request", 2)]
)
def test_a_recurring_request_goes_on_whatever_is_torn_off(
    world: World, torn: str, messages: int
) -> None:
    shard, target = Shard(world.requests, 0), world.targets[0]
    receipts = receipts_topic(world.requests)
    world.create(NewTopic(receipts, world.partitions))
    plain = Producer({"bootstrap.servers": world.kafka.bootstrap_servers})
    places: dict[str, list[tuple[int, int]]] = {}

    def stored(error: KafkaError | None, message: Message) -> None:
        assert error is None
        places[message.topic() or ""] = [(0, message.offset() or 0)]

    def recurring(at_ms: int) -> bytes:
        asked = {"topic": target, "message": "hi", "id": "a", "every": 3600, "at": at_ms}
        return json.dumps(asked).encode()

    def write_or_tear(what: str, topic: str, value: bytes, header: str) -> None:
        producer = transaction(world, what)
        headers: list[tuple[str, str | bytes | None]] = [(header, shard.source(0).encode())]
        producer.produce(topic, value, partition=0, headers=headers, on_delivery=stored)
        assert producer.flush(10) == 0
        if what == torn:
            producer.abort_transaction(10)
        else:
            producer.commit_transaction(10)

    due_ms = int(1000 * time.time())
    plain.produce(world.requests, recurring(due_ms), partition=0)
    assert plain.flush(10) == 0
    write_or_tear("the message", target, b"hi", "blackbox-source")
    write_or_tear("the next request", world.requests, recurring(due_ms + 3_600_000), FOLLOWS)
    there, following = f"{target}/0", f"{world.requests}/0"
    named = Receipt(1, delivered={there: places[target]}, next={following: places[world.requests]})
    write_receipt(world, named)

    service = world.start_service().wait_ready()

    def delivered_messages() -> list[Message]:
        return read_all(world.kafka.bootstrap_servers, target)

    until("all is delivered", lambda: len(delivered_messages()) == messages)
    until("the next time is pending", lambda: service.metric("blackbox_pending") == 1)
    assert len(delivered_messages()) == messages
    found = [decode(one.value()) for one in read_all(world.kafka.bootstrap_servers, receipts)]
    assert [one.void for one in found if one.void] == ([] if torn == "nothing" else [[0]])


@pytest.mark.proof
def test_a_message_in_a_partition_without_leader_is_in_doubt(
    stack: EmbeddedStack, tmp_path: Path
) -> None:
    brokers = TwoBrokers(tmp_path / "brokers")
    with ExitStack() as ending:
        brokers.start()
        ending.callback(brokers.stop)
        world = ending.enter_context(PlacedWorld(brokers.first, stack.redis, tmp_path))
        away = f"{world.name}.away"
        near = world.targets[0]
        world.create(
            NewTopic(receipts_topic(world.requests), world.partitions),
            NewTopic(away, 1, replica_assignment=[[2]]),
        )
        world.targets = [away, near]
        world.ask(2, within_s=0, partition=0)
        places = {topic: aborted(world, topic)[:1] for topic in world.targets}
        [(_, there)] = places[near]
        brokers.second.stop()
        write_receipt(
            world, Receipt(1, delivered={f"{away}/0": places[away], f"{near}/0": [(1, there)]})
        )

        service = world.start_service().wait_ready()
        until("the other is delivered", lambda: service.metric("blackbox_delivered_total") == 1)
        assert service.metric("blackbox_in_doubt") == 1

        brokers.mend()
        until("nothing is pending", lambda: service.metric("blackbox_pending") == 0)
        verdict = world.wait_delivered()
        assert verdict.is_exact, verdict


def transaction(world: World, name: str) -> Producer:
    servers = {"bootstrap.servers": world.kafka.bootstrap_servers}
    producer = Producer(servers | {"transactional.id": f"{world.name}.{name}"})
    producer.init_transactions(10)
    producer.begin_transaction()
    return producer


def delivered(producer: Producer, world: World) -> list[tuple[int, int]]:
    """Write the messages of the requests, as blackbox does; returns their places."""
    places: list[tuple[int, int]] = []

    def stored(error: KafkaError | None, message: Message) -> None:
        assert error is None
        places.append((len(places), message.offset() or 0))

    for number, body in enumerate(world.asked):
        shard = Shard(world.requests, 0)
        headers: list[tuple[str, str | bytes | None]] = [
            ("CALLER_SERVICE", b"tests"), ("trace", body[:7].encode()),
            ("blackbox-id", request_id(shard, number).encode()), ("blackbox-due-ms", b"0"),
            ("blackbox-source", shard.source(number).encode()),
        ]  # fmt: skip
        [target] = world.targets
        producer.produce(target, body, partition=0, headers=headers, on_delivery=stored)
    assert producer.flush(10) == 0
    return places


def write_receipt(world: World, receipt: Receipt) -> None:
    producer = Producer({"bootstrap.servers": world.kafka.bootstrap_servers})
    at = receipts_topic(world.requests)
    producer.produce(at, encode(receipt), f"{world.requests}-0", 0)
    assert producer.flush(10) == 0


def aborted(world: World, target: str) -> list[tuple[int, int]]:
    """The places of the messages of the first requests, for read_uncommitted consumers."""
    places: list[tuple[int, int]] = []

    def stored(error: KafkaError | None, message: Message) -> None:
        offset = message.offset()
        assert error is None
        assert offset is not None
        places.append((len(places), offset))

    producer = transaction(world, f"torn.{target}")
    for number in range(TORN):
        producer.produce(target, f"{number:07d}", partition=0, on_delivery=stored)
    assert producer.flush(10) == 0
    producer.abort_transaction(10)
    return places
