"""Record batches that brokers accept and the Kafka client cannot decompress."""

from __future__ import annotations

from contextlib import closing

import pytest
from confluent_kafka import Message, Producer
from confluent_kafka.admin import NewTopic

from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.request_reader import RequestReader
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import receipts_topic
from blackbox.records.receipt import Claim
from blackbox.records.request import Reason, Record, Shard
from tests.support.journal import WAYS, read_from
from tests.support.unreadable_batch import write_unreadable_batch
from tests.support.world import World, both_engines_in_proof, until

pytestmark = pytest.mark.service


@pytest.fixture
def shard(world: World) -> Shard:
    world.create(NewTopic(receipts_topic(world.requests), 4))
    return Shard(world.requests, 0)


def write_batch(world: World, count: int) -> None:
    write_unreadable_batch(world.kafka.bootstrap_servers, world.requests, count, 0)


def write_one(world: World, value: bytes) -> None:
    world.send_raw(value, partition=0)
    world.flush()


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("how", WAYS)
def test_the_records_of_an_unreadable_batch_are_returned_without_content(
    world: World, shard: Shard, how: str, count: int
) -> None:
    write_one(world, b"before")
    write_batch(world, count)
    write_batch(world, 3)
    write_one(world, b"behind")
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    end = count + 5

    for start in {0, 1, count, end - 1}:
        found = read_from(how, shard, access, start, end)

        assert [record.offset for record in found] == [*range(start, end)]
        for record in found:
            if record.offset in (0, end - 1):
                assert record.unreadable is None
                assert record.value in (b"before", b"behind")
            else:
                assert record.unreadable is not None
                assert record.unreadable.reason == Reason.UNREADABLE
                assert record.value is None
    # the end of what is wanted may be inside
    assert [record.offset for record in read_from(how, shard, access, 0, 2)] == [0, 1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", WAYS)
def test_such_a_batch_right_behind_what_is_wanted_does_not_hold_a_read_up(
    world: World, shard: Shard, how: str
) -> None:
    write_one(world, b"before")
    write_marker(world)
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    with closing(ShardJournal(shard, access)) as journal:
        until("the marker is there", lambda: journal.request_bounds().end == 3)
    write_batch(world, 1)  # after the end was asked for

    found = read_from(how, shard, access, 0, 3)

    assert [record.value for record in found] == [b"before", b"committed"]


def write_marker(world: World) -> None:
    """A record and the marker of its transaction."""
    servers = {"bootstrap.servers": world.kafka.bootstrap_servers}
    producer = Producer(servers | {"transactional.id": world.name})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(world.requests, b"committed", partition=0)
    producer.commit_transaction()


def test_the_reader_of_all_shards_reads_over_such_a_batch_apart(world: World, shard: Shard) -> None:
    write_one(world, b"before")
    write_batch(world, 2)
    write_one(world, b"behind")
    other = Shard(world.requests, 1)
    reader = RequestReader(
        KafkaAccess(world.kafka.bootstrap_servers, world.name), most_records=100, gather_s=0.005
    )
    reader.start(shard, 0)
    reader.start(other, 0)
    read: list[Record] = []

    def all_are_read() -> bool:
        batches, lost = reader.read()
        assert not lost
        if shard in batches:
            assert batches[shard].start == len(read)
            read.extend(batches[shard].records)
        return len(read) == 4

    until("all are read", all_are_read)
    assert [record.unreadable is None for record in read] == [True, False, False, True]
    world.send_raw(b"x", partition=1)
    world.flush()
    assert until("the other is read", lambda: reader.read()[0].get(other))
    reader.close()


def test_a_message_in_an_unreadable_batch_is_not_missing(world: World, shard: Shard) -> None:
    write_batch(world, 2)
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    claim = Claim(5, "delivered", f"{world.requests}/0", 1, "")
    with closing(ShardJournal(shard, access)) as journal:
        checked = journal.check([claim], 0)
    assert checked.missing == []
    assert "Invalid compressed data" in checked.unread[claim]


@both_engines_in_proof
def test_an_unreadable_batch_becomes_dead_letters_and_stops_nothing(world: World) -> None:
    world.ask(10, within_s=7, from_s=4, partition=0)
    service = world.start_service().wait_ready()
    write_batch(world, 3)
    world.ask(20, within_s=2, partition=0)
    world.ask(20, within_s=2, partition=1)

    assert world.wait_delivered().is_exact

    letters = until("all are dead letters", lambda: as_many(world, 3))
    for letter in letters:
        headers = dict(letter.headers() or [])
        assert headers["blackbox-reason"] == b"unreadable"
        assert "Invalid compressed data" in str(headers["blackbox-detail"])
        assert letter.value() is None
    assert service.metric("blackbox_invalid_total") == 3
    service.stop()
    world.start_service().wait_ready()
    world.ask(10, within_s=1, partition=0)
    assert world.wait_delivered().is_exact
    assert len(world.received(world.dead_letters)) == 3


def as_many(world: World, count: int) -> list[Message]:
    found = world.received(world.dead_letters)
    return found if len(found) == count else []
