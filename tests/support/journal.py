"""Writes and reads of request topics, without a service."""

from __future__ import annotations

from contextlib import closing

from confluent_kafka import Producer

from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.message_conversion import read_records
from blackbox.journal.ranges import Range, read_ranges
from blackbox.journal.shard_journal import ShardJournal
from blackbox.records.request import Record, Shard
from tests.support.world import World

WAYS = ("a shard's journal", "ranges of many")


def read_from(way: str, shard: Shard, access: KafkaAccess, start: int, end: int) -> list[Record]:
    """The records from `start` to before `end`, read in one of the `WAYS`."""
    if way == "ranges of many":
        chunks = read_ranges(access, [Range(*shard, start, end)])
        return [record for chunk in chunks for record in read_records(chunk.messages)]
    with closing(ShardJournal(shard, access)) as journal:
        return [record for batch in journal.requests(start, end) for record in batch.records]


def transactional(world: World, name: str) -> Producer:
    """A producer in a transaction."""
    producer = Producer(
        {"bootstrap.servers": world.kafka.bootstrap_servers, "transactional.id": f"{world.name}-{name}"}
    )  # fmt: skip
    producer.init_transactions(30)
    producer.begin_transaction()
    return producer
