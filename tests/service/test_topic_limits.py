"""Predicted refusals of a topic match those of the brokers, to the byte, and affect no other message."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import NewTopic

from blackbox.records.outgoing import Outgoing
from blackbox.records.topic_limits import batch_bytes
from tests.service.test_undeliverable import reasons
from tests.support.world import World, read_all, until

pytestmark = pytest.mark.service

BODY = "x" * 200
COUNT = 30


@pytest.mark.parametrize("key", [None, b"k" * 70])
@pytest.mark.parametrize("size", [0, 50, 64, 8192, 100_000])
def test_the_size_of_a_message_is_calculated_as_brokers_do(
    world: World, size: int, key: bytes | None
) -> None:
    headers: list[tuple[str, bytes | str | None]] = [
        ("a", b"1"),
        ("header", b"x" * 64),
        ("ö", None),
    ]
    counted = batch_bytes(Outgoing(0, "", key, b"x" * size, headers))
    answers: list[int | None] = []

    def answered(error: KafkaError | None, message: Message) -> None:
        answers.append(None if error is None else error.code())

    producer = Producer({"bootstrap.servers": world.kafka.bootstrap_servers})
    for most in (counted, counted - 1):
        topic = f"{world.name}.{most}"
        world.create(NewTopic(topic, 1, config={"max.message.bytes": str(most)}))
        producer.produce(topic, b"x" * size, key, headers=headers, on_delivery=answered)
        assert producer.flush(10) == 0
    assert answers == [None, KafkaError.MSG_SIZE_TOO_LARGE]


def test_a_message_that_its_topic_refuses_does_not_abort_the_transaction(world: World) -> None:
    strict = {
        f"{world.name}.compacted": ("refused", {"cleanup.policy": "compact"}),
        f"{world.name}.narrow": ("too-large", {"max.message.bytes": "150"}),
    }
    world.create(*(NewTopic(topic, 1, config=config) for topic, (_, config) in strict.items()))
    for number in range(COUNT):
        topic = list(strict)[number % 2]
        world.send_raw(json.dumps({"topic": topic, "message": BODY, "countdown": 0}), partition=0)
    world.ask(500, within_s=0, partition=0)  # all of it is one batch
    service = world.start_service().wait_ready()
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
    until("the dead letters", lambda: sum(reasons(world).values()) == COUNT)
    assert reasons(world) == {"refused": COUNT // 2, "too-large": COUNT // 2}
    assert "recovering" not in service.log.read_text()


def test_messages_that_a_topic_accepts_only_one_by_one_are_delivered(world: World) -> None:
    topic = f"{world.name}.narrow"
    world.create(NewTopic(topic, 1, config={"max.message.bytes": "700"}))
    for _ in range(COUNT):
        world.send_raw(json.dumps({"topic": topic, "message": BODY, "countdown": 0}), partition=0)
    world.ask(200, within_s=0, partition=0)
    world.start_service().wait_ready()
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
    brokers = world.kafka.bootstrap_servers
    until("all are delivered", lambda: len(read_all(brokers, topic)) == COUNT)
    assert not reasons(world)
