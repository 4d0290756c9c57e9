"""What is removed from the journals, in which order, and what is kept."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from blackbox.core.plan import Bounds
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.topics import TopicSettings
from blackbox.journal.trim import Trimmer
from blackbox.records.errors import JournalLost
from blackbox.records.receipt import Mark
from blackbox.records.request import Shard

NOW_MS = 1_000_000
KEPT_MS = 1000
FOR_EVER = TopicSettings(-1, -1, "delete", "LogAppendTime", 1 << 20)


@dataclass
class Kafka:
    """Two topics of a hundred records, one a millisecond, the last one now; removals are recorded."""

    settings: dict[str, Any] = field(
        default_factory=lambda: {"TB": FOR_EVER, "TB.receipts": FOR_EVER}
    )
    removed: list[tuple[str, int, int]] = field(default_factory=list)
    refusals: dict[str, KafkaError] = field(default_factory=dict)

    def admin(self) -> Kafka:
        return self

    def delete_records(self, places: list[TopicPartition], **_: object) -> dict[Any, Any]:
        [at] = places
        answer: Future[object] = Future()
        if at.topic in self.refusals:
            answer.set_exception(KafkaException(self.refusals[at.topic]))
        else:
            self.removed.append((at.topic, at.partition, at.offset))
            answer.set_result(None)
        return {at: answer}

    def bounds(self, topic: str, partition: int) -> Bounds:
        return Bounds(0, 100)

    def first_since(self, topic: str, partition: int, at_ms: int) -> int | None:
        offset = at_ms - (NOW_MS - 100)
        return max(0, offset) if offset < 100 else None

    def close(self) -> None: ...


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Kafka:
    kafka = Kafka()

    class Described:
        def __init__(self, _: object) -> None: ...

        def settings(self, topics: list[str]) -> dict[str, Any]:
            return {topic: kafka.settings[topic] for topic in topics}

    monkeypatch.setattr("blackbox.journal.trim.Topics", Described)
    monkeypatch.setattr("blackbox.journal.trim.PartitionReader", lambda _: kafka)
    return kafka


def trim(kafka: Kafka, mark: Mark, kept_ms: int = 0) -> None:
    Trimmer(cast(KafkaAccess, kafka), kept_ms).trim(Shard("TB", 2), mark, NOW_MS)


def test_requests_are_trimmed_before_their_receipts(kafka: Kafka) -> None:
    trim(kafka, Mark(50, 40))

    assert kafka.removed == [("TB", 2, 50), ("TB.receipts", 2, 40)]


def test_records_younger_than_the_retention_are_not_trimmed(kafka: Kafka) -> None:
    trim(kafka, Mark(50, 40), kept_ms=70)

    assert kafka.removed == [("TB", 2, 30), ("TB.receipts", 2, 30)]


@pytest.mark.parametrize(
    "settings",
    [
        FOR_EVER._replace(retention_ms=604_800_000),
        FOR_EVER._replace(cleanup_policy="compact"),
        FOR_EVER._replace(cleanup_policy="compact,delete"),
        "not allowed to look",
    ],
)
def test_a_topic_with_its_own_retention_or_compaction_is_not_trimmed(
    kafka: Kafka, settings: Any
) -> None:
    kafka.settings["TB"] = settings

    trim(kafka, Mark(50, 40))

    assert kafka.removed == [("TB.receipts", 2, 40)]


def test_receipts_are_not_trimmed_without_the_permission_to_trim_requests(kafka: Kafka) -> None:
    kafka.refusals["TB"] = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)

    trim(kafka, Mark(50, 40))

    assert kafka.removed == []


def test_requests_that_cannot_be_removed_keep_their_receipts(kafka: Kafka) -> None:
    kafka.refusals["TB"] = KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION)

    with pytest.raises(JournalLost, match="cannot remove records"):
        trim(kafka, Mark(50, 40))

    assert kafka.removed == []
