"""Records that the Kafka client never returns, without an error: they stop nothing and become dead letters."""

from __future__ import annotations

from contextlib import closing

import pytest
from confluent_kafka import KafkaError, Message
from confluent_kafka.admin import NewTopic

from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.offset_lookup import OffsetLookup
from blackbox.journal.partition_reader import PartitionReader
from blackbox.journal.topics import receipts_topic
from blackbox.records.request import Shard
from tests.support.journal import WAYS, read_from, transactional
from tests.support.raw_record import SILENT, RawRecord, write_raw
from tests.support.world import World, both_engines_in_proof, until

pytestmark = pytest.mark.service


@pytest.fixture
def shard(world: World) -> Shard:
    world.create(NewTopic(receipts_topic(world.requests), 4))
    return Shard(world.requests, 0)


def write_silent(world: World, *records: RawRecord, compressed: bool = False) -> None:
    write_raw(world.kafka.bootstrap_servers, world.requests, records, compressed=compressed)


def write_one(world: World) -> None:
    world.send_raw(b"usual", partition=0)
    world.flush()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that reads carefully after 0.3 s without a record, not after 2 s."""
    monkeypatch.setattr("blackbox.journal.partition_reader.FIRST_HESITATION_S", 0.3)


@pytest.mark.parametrize("compressed", [False, True], ids=["", "compressed"])
@pytest.mark.parametrize("how", WAYS)
def test_a_record_that_is_never_returned_is_read_without_content(
    world: World, shard: Shard, how: str, compressed: bool, soon: None
) -> None:
    usual = RawRecord(b"{}")
    write_one(world)
    write_silent(world, SILENT, compressed=compressed)
    write_one(world)
    write_silent(world, usual, SILENT, usual, compressed=compressed)
    write_silent(world, SILENT, SILENT, SILENT, compressed=compressed)
    write_one(world)
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    for start in (0, 5):
        found = read_from(how, shard, access, start, 10)

        assert [record.offset for record in found] == [*range(start, 10)]
        silent = [record.offset for record in found if record.unreadable is not None]
        assert silent == [offset for offset in (1, 4, 6, 7, 8) if offset >= start]
    # the end of what is wanted may be before one, or between two
    assert [record.offset for record in read_from(how, shard, access, 5, 6)] == [5]
    assert [record.offset for record in read_from(how, shard, access, 5, 7)] == [5, 6]


def test_such_a_record_behind_an_aborted_transaction_is_found(
    world: World, shard: Shard, soon: None
) -> None:
    producer = transactional(world, "aborts")
    for _ in range(3):
        producer.produce(shard.topic, b"aborted", partition=shard.partition)
    assert producer.flush(10) == 0
    producer.abort_transaction(10)
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    with closing(PartitionReader(access)) as reader:
        until("the marker is written", lambda: reader.bounds(*shard).end == 4)
    write_silent(world, SILENT)
    write_one(world)
    with closing(OffsetLookup(access, 5.0)) as lookup:
        assert lookup.first_from(*shard, 0).offset() == 4
        error = lookup.first_from(*shard, 3).error()
        assert error is not None
        assert error.code() == KafkaError._BAD_MSG
        assert lookup.first_from(*shard, 5).error() is None
    assert [record.offset for record in read_from("a shard's journal", shard, access, 0, 6)] == [
        4,
        5,
    ]


@both_engines_in_proof
def test_such_a_record_becomes_a_dead_letter_and_stops_nothing(world: World) -> None:
    world.ask(10, within_s=12, from_s=4, partition=0)
    service = world.start_service().wait_ready()
    write_silent(world, SILENT)
    world.ask(20, within_s=2, partition=0)
    world.ask(20, within_s=2, partition=1)

    assert world.wait_delivered().is_exact

    [letter] = until("it is a dead letter", lambda: as_many(world, 1))
    headers = dict(letter.headers() or [])
    assert headers["blackbox-reason"] == b"unreadable"
    assert "the client does not return it" in str(headers["blackbox-detail"])
    service.stop()
    write_silent(world, SILENT)
    world.ask(10, within_s=1, partition=0)
    world.start_service().wait_ready()
    assert world.wait_delivered().is_exact
    assert len(until("there are two", lambda: as_many(world, 2))) == 2


def as_many(world: World, count: int) -> list[Message]:
    found = world.received(world.dead_letters)
    return found if len(found) == count else []
