"""Reads of a shard's journals and of targets, on a real broker."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

import psutil
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import NewTopic

from blackbox.journal import kafka_access as access_module
from blackbox.journal import request_client, request_reader
from blackbox.journal.kafka_access import KafkaAccess, produce
from blackbox.journal.partition_reader import PartitionReader
from blackbox.journal.ranges import Range, read_ranges
from blackbox.journal.request_reader import RequestReader
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.shard_writer import ShardWriter
from blackbox.journal.topics import receipts_topic
from blackbox.records.errors import RecoveryRequired
from blackbox.records.receipt import Claim, Receipt
from blackbox.records.request import Shard
from tests.support.journal import transactional
from tests.support.world import AT_LENGTH, World, read_all, until

pytestmark = pytest.mark.service

BACKLOG = 1_500_000

NEWEST_ONLY = {
    "cleanup.policy": "compact",
    "segment.ms": "50",
    "min.cleanable.dirty.ratio": "0.01",
    "max.compaction.lag.ms": "50",
}


@pytest.fixture
def shard(world: World) -> Shard:
    world.create(NewTopic(receipts_topic(world.requests), 4))
    return Shard(world.requests, 0)


@pytest.fixture
def journal(world: World, shard: Shard) -> Iterator[ShardJournal]:
    journal = ShardJournal(shard, KafkaAccess(world.kafka.bootstrap_servers, world.name))
    yield journal
    journal.close()


@pytest.mark.parametrize("exactly_once", [True, False])
def test_an_owner_notices_that_another_group_wrote_receipts_between_its_own(
    world: World, shard: Shard, exactly_once: bool
) -> None:
    owner, other = (
        ShardWriter(
            shard, KafkaAccess(world.kafka.bootstrap_servers, group), exactly_once=exactly_once
        )
        for group in (f"{world.name}.a", f"{world.name}.b")
    )
    with closing(owner), closing(other):
        owner.open()
        other.open()
        commit(owner, Receipt(1, barrier=True))
        commit(owner, Receipt(2))
        commit(owner, Receipt(3))
        commit(other, Receipt(4, barrier=True))

        with pytest.raises(
            RecoveryRequired, match="not of this owner; another group may be delivering"
        ):
            commit(owner, Receipt(5))


def commit(writer: ShardWriter, receipt: Receipt) -> None:
    writer.begin()
    writer.commit(receipt)


def write(
    producer: Producer, topic: str, source: str, *, key: str | None = None, timestamp: int = 0
) -> int:
    """Write into partition 0 and return the offset the broker gave."""
    places: list[int] = []

    def report(error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        places.append(message.offset() or 0)

    producer.produce(
        topic, b"x", key, 0, report, timestamp=timestamp, headers=[("blackbox-source", source)]
    )
    producer.flush(30)
    return places[0]


def ask_in_transactions(world: World, *outcomes: str) -> None:
    """Ten records into partition 0 in each of these transactions."""
    for outcome in outcomes:
        producer = transactional(world, "caller")
        for number in range(10):
            producer.produce(world.requests, f"{outcome}{number}", partition=0)
        producer.flush(30)
        if outcome == "commit":
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)


def claim(topic: str, request: int, place: int) -> Claim:
    return Claim(request, "delivered", f"{topic}/0", place, "")


def missing(journal: ShardJournal, *claims: Claim) -> list[int]:
    """Which of these requests have no message, if all places can be read."""
    checked = journal.check(claims, 20)
    assert checked.unread == {}
    return [one.offset for one in checked.missing]


def test_a_message_behind_an_open_transaction_is_not_missing(
    world: World, shard: Shard, journal: ShardJournal
) -> None:
    target = world.targets[0]
    stranger = transactional(world, "stranger")
    write(stranger, target, "elsewhere")
    ours = transactional(world, "ours")
    place = write(ours, target, shard.source(7))
    ours.commit_transaction(30)

    hidden = claim(target, 7, place)
    found, unread = journal.check([hidden], 0.2)
    assert found == []
    assert list(unread) == [hidden]
    assert "an open transaction of another producer hides" in unread[hidden]
    with ThreadPoolExecutor(1) as looking:
        waited_for = looking.submit(missing, journal, hidden)
        stranger.abort_transaction(30)
        assert waited_for.result(timeout=20) == []


def test_an_aborted_message_is_missing(world: World, shard: Shard, journal: ShardJournal) -> None:
    target = world.targets[0]
    ours = transactional(world, "ours")
    place = write(ours, target, shard.source(7))
    ours.abort_transaction(30)
    assert missing(journal, claim(target, 7, place)) == [7]


def test_a_message_that_compaction_removed_is_not_missing(
    world: World, shard: Shard, journal: ShardJournal, quick_cleaner: None
) -> None:
    target = f"{world.name}.newest"
    world.create(NewTopic(target, 1, config=NEWEST_ONLY))
    places = {}
    for number in range(20):
        ours = transactional(world, "ours")
        places[number] = write(ours, target, shard.source(number), key="a")
        ours.commit_transaction(30)
    newest = places[19]
    later_ms = int(time.time() * 1000) + 1000  # by its time, the next record needs a new segment
    other = transactional(world, "other")
    write(other, target, "elsewhere", key="b", timestamp=later_ms)
    other.commit_transaction(30)

    def is_compacted() -> bool:
        records = read_all(world.kafka.bootstrap_servers, target)
        return [one.offset() for one in records if one.key() == b"a"] == [newest]

    until("the topic is compacted", is_compacted, 60)
    told = [claim(target, number, place) for number, place in places.items()]
    assert missing(journal, *told) == []
    assert missing(journal, claim(target, 7, newest + 1000)) == [7]


def test_an_offset_beyond_the_end_or_of_another_request_is_missing(
    world: World, shard: Shard, journal: ShardJournal
) -> None:
    target = world.targets[0]
    ours = transactional(world, "ours")
    place = write(ours, target, shard.source(8))
    ours.commit_transaction(30)
    assert missing(journal, claim(target, 7, place)) == [7]
    assert missing(journal, claim(target, 9, place + 1000)) == [9]
    assert missing(journal, claim(target, 8, place)) == []


def test_messages_of_a_deleted_target_are_not_missing(world: World, journal: ShardJournal) -> None:
    assert missing(journal, claim(f"{world.name}.gone", 7, 0)) == []


def test_records_are_read_by_offset(world: World, journal: ShardJournal) -> None:
    for number in range(50):
        world.send_raw(f"r{number}", partition=0)
    world.flush()
    found = journal.records([3, 40, 4, 1000])
    assert {offset: record.value for offset, record in found.items()} == {
        3: b"r3", 4: b"r4", 40: b"r40",
    }  # fmt: skip


@dataclass
class Counted:
    """An access whose consumers report how many bytes they have received."""

    access: KafkaAccess
    received: int = 0

    def consumer(self, **own: Any) -> Consumer:
        watched = {"statistics.interval.ms": 20, "stats_cb": self._note}
        self.opened = self.access.consumer(**own | watched)
        return self.opened

    def _note(self, statistics: str) -> None:
        brokers = json.loads(statistics)["brokers"].values()
        self.received = sum(broker["rxbytes"] for broker in brokers)


def test_a_look_up_of_one_record_does_not_fetch_a_megabyte_behind_it(world: World) -> None:
    for _ in range(100):  # each in a record batch of its own
        world.send_raw(os.urandom(20_000), partition=0)
        world.flush()
    counted = Counted(KafkaAccess(world.kafka.bootstrap_servers, world.name))
    reader = PartitionReader(cast(KafkaAccess, counted), prefetched=1)
    [([first], _)] = reader.read(world.requests, 0, 0, 1)
    assert first.offset() == 0
    until("statistics", lambda: counted.opened.poll(0.05) is None and counted.received)
    reader.close()
    assert counted.received < 300_000


def test_a_batch_starts_at_the_offset_it_was_read_from(world: World, shard: Shard) -> None:
    ask_in_transactions(world, "abort", "commit")
    reader = RequestReader(
        KafkaAccess(world.kafka.bootstrap_servers, world.name), most_records=100, gather_s=0.5
    )
    reader.start(shard, 0)
    batch = until("they are read", lambda: reader.read()[0].get(shard))
    reader.close()
    assert (batch.start, batch.records[0].offset, batch.records[0].value) == (0, 11, b"commit0")


def test_a_batch_of_large_records_ends_at_a_size(
    world: World, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_client, "AT_ONCE", 2)
    monkeypatch.setattr(request_client, "MOST_BYTES", 300_000)
    for _ in range(10):
        world.send_raw(os.urandom(100_000), partition=0)
    world.flush()
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    reader = RequestReader(access, most_records=100, gather_s=2.0)
    reader.start(shard, 0)
    batches = list[int]()
    while sum(batches) < 10:
        batches.append(len(until("they are read", lambda: reader.read()[0].get(shard)).records))
    reader.close()
    # The first record, then two at a time.
    assert batches == [3, 3, 3, 1]


def test_records_do_not_wait_for_the_large_ones_of_another_shard(world: World) -> None:
    flood = Producer(
        {"bootstrap.servers": world.kafka.bootstrap_servers, "compression.type": "lz4"}
    )
    for _ in range(4000):
        flood.produce(world.requests, b"{" * 100_000, partition=0)
        flood.poll(0.001 if len(flood) > 100 else 0)
    assert flood.flush(30) == 0
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    reader = RequestReader(access, most_records=4000, gather_s=0.005)
    large, small = Shard(world.requests, 0), Shard(world.requests, 1)
    for shard in (large, small):
        reader.start(shard, 0)
    read = {large: 0, small: 0}

    def read_until(shard: Shard, position: int) -> None:
        while read[shard] < position:
            batches, lost = reader.read()
            assert not lost
            for found, batch in batches.items():
                assert batch.start == read[found]
                read[found] = batch.end

    read_until(large, 1)
    world.send_raw(b"small", partition=1)
    world.flush()
    read_until(small, 1)
    assert read[large] < 2500
    read_until(large, 4000)
    reader.close()


def test_a_record_batch_larger_than_a_fetch_does_not_wait_for_the_backlog_of_another_shard(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_module, "STATISTICS_MS", 200)
    topic = f"{world.name}.large"
    world.create(NewTopic(topic, 2, config={"max.message.bytes": "5000000"}))
    settings = {"bootstrap.servers": world.kafka.bootstrap_servers, "linger.ms": 500}
    backlog = Producer(settings | {"compression.type": "lz4"})
    for _ in range(BACKLOG):
        produce(backlog, topic, b"x" * 100, None, 0)
    assert backlog.flush(30) == 0
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    reader = RequestReader(access, most_records=1000, gather_s=0.005)
    busy, other = Shard(topic, 0), Shard(topic, 1)
    for shard in (busy, other):
        reader.start(shard, 0)
    read = {busy: 0, other: 0}

    def read_some() -> None:
        batches, lost = reader.read()
        assert not lost
        for shard, batch in batches.items():
            assert batch.start == read[shard]
            read[shard] = batch.end

    while read[busy] < 1000:
        read_some()
    large = Producer(settings | {"message.max.bytes": 4_000_000, "batch.size": 4_000_000})
    for _ in range(30):  # in one batch
        large.produce(topic, os.urandom(100_000), partition=1)
    assert large.flush(30) == 0
    while read[other] < 30:
        read_some()
        time.sleep(
            0.02
        )  # storing a batch takes as long; else a busy machine reads the backlog first
    assert read[busy] < BACKLOG
    reader.close()


def test_a_shard_of_which_nothing_is_fetched_is_read_apart(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    starved = Shard(world.requests, 1)
    found = property(lambda client: {starved} & client.positions.keys())
    monkeypatch.setattr(request_client.RequestClient, "starved", found)
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    reader = RequestReader(access, most_records=100, gather_s=0.005)
    for partition in range(2):
        reader.start(Shard(world.requests, partition), 0)
    world.send_raw(b"x", partition=1)
    world.flush()
    reader.read(wait=False)
    assert [*reader._apart] == [starved]
    assert [*reader._together.positions] == [Shard(world.requests, 0)]
    assert len(until("it is read", lambda: reader.read()[0].get(starved)).records) == 1
    reader.close()


@pytest.mark.parametrize("seats", [1, 2])
def test_only_some_shards_are_read_apart_at_once_and_each_of_the_others_has_its_turn(
    world: World, monkeypatch: pytest.MonkeyPatch, seats: int
) -> None:
    monkeypatch.setattr(
        request_client.RequestClient, "starved", property(lambda client: set(client.positions))
    )
    monkeypatch.setattr(request_reader, "MOST_APART", seats)
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    reader = RequestReader(access, most_records=100, gather_s=0.005)
    shards = [Shard(world.requests, partition) for partition in range(world.partitions)]
    read = dict.fromkeys(shards, 0)
    were_apart = set[Shard]()
    for shard in shards:
        reader.start(shard, 0)

    def all_were_apart() -> bool:
        for shard in shards:
            world.send_raw(b"x", partition=shard.partition)
        world.flush()
        for shard, batch in reader.read()[0].items():
            assert batch.start == read[shard]
            read[shard] = batch.end
        assert len(reader._apart) <= seats
        were_apart.update(reader._apart)
        return len(were_apart) == len(shards)

    until("each shard has been read apart", all_were_apart)
    monkeypatch.setattr(request_client.RequestClient, "starved", property(lambda client: set()))
    until("all are read together", lambda: not reader.read()[0] and not reader._apart)
    assert {*reader._together.positions} == {*shards}
    reader.close()


def test_a_shard_that_was_stopped_during_a_failed_read_is_not_read_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    reader = RequestReader(access, most_records=100, gather_s=0.005)
    stopped, other = (Shard(world.requests, partition) for partition in range(2))
    for one in (stopped, other):
        reader.start(one, 0)
        world.send_raw(b"x", partition=one.partition)
    world.flush()
    reader.read(wait=False)

    def fails(messages: object) -> None:
        reader.stop(stopped)
        raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    with monkeypatch.context() as broken:
        broken.setattr(reader, "_batches", fails)
        with pytest.raises(RecoveryRequired):
            reader.read()

    assert until("the other is read", lambda: reader.read()[0].get(other)).start == 0
    assert [*reader._together.positions] == [other]
    reader.close()


@pytest.mark.parametrize("before", [0, 8], ids=["", "behind-megabytes-of-aborted-records"])
def test_small_batches_of_highly_compressed_records_do_not_fill_the_memory(
    world: World, shard: Shard, before: int
) -> None:
    aborts = transactional(world, "aborts")
    for _ in range(before):  # the client doubles its fetches when it can return nothing of one
        produce(aborts, world.requests, os.urandom(900_000), None, 0)
    assert aborts.flush(60) == 0  # otherwise the abort drops what was not sent
    aborts.abort_transaction(60)
    settings = {"bootstrap.servers": world.kafka.bootstrap_servers, "compression.type": "zstd"}
    producer = Producer(settings | {"linger.ms": 500})
    for _ in range(10_000):  # a gigabyte, in about a thousand batches
        produce(producer, world.requests, b"{" * 99_000, None, 0)
    assert producer.flush(60) == 0
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    reader = RequestReader(access, most_records=100, gather_s=0.005)
    process = psutil.Process()
    at_first = process.memory_info().rss
    reader.start(shard, 0)
    position, most = 0, 0
    while position < 10_000 + before:
        for batch in reader.read()[0].values():
            position = batch.end
        most = max(most, process.memory_info().rss - at_first)
    reader.close()
    assert most < 600_000_000


def test_batches_are_consecutive_over_aborted_transactions(
    world: World, journal: ShardJournal
) -> None:
    ask_in_transactions(world, "commit", "abort", "commit", "abort")
    end = journal.request_bounds().end
    position = 0
    values: list[bytes | None] = []
    for batch in journal.requests(0, end):
        assert batch.start == position
        position = batch.end
        values += [record.value for record in batch.records]
    assert position == end == 44
    assert values == [f"commit{number}".encode() for number in range(10)] * 2


@pytest.mark.parametrize("reads", ["a shard's journal", "ranges of many"])
def test_any_number_of_aborted_records_is_skipped(world: World, shard: Shard, reads: str) -> None:
    """The client returns nothing during that time. At length: some gigabytes, for longer than a partition may be silent."""
    producer = transactional(world, "aborts")
    for _ in range(5000 if AT_LENGTH else 100):
        produce(producer, world.requests, os.urandom(900_000), None, 0)
    assert producer.flush(60) == 0  # otherwise the abort drops what was not sent
    producer.abort_transaction(60)
    ask_in_transactions(world, "commit")
    access = KafkaAccess(world.kafka.bootstrap_servers, world.name)
    reader = PartitionReader(access, silence_s=1.2)
    with closing(ShardJournal(shard, access, reader=reader)) as journal:
        end = journal.request_bounds().end
        began = time.monotonic()
        if reads == "a shard's journal":
            found = [record.value for batch in journal.requests(0, end) for record in batch.records]
        else:
            chunks = read_ranges(access, [Range(*shard, 0, end)], silence_s=1.2)
            found = [message.value() for chunk in chunks for message in chunk.messages]

    print(f"{reads}: {end:,} offsets in {time.monotonic() - began:.1f} s")
    assert found == [f"commit{number}".encode() for number in range(10)]
