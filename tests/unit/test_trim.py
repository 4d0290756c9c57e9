"""What is removed from the journals, in which order, and what is kept."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

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


class Written(NamedTuple):
    """A record, as far as trimming looks at it."""

    at: int
    at_ms: int

    def offset(self) -> int:
        return self.at

    def timestamp(self) -> tuple[int, int]:
        return 1, self.at_ms


@dataclass
class Kafka:
    """Two topics of a hundred records, one a millisecond, the last one now; removals are recorded."""

    settings: dict[str, Any] = field(
        default_factory=lambda: {"TB": FOR_EVER, "TB.receipts": FOR_EVER}
    )
    removed: list[tuple[str, int, int]] = field(default_factory=list)
    refusals: dict[str, KafkaError] = field(default_factory=dict)
    future: dict[int, int] = field(default_factory=dict)

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
        late = [at for at in range(100) if self.future.get(at, NOW_MS - 100 + at) >= at_ms]
        return min(late, default=None)

    def read(self, topic: str, partition: int, start: int, end: int) -> Generator[Any]:
        for offset in range(start, end):
            yield [Written(offset, self.future.get(offset, NOW_MS - 100 + offset))], offset + 1

    def close(self) -> None: ...


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Kafka:
    kafka = Kafka()

    class Described:
        def __init__(self, _: object) -> None: ...

        def settings(self, topics: list[str]) -> dict[str, Any]:
            return {topic: kafka.settings[topic] for topic in topics}

    monkeypatch.setattr("blackbox.journal.trim.Topics", Described)
    monkeypatch.setattr("blackbox.journal.trim.PartitionReader", lambda *_, **__: kafka)
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


@pytest.mark.parametrize("future", [[10], [10, 11, 12, 40], [0], [29], [49], range(5, 25)])
def test_a_record_from_the_future_does_not_keep_older_ones(
    kafka: Kafka, future: Iterable[int]
) -> None:
    """As of a broker whose clock was a year ahead for a moment."""
    kafka.future = dict.fromkeys(future, NOW_MS + 365 * 86_400_000)

    trim(kafka, Mark(50, 50), kept_ms=70)

    assert [upto for _, _, upto in kafka.removed] == [30, 30]


def test_after_a_failure_a_new_client_trims(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Kafka(refusals={"TB": KafkaError(KafkaError._ALL_BROKERS_DOWN)})
    clients = iter([broken, kafka])
    monkeypatch.setattr(KafkaAccess, "admin", lambda _: next(clients))
    trimmer = Trimmer(KafkaAccess("127.0.0.1:1", "unit"), KEPT_MS)
    shard, mark = Shard("TB", 0), Mark(50, 50)

    with pytest.raises(JournalLost):
        trimmer.trim(shard, mark, NOW_MS + KEPT_MS)
    trimmer.trim(shard, mark, NOW_MS + KEPT_MS)

    assert kafka.removed == [("TB", 0, 50), ("TB.receipts", 0, 50)]
