"""The live reader of request topics: one consumer for all shards of a process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import SimpleQueue

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from blackbox.core.plan import Batch
from blackbox.journal.kafka_access import KafkaAccess, explained, journal_error, read_right
from blackbox.journal.message_conversion import leader_epochs, read_records
from blackbox.records.errors import RecoveryRequired
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.journal")

FIRST_RECORD_S = 0.5
PATIENCE_S = 5.0
# A batch of 4,000 records of 1 MB would take 4 GB: its size is looked at after each so many records.
AT_ONCE, MOST_BYTES = 100, 16_000_000


class Lost(RecoveryRequired):
    """One shard can no longer be read at its position."""

    def __init__(self, shard: Shard, detail: str) -> None:
        super().__init__(f"{shard}: {detail}")
        self.shard = shard


class RequestReader:
    """Reads the shards that were started, each from its own position on.

    `start`, `stop`, `pause` and `resume` may be called from any thread. They take effect at the start
    of the next `read`, so no batch comes from an abandoned position.
    """

    def __init__(self, access: KafkaAccess, *, most_records: int, gather_s: float) -> None:
        self._access = access
        self._open()
        self._most = most_records
        self._gather_s = gather_s
        self._positions: dict[Shard, int] = {}
        self._asked: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._paused = False

    def start(self, shard: Shard, offset: int) -> None:
        """Read this shard from `offset` on, also if it was being read from elsewhere."""
        self._asked.put(lambda: self._start(shard, offset))

    def stop(self, shard: Shard) -> None:
        self._asked.put(lambda: self._stop(shard))

    def pause(self) -> None:
        """Leave all requests in Kafka until `resume`."""
        self._asked.put(lambda: self._pause(True))

    def resume(self) -> None:
        self._asked.put(lambda: self._pause(False))

    def read(self, *, wait: bool = True) -> tuple[dict[Shard, Batch], list[Lost]]:
        """Wait up to 0.5 s for a record, then gather more for `gather_s`, up to about 16 MB.

        Returns a batch per shard, and the shards that can no longer be read. Without `wait`, returns
        only records that are already fetched.
        """
        while not self._asked.empty():  # only this thread takes from it
            self._asked.get()()
        if self._monitor.is_lost:
            self._open_again()
        before = dict(self._positions)
        try:
            first = self._consumer.poll(FIRST_RECORD_S if wait else 0)
            if first is None:
                return {}, []
            return self._batches(self._gathered(first, self._gather_s if wait else 0))
        except BaseException as error:
            for shard, offset in before.items():
                self.start(shard, offset)  # records that were taken and not returned are read again
            if isinstance(error, KafkaException):
                raise journal_error(error, "cannot read request topics") from None
            raise

    def close(self) -> None:
        self._consumer.close()

    def _gathered(self, first: Message, gather_s: float) -> list[Message]:
        messages, size = [first], len(first)
        ends_s = time.monotonic() + gather_s
        while len(messages) < self._most and size < MOST_BYTES:
            at_most = min(AT_ONCE, self._most - len(messages))
            more = self._consumer.consume(at_most, timeout=max(0.0, ends_s - time.monotonic()))
            if not more:
                break
            messages += more
            size += sum(map(len, more))
        return messages

    def _open(self) -> None:
        # By default, a client whose queue was full fetches again only after a second.
        self._consumer, self._monitor = self._access.watched_consumer(
            PATIENCE_S, **{"fetch.queue.backoff.ms": 5, "queued.max.messages.kbytes": 65536}
        )

    def _open_again(self) -> None:
        logger.warning(
            "reading requests: no connection for a while; replacing the client, which knew %s",
            self._monitor.known,
        )
        self._consumer.close()
        self._open()
        positions, self._positions = self._positions, {}
        for shard, offset in positions.items():
            self._start(shard, offset)

    def _batches(self, messages: list[Message]) -> tuple[dict[Shard, Batch], list[Lost]]:
        by_shard: dict[tuple[str | None, int | None], list[Message]] = {}
        for message in messages:
            by_shard.setdefault((message.topic(), message.partition()), []).append(message)
        batches: dict[Shard, Batch] = {}
        lost: list[Lost] = []
        for (topic, partition), found in by_shard.items():
            if topic is None or partition is None:
                continue
            shard = Shard(topic, partition)
            errors = [error for message in found if (error := message.error()) is not None]
            for error in errors:
                why = explained(error, read_right(error, topic, self._access.group_id))
                logger.warning("%s: %s; continuing to read", shard, why)
            read = [m for m in found if m.error() is None] if errors else found
            records = read_records(read)
            if any(_is_final(error) for error in errors):
                lost.append(Lost(shard, errors[0].str()))
            elif records and shard in self._positions:
                # Not the first record's offset: transaction markers leave gaps before it.
                start, end = self._positions[shard], records[-1].offset + 1
                self._positions[shard] = end
                batches[shard] = Batch(start, end, records, leader_epochs(read))
        return batches, lost

    def _start(self, shard: Shard, offset: int) -> None:
        self._stop(shard)
        at = TopicPartition(shard.topic, shard.partition, offset)
        self._consumer.incremental_assign([at])
        self._positions[shard] = offset
        if self._paused:  # `_pause` paused only the partitions that were assigned at that moment
            self._consumer.pause([TopicPartition(shard.topic, shard.partition)])

    def _stop(self, shard: Shard) -> None:
        if self._positions.pop(shard, None) is not None:
            self._consumer.incremental_unassign([TopicPartition(shard.topic, shard.partition)])

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        everywhere = [TopicPartition(shard.topic, shard.partition) for shard in self._positions]
        if paused:
            self._consumer.pause(everywhere)
        else:
            self._consumer.resume(everywhere)


def _is_final(error: KafkaError) -> bool:
    return error.code() in (
        KafkaError._AUTO_OFFSET_RESET,
        KafkaError.OFFSET_OUT_OF_RANGE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
    )
