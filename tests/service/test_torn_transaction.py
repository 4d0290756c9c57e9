"""A transaction of which the receipt can be read and the messages cannot: they are delivered again."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import NewTopic

from blackbox.journal.topics import receipts_topic
from blackbox.receipt import Receipt, decode, encode
from tests.world import World, read_all, until

pytestmark = pytest.mark.service

TORN = 50


def test_a_receipt_whose_messages_were_aborted_is_not_believed(world: World) -> None:
    receipts = receipts_topic(world.requests)
    world.create(NewTopic(receipts, world.partitions))
    world.ask(2 * TORN, within_s=0, partition=0)
    torn = Receipt(1, delivered={f"{world.targets[0]}/0": aborted(world)})
    producer = Producer({"bootstrap.servers": world.kafka.bootstrap_servers})
    producer.produce(receipts, encode(torn), f"{world.requests}-0", 0)
    assert producer.flush(10) == 0

    service = world.start_service().wait_ready()

    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
    assert verdict.delivered == 2 * TORN
    until("nothing is pending", lambda: service.metric("blackbox_pending") == 0)
    found = [decode(one.value()) for one in read_all(world.kafka.bootstrap_servers, receipts)]
    assert [one.void for one in found if one.void] == [list(range(TORN))]


def aborted(world: World) -> list[tuple[int, int]]:
    """Where the messages of the first requests are, for those who read what was not committed."""
    places: list[tuple[int, int]] = []

    def stored(error: KafkaError | None, message: Message) -> None:
        offset = message.offset()
        assert error is None
        assert offset is not None
        places.append((len(places), offset))

    producer = Producer(
        {"bootstrap.servers": world.kafka.bootstrap_servers, "transactional.id": world.name}
    )
    producer.init_transactions(10)
    producer.begin_transaction()
    for number in range(TORN):
        producer.produce(world.targets[0], f"{number:07d}", partition=0, on_delivery=stored)
    assert producer.flush(10) == 0
    producer.abort_transaction(10)
    return places
