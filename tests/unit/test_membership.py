"""The settings of the consumer-group member."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Event, Thread
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


def test_a_stop_waits_for_a_join_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = Event(), Event()
    access = KafkaAccess("127.0.0.1:1", "unit", {"log_level": "0"})
    member = Membership(access, ["TB"], None, gained=lambda _: None, lost=lambda _: None)

    def join_slowly() -> None:
        begun.set()
        may_go_on.wait(10)

    monkeypatch.setattr(member, "_join", join_slowly)
    monkeypatch.setattr(member, "_run", lambda: None)
    member._thread = Thread(target=lambda: None)
    starting, closing = Thread(target=member.start), Thread(target=member.close)

    starting.start()
    begun.wait(10)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    may_go_on.set()
    for one in (starting, closing):
        one.join(10)
        assert not one.is_alive()
    assert not member._thread.is_alive()
