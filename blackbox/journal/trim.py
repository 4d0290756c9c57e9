"""Removal of journal records that no rebuild needs any more."""

from __future__ import annotations

import logging
from contextlib import closing

from confluent_kafka import KafkaException, TopicPartition

from blackbox.journal.kafka_access import (
    REQUEST_TIMEOUT_S,
    KafkaAccess,
    explained,
    is_not_allowed,
    outcome,
)
from blackbox.journal.partition_reader import PartitionReader
from blackbox.journal.polled_messages import offset_of
from blackbox.journal.timestamp_search import first_within
from blackbox.journal.topics import FOR_EVER, Topics, TopicSettings, receipts_topic
from blackbox.records.errors import JournalLost
from blackbox.records.receipt import Mark
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.journal.trim")

FUTURE_MS = 60_000
"""A timestamp that is later than this from now was written by a clock that was ahead."""


class Trimmer:
    """Removes requests and receipts below a mark, once they are old. Not safe for use from two threads.

    Only from topics that Kafka keeps without limit and does not compact. Topics from which
    Kafka removes records by age are left alone.
    """

    def __init__(self, access: KafkaAccess, retention_ms: int) -> None:
        self._access = access
        self._retention_ms = retention_ms
        self._warned: set[str] = set()
        self._open()

    def trim(self, shard: Shard, mark: Mark, now_ms: int) -> None:
        """Remove what is below the mark and older than the retention.

        Raises JournalLost when Kafka does not answer.
        """
        try:
            self._trim(shard, mark, now_ms)
        except JournalLost:
            self._open()  # a client may lose sight of all brokers, or have an old certificate
            raise

    def _open(self) -> None:
        self._admin = self._access.admin()
        self._topics = Topics(self._admin)

    def _trim(self, shard: Shard, mark: Mark, now_ms: int) -> None:
        topics = [shard.topic, receipts_topic(shard.topic)]
        settings = self._topics.settings(topics)
        # Single records are looked at: what is fetched ahead would be thrown away.
        with closing(PartitionReader(self._access, prefetched=1)) as reader:
            # Requests first: a receipt without its request is harmless, but a request without its
            # receipt would be delivered again. For the same reason a failure ends the loop.
            for topic, upto in zip(topics, (mark.requests, mark.receipts), strict=True):
                if not is_ours_to_trim(settings[topic]):
                    continue
                bounds = reader.bounds(topic, shard.partition)
                upto = self._first_within(
                    reader, topic, shard.partition, min(upto, bounds.end), now_ms
                )
                if upto > bounds.start and not self._remove(topic, shard.partition, upto):
                    return

    def _first_within(
        self, reader: PartitionReader, topic: str, partition: int, end: int, now_ms: int
    ) -> int:
        """The offset, `end` at most, below which all records are older than the retention."""
        since_ms, latest_ms = now_ms - self._retention_ms, now_ms + FUTURE_MS
        found = reader.first_since(topic, partition, since_ms)
        if found is None or found >= end:
            return end

        def record_from(offset: int) -> tuple[int, int] | None:
            with closing(reader.read(topic, partition, offset, end)) as read:
                for messages, _ in read:
                    for message in messages:
                        return offset_of(message), message.timestamp()[1]
            return None

        first = record_from(found)
        if first is None or first[1] <= latest_ms:
            return found
        return first_within(record_from, found + 1, end, since_ms, latest_ms)

    def remove_receipts(self, shard: Shard, upto: int) -> None:
        """Remove receipts below the offset `upto` of any age. Raises JournalLost when Kafka does not answer."""
        topic = receipts_topic(shard.topic)
        if upto > 0 and is_ours_to_trim(self._topics.settings([topic])[topic]):
            self._remove(topic, shard.partition, upto)

    def _remove(self, topic: str, partition: int, upto: int) -> bool:
        [asked] = self._admin.delete_records(
            [TopicPartition(topic, partition, upto)], request_timeout=REQUEST_TIMEOUT_S
        ).values()
        try:
            outcome(asked)
        except KafkaException as error:
            cause = error.args[0]
            if not is_not_allowed(cause):
                raise JournalLost(
                    f"{topic}/{partition}: cannot remove records: {cause.str()}"
                ) from error
            if topic not in self._warned:
                self._warned.add(topic)
                logger.warning(
                    "%s: records that are no longer needed stay in Kafka: %s", topic,
                    explained(cause, f"Delete on topic {topic}"),
                )  # fmt: skip
            return False
        logger.info("%s/%d: removed the records below %d", topic, partition, upto)
        return True


def is_ours_to_trim(settings: TopicSettings | str) -> bool:
    """Whether only blackbox removes records from a topic with these settings."""
    return (
        isinstance(settings, TopicSettings)
        and settings.cleanup_policy == "delete"
        and settings.retention_ms == FOR_EVER
    )
