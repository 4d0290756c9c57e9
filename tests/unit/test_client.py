from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest

from blackbox.client import Asked, Client, NotSent, request_value
from blackbox.formats import make_format
from blackbox.request import Record, Request, locate

NOW_MS = 1_767_225_600_000


def parse(value: bytes) -> Request:
    contract = make_format("countdown", max_countdown_s=86_400, own_topics=lambda name: False)
    asked = contract.parse(Record(0, NOW_MS, None, value, []), NOW_MS)
    assert isinstance(asked, Request), asked
    return asked


def test_a_text_is_delivered_as_it_is() -> None:
    assert parse(request_value("orders", '{"a": 1}', countdown_s=1)).message == b'{"a": 1}'


def test_bytes_are_delivered_as_they_are() -> None:
    assert parse(request_value("orders", b"\xff\x00", countdown_s=1)).message == b"\xff\x00"


def test_an_object_is_delivered_as_json() -> None:
    assert (
        parse(request_value("orders", {"a": [1, None]}, countdown_s=1)).message == b'{"a":[1,null]}'
    )


def test_none_is_a_tombstone() -> None:
    assert parse(request_value("orders", None, countdown_s=1)).message is None


def test_everything_that_was_asked_for_is_in_the_request() -> None:
    asked = parse(
        request_value(
            "orders",
            "hi",
            countdown_s=1.5,
            id="r-17",
            key="customer-7",
            headers={"trace": "ä"},
            expires_after_s=60,
        )
    )
    assert asked == Request(
        target="orders",
        message=b"hi",
        due_ms=NOW_MS + 1500,
        key=b"customer-7",
        headers=[("trace", "ä".encode())],
        caller=None,
        caller_id="r-17",
        expires_ms=NOW_MS + 61_500,
    )


@pytest.mark.parametrize(
    "at",
    [
        datetime(2026, 1, 1, 0, 1, 30, tzinfo=UTC),
        datetime(2026, 1, 1, 1, 1, 30, tzinfo=timezone(timedelta(hours=1))),
        "2026-01-01T00:01:30Z",
        NOW_MS + 90_000,
    ],
)
def test_an_instant_is_understood_in_every_form(at: datetime | str | int) -> None:
    assert parse(request_value("orders", "hi", at=at)).due_ms == NOW_MS + 90_000


def test_a_datetime_without_a_time_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="without a time zone"):
        request_value("orders", "hi", at=datetime(2026, 1, 1))


def test_one_due_time_is_needed_and_not_two() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        request_value("orders", "hi")
    with pytest.raises(ValueError, match="exactly one"):
        request_value("orders", "hi", countdown_s=1, at=NOW_MS)


MOCK = {"test.mock.num.brokers": "1", "allow.auto.create.topics": "true"}


@pytest.fixture
def client() -> Iterator[Client]:
    with Client("in-process", caller="billing", kafka_settings=MOCK) as client:
        yield client


def test_the_id_names_the_place_where_the_request_was_written(client: Client) -> None:
    first, second = (client.send_later("orders", n, countdown_s=1, id="r-17") for n in (1, 2))
    assert locate(first.id, ["TB"]) == first.place
    assert first.place[0] == second.place[0]
    assert second.place[1] == first.place[1] + 1


def test_a_cancel_goes_to_the_partition_of_what_it_cancels(client: Client) -> None:
    asked = client.send_later("orders", "hi", countdown_s=1, id="r-17")
    assert client.cancel("r-17").place[0] == asked.place[0]


def test_every_acknowledgement_is_reported(client: Client) -> None:
    acknowledged: list[Asked] = []
    asked = [
        client.send_later("orders", n, countdown_s=1, on_acknowledged=acknowledged.append)
        for n in range(100)
    ]
    client.flush()
    assert set(acknowledged) == set(asked)
    assert len({one.id for one in asked}) == 100


def test_a_request_that_kafka_does_not_take_says_so() -> None:
    client = Client("127.0.0.1:1", kafka_settings={"message.timeout.ms": "200", "log_level": "0"})
    asked = client.send_later("orders", "hi", countdown_s=1)
    with pytest.raises(NotSent, match=r"Kafka did not take the request into TB: .*timed out"):
        _ = asked.id
    with pytest.raises(NotSent, match="Kafka refused 1 of the requests"):
        client.flush()


def test_a_request_that_is_too_large_is_refused_at_once(client: Client) -> None:
    with pytest.raises(NotSent, match="the client refuses the request"):
        client.send_later("orders", "x" * 2_000_000, countdown_s=1)
