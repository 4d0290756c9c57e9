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
from blackbox.journal.topics import FOR_EVER, Topics, TopicSettings, receipts_topic
from blackbox.records.errors import JournalLost
from blackbox.records.receipt import Mark
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.journal.trim")


class Trimmer:
    """Removes requests and receipts below a mark, once they are old. Not safe for use from two threads.

    Only from topics that Kafka keeps without limit and does not compact. Topics from which
    Kafka removes records by age are left alone.
    """

    def __init__(self, access: KafkaAccess, retention_ms: int) -> None:
        self._access = access
        self._retention_ms = retention_ms
        self._admin = access.admin()
        self._topics = Topics(self._admin)
        self._warned: set[str] = set()

    def trim(self, shard: Shard, mark: Mark, now_ms: int) -> None:
        """Remove what is below the mark and older than the retention.

        Raises JournalLost when Kafka does not answer.
        """
        topics = [shard.topic, receipts_topic(shard.topic)]
        settings = self._topics.settings(topics)
        with closing(PartitionReader(self._access)) as reader:
            # Requests first: a receipt without its request is harmless, but a request without its
            # receipt would be delivered again. For the same reason a failure ends the loop.
            for topic, upto in zip(topics, (mark.requests, mark.receipts), strict=True):
                if not is_ours_to_trim(settings[topic]):
                    continue
                bounds = reader.bounds(topic, shard.partition)
                old = reader.first_since(topic, shard.partition, now_ms - self._retention_ms)
                upto = min(upto, bounds.end if old is None else old)
                if upto > bounds.start and not self._remove(topic, shard.partition, upto):
                    return

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
