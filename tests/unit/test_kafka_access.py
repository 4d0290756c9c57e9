from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer

from blackbox.journal import kafka_access
from blackbox.journal.kafka_access import FIXED_SETTINGS, ConnectionMonitor, KafkaAccess


@pytest.mark.parametrize("name", FIXED_SETTINGS)
def test_a_kafka_setting_that_the_guarantees_depend_on_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must not be set"):
        KafkaAccess("127.0.0.1:1", "unit", {name: "x"}).check()


@pytest.mark.parametrize(("name", "value"), [("no.such.setting", "1"), ("acks", "1")])
def test_a_kafka_setting_that_the_client_rejects_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name.partition(".")[0]):
        KafkaAccess("127.0.0.1:1", "unit", {name: value}).check()


def test_other_kafka_settings_are_accepted(tmp_path: object) -> None:
    KafkaAccess("127.0.0.1:1", "unit", {"session.timeout.ms": "9000", "log_level": "0"}).check()


def test_kafka_settings_are_not_printed() -> None:
    assert "s3cret" not in repr(KafkaAccess("b:1", "unit", {"sasl.password": "s3cret"}))


@pytest.mark.parametrize(
    ("client", "make"),
    [
        ("AdminClient", KafkaAccess.admin),
        ("Consumer", KafkaAccess.consumer),
        ("Producer", lambda brokers: brokers.producer(None)),
    ],
)
def test_a_client_refreshes_its_metadata_every_5_s(
    monkeypatch: pytest.MonkeyPatch, client: str, make: Callable[[KafkaAccess], object]
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(kafka_access, client, lambda settings, **_: made.append(settings))
    make(KafkaAccess("b:1", "unit"))
    assert [settings["topic.metadata.refresh.interval.ms"] for settings in made] == [5_000]


def test_a_connected_client_does_not_count_as_lost() -> None:
    told: list[str] = []
    consumer = Consumer(
        {
            "test.mock.num.brokers": 1,
            "group.id": "unit",
            "log_level": 0,
            "statistics.interval.ms": 10,
            "stats_cb": told.append,
        }
    )
    monitor = ConnectionMonitor(0)
    monitor('{"brokers": {}}')
    deadline = time.monotonic() + 10
    while monitor.is_lost and time.monotonic() < deadline:
        consumer.poll(0.01)
        for statistics in told:
            monitor(statistics)
    consumer.close()
    assert not monitor.is_lost


@pytest.mark.parametrize(
    "left",
    [
        "{}",
        '{":GroupCoordinator": {"source": "logical", "state": "UP"}}',
        '{"b:1/bootstrap": {"source": "configured", "state": "INIT"}}',
    ],
)
def test_a_client_without_a_connection_is_lost_after_a_while(left: str) -> None:
    monitor = ConnectionMonitor(3)
    monitor(f'{{"brokers": {left}}}')
    assert not monitor.is_lost
    monitor(f'{{"brokers": {left}}}')
    assert monitor.is_lost
    monitor('{"brokers": {"b:1/1": {"source": "learned", "state": "UP"}}}')
    assert not monitor.is_lost
