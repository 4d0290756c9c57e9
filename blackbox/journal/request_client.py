"""One consumer of request topics, which reads its shards from given offsets on."""

from __future__ import annotations

import logging
import time

from confluent_kafka import Message, TopicPartition

from blackbox.journal.kafka_access import KafkaAccess
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.journal")

PATIENCE_S = 5.0
# A batch of 4,000 records of 1 MB would take 4 GB: its size is looked at after each so many records.
AT_ONCE, MOST_BYTES = 100, 16_000_000


class RequestClient:
    """Reads shards with one consumer, which is replaced when it has lost its connection.

    `positions` are the next offsets of the shards that it reads; the caller advances them.
    Not safe for use from two threads at once.
    """

    def __init__(self, access: KafkaAccess) -> None:
        self._access = access
        self._paused = False
        self.positions: dict[Shard, int] = {}
        self._open()

    def start(self, shard: Shard, offset: int) -> None:
        self.stop(shard)
        at = TopicPartition(shard.topic, shard.partition, offset)
        self._consumer.incremental_assign([at])
        self.positions[shard] = offset
        if self._paused:  # `pause` paused only the partitions that were assigned at that moment
            self._consumer.pause([TopicPartition(shard.topic, shard.partition)])

    def stop(self, shard: Shard) -> None:
        if self.positions.pop(shard, None) is not None:
            self._consumer.incremental_unassign([TopicPartition(shard.topic, shard.partition)])

    def pause(self, paused: bool) -> None:
        self._paused = paused
        everywhere = [TopicPartition(shard.topic, shard.partition) for shard in self.positions]
        if paused:
            self._consumer.pause(everywhere)
        else:
            self._consumer.resume(everywhere)

    def read(self, most: int, wait_s: float, gather_s: float) -> tuple[list[Message], bool]:
        """Wait up to `wait_s` for a message, then for more as long as `gather_s` says.

        Returns at most `most` messages of about 16 MB, and whether it was their size that ended the read.
        """
        self._replace_if_lost()
        first = self._consumer.poll(wait_s)
        if first is None:
            return [], False
        messages, size = [first], len(first)
        ends_s = time.monotonic() + gather_s
        while len(messages) < most and size < MOST_BYTES:
            at_most = min(AT_ONCE, most - len(messages))
            more = self._consumer.consume(at_most, timeout=max(0.0, ends_s - time.monotonic()))
            if not more:
                break
            messages += more
            size += sum(map(len, more))
        return messages, size >= MOST_BYTES

    def close(self) -> None:
        self._consumer.close()

    def _open(self) -> None:
        # By default, a client whose queue was full fetches again only after a second.
        self._consumer, self._monitor = self._access.watched_consumer(
            PATIENCE_S, **{"fetch.queue.backoff.ms": 5, "queued.max.messages.kbytes": 65536}
        )

    def _replace_if_lost(self) -> None:
        if not self._monitor.is_lost:
            return
        logger.warning(
            "reading requests: no connection for a while; replacing the client, which knew %s",
            self._monitor.known,
        )
        self._consumer.close()
        self._open()
        positions, self.positions = self.positions, {}
        for shard, offset in positions.items():
            self.start(shard, offset)
