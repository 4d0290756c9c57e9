"""The targets that an audit reads: what it asks the brokers about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from blackbox.config.settings import load
from blackbox.jobs.audit import targets
from blackbox.jobs.audit.targets import TargetPartitions
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.ranges import Range
from blackbox.journal.topics import Described, Topics, TopicSettings
from blackbox.records.errors import NotAllowed

SETTINGS = load(kafka_bootstrap_servers="127.0.0.1:1", request_topics="schedules:scheduler")
KEPT = TopicSettings(-1, -1, "delete", "CreateTime", 1_000_000)


class FixedEnds:
    def __init__(self, access: KafkaAccess, isolation: str = "read_committed") -> None:
        self._end = 9 if isolation == "read_committed" else 11

    def first(self, partitions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        return dict.fromkeys(partitions, 3)

    def last(self, partitions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        return dict.fromkeys(partitions, self._end)

    def close(self) -> None: ...


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> dict[str, Described]:
    monkeypatch.setattr(targets, "ReadableBounds", FixedEnds)
    return {}


def named(
    names: Sequence[str], described: dict[str, Described], monkeypatch: pytest.MonkeyPatch
) -> tuple[TargetPartitions, list[list[str]]]:
    """The targets of these names, and what the brokers were asked for."""
    asked: list[list[str]] = []

    def describe(_: Topics, names: Sequence[str]) -> dict[str, Described]:
        asked.append(list(names))
        return {name: described[name] for name in names if name in described}

    monkeypatch.setattr(Topics, "describe", describe)
    access = KafkaAccess("127.0.0.1:1", "group")
    session: Any = None
    return TargetPartitions.named(names, session, SETTINGS, access), asked


def test_the_brokers_are_asked_once_for_all_targets_that_callers_name(
    described: dict[str, Described], monkeypatch: pytest.MonkeyPatch
) -> None:
    described |= {
        "orders": Described(1, KEPT),
        "state": Described(2, KEPT._replace(cleanup_policy="compact,delete")),
        "hidden settings": Described(1, "not allowed"),
    }
    invented = [f"invented-{number}" for number in range(100)]

    found, asked = named([*described, *invented, SETTINGS.history_topic], described, monkeypatch)

    assert asked == [[*described, *invented]]
    assert (found.topics, found.compacted) == (sorted(described), {"state"})
    assert Range("state", 1, 3, 9) in found.partitions
    assert set(found.written_to) == {11}


def test_a_target_that_may_not_be_described_is_named_with_the_permission(
    described: dict[str, Described], monkeypatch: pytest.MonkeyPatch
) -> None:
    described["orders"] = Described(None, "Broker: Topic authorization failed")

    with pytest.raises(NotAllowed, match="grant Read on topic orders"):
        named(["orders"], described, monkeypatch)
