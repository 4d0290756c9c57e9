"""Which shards Kafka returns anything of."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing

from confluent_kafka import TopicPartition

from blackbox.journal.kafka_access import KafkaAccess
from blackbox.records.request import Shard


def answering_shards(
    access: KafkaAccess, starts: Mapping[Shard, int], within_s: float
) -> set[Shard]:
    """The shards for which Kafka returns anything from these offsets on.

    That is a record, the end of the partition, an error, or progress over aborted records.
    """
    consumer, fetched = access.fetching_consumer(**{"enable.partition.eof": True})
    waiting = set(starts)
    deadline = time.monotonic() + within_s
    with closing(consumer):
        consumer.assign([TopicPartition(*shard, start) for shard, start in starts.items()])
        while waiting and time.monotonic() < deadline:
            message = consumer.poll(0.1)
            if message is not None and message.topic() is not None:
                waiting.discard(Shard(message.topic() or "", message.partition() or 0))
        aborted = {shard for shard in waiting if fetched.next_offset(*shard) > starts[shard]}
    return starts.keys() - (waiting - aborted)
