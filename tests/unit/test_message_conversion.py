"""Conversion of consumed Kafka messages to records."""

from __future__ import annotations

import pytest
from confluent_kafka import (
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
    TIMESTAMP_NOT_AVAILABLE,
    Message,
)

from blackbox.journal.message_conversion import read_records
from blackbox.records.request import Record

AT_MS = 1_767_225_600_000


@pytest.mark.parametrize(
    ("kind", "is_brokers"),
    [
        (TIMESTAMP_LOG_APPEND_TIME, True),
        (TIMESTAMP_CREATE_TIME, False),
        (TIMESTAMP_NOT_AVAILABLE, False),
    ],
)
def test_a_record_says_whether_the_broker_set_its_timestamp(kind: int, is_brokers: bool) -> None:
    headers: list[tuple[str, bytes | str | None]] = [("CALLER_SERVICE", b"shop")]
    message = Message("TB", 0, 7, b"key", b"{}", headers, None, (kind, AT_MS))

    assert read_records([message]) == [
        Record(7, AT_MS, b"key", b"{}", [("CALLER_SERVICE", b"shop")], None, is_brokers)
    ]
