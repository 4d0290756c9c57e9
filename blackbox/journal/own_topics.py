"""The topics that blackbox owns: creates them, and keeps as many receipts partitions as request partitions."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import NewPartitions, NewTopic

from blackbox.journal.kafka_access import REQUEST_TIMEOUT_S, KafkaAccess
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.records.errors import JournalLost
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.journal")

# Seconds between two checks of receipts: while a shard of this process lacks them, and otherwise.
GROW_RECEIPTS_EVERY_S, PARTITIONS_KNOWN_FOR_S = 1, 10

# Journals: blackbox removes what has ended, and Kafka must remove nothing by age or size, whatever the brokers'
# log.retention.bytes.
UNLIMITED_RETENTION = {"retention.ms": "-1", "retention.bytes": "-1", "cleanup.policy": "delete"}

# With the broker's clock, a caller's slow clock makes no message early.
BROKER_TIMESTAMPS = {"message.timestamp.type": "LogAppendTime"}

# Kafka's default, whatever that of the brokers: a shard whose receipt they refuse delivers nothing more.
ROOM_FOR_RECEIPTS = {"max.message.bytes": "1048588"}

NEW_TOPIC_PARTITIONS = 4


@dataclass(eq=False, repr=False)
class OwnTopics:
    """The topics of one deployment: creates missing ones, and gives receipts as many partitions as requests."""

    access: KafkaAccess
    request_topics: Sequence[str]
    dead_letter_topic: str
    output_topics: Sequence[str] = ()
    oscillator_topic: str | None = None
    compacted: Collection[str] = ()

    def __post_init__(self) -> None:
        self._known: dict[str, int] = {}
        self._ask_again_at_s, self._has_failed = 0.0, False
        self._open()

    def ensure(self) -> None:
        """Create missing topics and receipts partitions. Raises JournalLost when that cannot be done.

        Request topics in `compacted` are created with the cleanup policy `compact`.
        """
        seconds = [] if self.oscillator_topic is None else [self.oscillator_topic]
        wanted: dict[str, tuple[int, dict[str, str]]] = {}
        for topic in self.request_topics:
            policy = {"cleanup.policy": "compact"} if topic in self.compacted else {}
            wanted[topic] = NEW_TOPIC_PARTITIONS, UNLIMITED_RETENTION | BROKER_TIMESTAMPS | policy
        wanted[self.dead_letter_topic] = 1, UNLIMITED_RETENTION
        wanted |= dict.fromkeys(self.output_topics, (NEW_TOPIC_PARTITIONS, {}))
        wanted |= dict.fromkeys(seconds, (1, {}))
        try:
            counts = self._topics.partitions(self.request_topics, to="Read")
            counts |= self._topics.partitions([self.dead_letter_topic], to="Read and Write")
            counts |= self._topics.partitions(self.output_topics, to="Write")
            counts |= self._topics.partitions(seconds, to="Read and Write")
            for topic, create_with in wanted.items():
                if topic not in counts:
                    self._create(topic, *create_with)
            for topic in self.request_topics:
                self._ensure_receipts(topic, counts.get(topic, NEW_TOPIC_PARTITIONS))
        except JournalLost:
            self._open()  # the client may have lost sight of all brokers
            raise

    def grow_receipts(self, owned: Iterable[Shard]) -> None:
        """Give receipts topics as many partitions as their request topics have now.

        Called every second. Asks the brokers at once when a shard in `owned` has no receipts partition,
        else every 10 s.
        """
        now = time.monotonic()
        is_lacking = any(shard.partition >= self._known.get(shard.topic, 0) for shard in owned)
        # After a failure the brokers get a pause, even while a shard lacks its partition.
        if now < self._ask_again_at_s and (self._has_failed or not is_lacking):
            return
        self._ask_again_at_s, self._has_failed = now + PARTITIONS_KNOWN_FOR_S, False
        try:
            for topic, count in self._topics.partitions(self.request_topics).items():
                self._ensure_receipts(topic, count)
        except JournalLost as reason:
            logger.warning("%s; retrying in %d s", reason, PARTITIONS_KNOWN_FOR_S)
            self._has_failed = True
            self._open()

    def _open(self) -> None:
        self._admin = self.access.admin()
        self._topics = Topics(self._admin)

    def _ensure_receipts(self, topic: str, wanted: int) -> None:
        name = receipts_topic(topic)
        have = self._topics.partitions([name], to="Read and Write").get(name, 0)
        if have == 0:
            settings = UNLIMITED_RETENTION | BROKER_TIMESTAMPS | ROOM_FOR_RECEIPTS
            self._create(name, wanted, settings)
        elif have < wanted:
            logger.warning(
                "%s now has %d partitions, %s has %d; adding the missing ones. The key of an id "
                "may now select another partition: a later request with the id does not replace "
                "one that is pending in the former partition, and both are delivered; cancel such "
                "ids over HTTP",
                topic, wanted, name, have,
            )  # fmt: skip
            self._wait(self._admin.create_partitions([NewPartitions(name, wanted)]), name)
        self._known[topic] = max(have, wanted)

    def _create(self, name: str, partitions: int, settings: Mapping[str, str]) -> None:
        logger.info("creating the topic %s with %d partitions", name, partitions)
        new = NewTopic(name, num_partitions=partitions, config=dict(settings))
        self._wait(self._admin.create_topics([new]), name)

    def _wait(self, futures: Mapping[str, Future[None]], name: str) -> None:
        try:
            futures[name].result(timeout=REQUEST_TIMEOUT_S * 4)
        except KafkaException as error:
            # Another process of the deployment may have created the topic since it was looked up.
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise JournalLost(
                    f"cannot create or grow the topic {name}: {error.args[0].str()}; create or "
                    f"grow it manually, or grant Create and Alter on topic {name}"
                ) from None
