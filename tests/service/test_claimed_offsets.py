"""A writer cannot choose the offsets of its records: neither pass for another record, nor hide others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import closing

import pytest
from confluent_kafka import Message
from confluent_kafka.admin import NewTopic

from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.offset_lookup import OffsetLookup
from blackbox.journal.topics import receipts_topic
from blackbox.records.request import Reason, Shard
from tests.support.journal import WAYS, read_from, transactional
from tests.support.raw_record import RawRecord, write_raw
from tests.support.world import World, both_engines_in_proof, read_all

pytestmark = pytest.mark.service

EARLIER = list(range(-20, 0))
"""The offsets of the twenty records before the batch."""
LATER = list(range(20, 40))
"""Those of the twenty records behind it."""
DISTANT = [10_000_000, *range(1, 20)]


@pytest.fixture
def shard(world: World) -> Shard:
    world.create(NewTopic(receipts_topic(world.requests), 4))
    return Shard(world.requests, 0)


def forge(world: World, deltas: Sequence[int], value: bytes = b"forged") -> None:
    write_raw(
        world.kafka.bootstrap_servers, world.requests, [RawRecord(value, one) for one in deltas]
    )


def write(world: World, count: int) -> None:
    for _ in range(count):
        world.send_raw(b"genuine", partition=0)
    world.flush()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("deltas", [EARLIER, LATER, DISTANT], ids=["earlier", "later", "distant"])
def test_each_record_is_read_at_its_own_offset(
    world: World, shard: Shard, deltas: list[int], way: str
) -> None:
    write(world, 30)
    forge(world, deltas)
    write(world, 30)

    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    found = read_from(way, shard, access, 0, 60 + len(deltas))

    assert [one.offset for one in found if one.value == b"genuine"] == [*range(30), *range(50, 80)]
    refused = {one.offset: one.unreadable.reason for one in found if one.unreadable is not None}
    # a client passes over records that claim to be before what it asks for
    assert refused == dict.fromkeys([] if deltas == EARLIER else range(30, 50), Reason.UNREADABLE)
    assert len(found) == 60 + len(refused)


@pytest.mark.parametrize("way", WAYS)
def test_batches_of_which_a_client_returns_nothing_are_passed_over(
    world: World, shard: Shard, way: str
) -> None:
    """A client takes one of them for a record that is too large to be fetched, once its fetches have grown."""
    write(world, 10)
    forge(world, [10_000_000])
    for _ in range(3):
        forge(world, [-5], b"forged" * 1000)
    write(world, 10)

    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    found = read_from(way, shard, access, 0, 24)

    assert [one.offset for one in found if one.value == b"genuine"] == [*range(10), *range(14, 24)]


def test_a_claim_to_be_in_an_aborted_transaction_is_refuted_at_once(
    world: World, shard: Shard
) -> None:
    producer = transactional(world, "aborts")
    for _ in range(300):
        producer.produce(shard.topic, os.urandom(2000), partition=0)
        assert producer.flush(10) == 0  # each in a batch of its own
    producer.abort_transaction(10)
    write(world, 1)
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    claimed = Message(topic=shard.topic, partition=0, offset=5, value=b"forged")
    with closing(OffsetLookup(access, within_s=10.0)) as lookup:
        began = time.monotonic()
        for _ in range(3):
            assert not lookup.is_there(claimed)
        assert time.monotonic() - began < 10.0

    found = read_from("a shard's journal", shard, access, 0, 302)
    assert [one.value for one in found] == [b"genuine"]


@both_engines_in_proof
@pytest.mark.parametrize("deltas", [EARLIER, LATER, DISTANT], ids=["earlier", "later", "distant"])
def test_requests_of_others_are_delivered_beside_forged_offsets(
    world: World, deltas: list[int]
) -> None:
    forged_topic = f"{world.name}.forged"
    world.create(NewTopic(forged_topic, 1))
    forged = json.dumps({"topic": forged_topic, "message": "forged", "countdown": 0}).encode()
    world.ask(20, within_s=6, from_s=4, partition=0)  # their offsets are claimed while they wait
    forge(world, deltas, forged)
    world.ask(40, within_s=3, partition=0)
    service = world.start_service().wait_ready()
    forge(world, deltas, forged)
    world.ask(40, within_s=3, partition=0)

    assert world.wait_delivered().is_exact

    service.stop()
    world.start_service().wait_ready()
    world.ask(10, within_s=1, partition=0)
    assert world.wait_delivered().is_exact
    # nothing is delivered again and again, as if it had never been read
    assert len(read_all(world.kafka.bootstrap_servers, forged_topic)) <= 2 * len(deltas)
