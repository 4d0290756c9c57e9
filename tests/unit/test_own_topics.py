from __future__ import annotations

from collections.abc import Mapping

import pytest

from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.own_topics import OwnTopics
from blackbox.records.errors import JournalLost
from blackbox.records.request import Shard

NOWHERE = KafkaAccess("127.0.0.1:1", "unit", {"log_level": "0"})


class Brokers:
    """Partition counts of a request topic and its receipts; `asked` counts the lookups."""

    def __init__(self, requests: int, receipts: int) -> None:
        self.counts = {"TB": requests, "TB.receipts": receipts}
        self.asked = 0
        self.answer = True

    def partitions(self, names: list[str], to: str = "") -> Mapping[str, int]:
        self.asked += names == ["TB"]
        if not self.answer:
            raise JournalLost("nobody answers")
        return {name: self.counts[name] for name in names}


class NoTopics:
    def partitions(self, names: list[str], to: str = "") -> Mapping[str, int]:
        return {}


@pytest.fixture
def brokers() -> Brokers:
    return Brokers(4, 4)


@pytest.fixture
def own(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> OwnTopics:
    own = OwnTopics(NOWHERE, ["TB"], "dead")
    monkeypatch.setattr(own, "_topics", brokers)
    monkeypatch.setattr(own, "_open", lambda: None)

    def grow(futures: object, name: str) -> None:
        brokers.counts[name] = brokers.counts["TB"]

    monkeypatch.setattr(own, "_wait", grow)
    return own


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("blackbox.journal.own_topics.time.monotonic", lambda: now[0])
    return now


def shards(count: int) -> list[Shard]:
    return [Shard("TB", partition) for partition in range(count)]


def test_a_new_partition_gets_its_receipts_partition_at_once(
    own: OwnTopics, brokers: Brokers, clock: list[float]
) -> None:
    own.grow_receipts(shards(4))
    brokers.counts["TB"] = 7

    clock[0] += 1
    own.grow_receipts(shards(7))

    assert brokers.counts["TB.receipts"] == 7


def test_a_new_receipts_topic_takes_large_receipts_whatever_the_default_of_the_brokers(
    own: OwnTopics, brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[tuple[str, str | None]] = []

    def create(name: str, partitions: int, settings: Mapping[str, str]) -> None:
        created.append((name, settings.get("max.message.bytes")))

    monkeypatch.setattr(own, "_create", create)
    brokers.counts["TB.receipts"] = 0

    own.grow_receipts(shards(4))

    assert created == [("TB.receipts", "1048588")]


def test_kafka_removes_nothing_from_new_topics_by_age_or_size_whatever_the_defaults_of_the_brokers(
    own: OwnTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: dict[str, tuple[str | None, str | None]] = {}

    def create(name: str, partitions: int, settings: Mapping[str, str]) -> None:
        created[name] = settings.get("retention.ms"), settings.get("retention.bytes")

    monkeypatch.setattr(own, "_create", create)
    monkeypatch.setattr(own, "_topics", NoTopics())

    own.ensure()

    assert created == dict.fromkeys(("TB", "TB.receipts", "dead"), ("-1", "-1"))


def test_partition_counts_are_read_every_10_s(
    own: OwnTopics, brokers: Brokers, clock: list[float]
) -> None:
    for _ in range(30):
        own.grow_receipts(shards(4))
        clock[0] += 1
    assert brokers.asked == 3

    brokers.answer = False
    for _ in range(30):
        own.grow_receipts(shards(7))
        clock[0] += 1
    assert brokers.asked == 6
