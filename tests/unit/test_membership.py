"""The settings of the consumer-group member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from blackbox.journal import kafka_access as access_module
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.membership import Membership


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """The settings of the consumers that are made."""
    asked: list[Mapping[str, Any]] = []
    monkeypatch.setattr(access_module, "Consumer", asked.append)
    return asked


def join(settings: Mapping[str, str], instance_id: str | None = None) -> None:
    access = KafkaAccess("127.0.0.1:1", "unit", settings)
    Membership(access, ["TB"], instance_id, gained=lambda _: None, lost=lambda _: None)


def test_the_group_gives_the_shards_of_a_killed_process_to_others_after_6_s(
    asked: list[Mapping[str, Any]],
) -> None:
    join({})

    [settings] = asked
    assert settings["session.timeout.ms"] == 6_000
    # three lost heartbeats in a row do not look like a killed process
    assert settings["heartbeat.interval.ms"] * 4 < settings["session.timeout.ms"]
    assert "group.instance.id" not in settings


def test_an_operator_can_set_the_session_timeout(asked: list[Mapping[str, Any]]) -> None:
    join({"session.timeout.ms": "30000"})

    assert asked[0]["session.timeout.ms"] == "30000"


def test_a_process_joins_under_its_instance_id(asked: list[Mapping[str, Any]]) -> None:
    join({}, "blackbox-1")

    assert asked[0]["group.instance.id"] == "blackbox-1"
