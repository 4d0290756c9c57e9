"""What one record of a request topic asks for: which requests stay out of the index."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import orjson
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from blackbox.core.interpret import interpret_record
from blackbox.core.plan import Change, Cold
from blackbox.formats import Options, make_format
from blackbox.records.carried import carry_on
from blackbox.records.request import Headers, Record, Request

NOW_MS = 1_700_000_000_000
DAY_S, DAY_MS = 86_400, 86_400_000

COUNTDOWN = make_format("countdown", Options(400 * DAY_S, lambda topic: topic == "TB", topic="TB"))


def far(*, key: bytes | None = None, headers: Headers | None = None, **asked: Any) -> Record:
    """A request that is due in three days."""
    value = {"topic": "orders", "message": "m", "countdown": 3 * DAY_S} | asked
    return Record(7, NOW_MS, key, orjson.dumps(value), headers or [], has_broker_time=True)


def read(record: Record, now_ms: int = NOW_MS) -> Change | None:
    change, _ = interpret_record(COUNTDOWN, record, now_ms, DAY_MS)
    return change


def is_too_large(headers: Headers, record: Record) -> bool:
    """Whether a producer with its usual limit refuses the record under these headers."""
    producer = Producer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    try:
        producer.produce("TB", record.value, record.key, headers=list(headers))
    except KafkaException as error:
        return bool(error.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE)
    finally:
        producer.purge()
        producer.flush(0)
    return False


LARGE = 450_000


@pytest.mark.parametrize(
    "record",
    [
        far(message=b64encode(b"x" * 640_000).decode(), encoding="base64", headers=[("claims", b"c" * 147_000)]),
        far(message="x" * LARGE, headers=[("claims", b"c" * (549_950 - 60))]),
        far(message="x" * LARGE, key=b"k" * 549_900),
        far(message="x" * LARGE, headers=[("é" * 274_990, b"")]),
    ],
    ids=["by a caller that may write more", "header", "key", "header name"],
)  # fmt: skip
def test_a_request_that_promotion_could_not_write_again_is_not_cold(record: Record) -> None:
    assert is_too_large(carry_on(record, is_cold=False), record)
    assert type(read(record)) is Request


def test_a_request_of_up_to_900_kb_is_cold_and_can_be_written_again() -> None:
    record = far(message="x" * LARGE, key=b"k", headers=[("claims", b"c" * 449_800)])

    assert type(read(record)) is Cold
    assert not is_too_large(carry_on(record, is_cold=False), record)


@pytest.mark.parametrize(
    ("ahead_ms", "is_stamped", "is_cold"),
    [(1001, False, False), (DAY_MS, False, False), (1000, False, True), (DAY_MS, True, True)],
    ids=["a second and more", "a day", "within a second", "by the broker"],
)
def test_a_request_is_cold_only_if_its_writers_clock_was_not_ahead(
    ahead_ms: int, is_stamped: bool, is_cold: bool
) -> None:
    record = far()._replace(timestamp_ms=NOW_MS + ahead_ms, has_broker_time=is_stamped)

    change = read(record)

    assert (type(change) is Cold) is is_cold
    if isinstance(change, Request):
        assert change.due_ms == NOW_MS + 3 * DAY_MS
