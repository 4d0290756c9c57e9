from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_NOT_AVAILABLE, KafkaError, Message
from hypothesis import given
from hypothesis import strategies as st

from blackbox.client.retry import ATTEMPT, ORIGINAL_TIMESTAMP, Exhausted, Retry, ScheduleRecord
from blackbox.formats import Options, make_format
from blackbox.records.request import Headers, Record, Request

NOW_S = 1_767_225_600
WRITTEN_S = NOW_S - 86_400
HOUR = timedelta(hours=1)
RETRY = Retry("schedules")


def failed(headers: Sequence[tuple[str, bytes | None]] = (), **other: Any) -> Message:
    """A message as a consumer reads it."""
    at = (TIMESTAMP_CREATE_TIME, WRITTEN_S * 1000 + 999)
    place: dict[str, Any] = {"topic": "orders", "partition": 3, "offset": 17, "timestamp": at}
    return Message(**place | {"key": b"k", "value": b"v", "headers": list(headers)} | other)


def attempted(times: bytes | None) -> Message:
    return failed([(ATTEMPT, times)])


def held(schedule: ScheduleRecord, name: str) -> list[bytes | None]:
    return [value for named, value in schedule["headers"] if named == name]


def delivered(schedule: ScheduleRecord, offset: int) -> Message:
    """The message that its schedule delivers to the target topic."""
    format = make_format(
        "scheduler",
        Options(max_countdown_s=86_400, own_topics=lambda name: False, topic="schedules"),
    )
    written = Record(9, NOW_S * 1000, schedule["key"], schedule["value"], schedule["headers"])
    asked = format.parse(written, NOW_S * 1000)
    assert isinstance(asked, Request), asked
    ours: Headers = [("blackbox-id", b"i"), ("blackbox-due-ms", b"1"), ("blackbox-source", b"s")]
    return failed(
        [*asked.headers, *ours],
        topic=asked.target,
        key=asked.key,
        value=asked.message,
        offset=offset,
        timestamp=(TIMESTAMP_CREATE_TIME, NOW_S * 1000),
    )


def test_each_delay_is_twice_the_previous_one_up_to_the_longest() -> None:
    seconds = [RETRY.delay(attempt).total_seconds() for attempt in range(1, 12)]
    assert seconds == [10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600]


def test_a_factor_of_one_waits_equally_long_each_time() -> None:
    assert {Retry("s", factor=1).delay(n) for n in range(1, 51)} == {timedelta(seconds=5)}


seconds = st.integers(1, 10_000).map(lambda hundredths: timedelta(seconds=hundredths / 100))


@given(seconds, seconds, st.floats(1, 1e6), st.integers(1, 10_000))
def test_delays_never_shrink_nor_leave_their_bounds(
    one: timedelta, other: timedelta, factor: float, attempt: int
) -> None:
    shortest, longest = sorted((one, other))
    retry = Retry("s", shortest=shortest, longest=longest, factor=factor)
    assert shortest <= retry.delay(attempt) <= retry.delay(attempt + 1) <= longest


@given(st.floats(0, 4e9), st.integers(0, 49))
def test_an_attempt_is_due_within_a_second_after_its_delay(now_s: float, had: int) -> None:
    [epoch] = held(RETRY.schedule(attempted(b"%d" % had), now_s), "scheduler-epoch")
    wanted = now_s + RETRY.delay(had + 1).total_seconds()
    assert wanted <= int(epoch or b"") < wanted + 1


def test_a_first_retry_contains_the_whole_message() -> None:
    assert RETRY.schedule(failed([("trace", b"\xff"), ("trace", None)]), NOW_S) == {
        "topic": "schedules",
        "key": b"orders/3@17",
        "value": b"v",
        "headers": [
            ("trace", b"\xff"),
            ("trace", None),
            ("retry-attempt", b"1"),
            ("retry-original-timestamp", b"%d" % WRITTEN_S),
            ("scheduler-epoch", b"%d" % (NOW_S + 10)),
            ("scheduler-target-topic", b"orders"),
            ("scheduler-target-key", b"k"),
        ],
    }


@pytest.mark.parametrize(
    "times", [None, b"", b"x", b"-3", b"+3", b"1.5", b" 1", b"\xd9\xa3", b"\xff", b"9" * 5000]
)
def test_an_unreadable_attempt_count_restarts_at_1(times: bytes | None) -> None:
    assert held(RETRY.schedule(attempted(times), NOW_S), ATTEMPT) == [b"1"]


def test_the_fiftieth_attempt_is_the_last() -> None:
    assert held(RETRY.schedule(attempted(b"49"), NOW_S), ATTEMPT) == [b"50"]
    with pytest.raises(Exhausted, match="orders/3@17 has used 50 of 50 attempts"):
        RETRY.schedule(attempted(b"50"), NOW_S)
    with pytest.raises(Exhausted):
        Retry("schedules", attempts=1).schedule(attempted(b"1"), NOW_S)


headers = st.lists(
    st.tuples(
        st.sampled_from(
            ["trace", "retry-attempt", "retry-original-timestamp", "scheduler-epoch",
             "scheduler-key", "scheduler-target-topic", "scheduler-target-key", "blackbox-id",
             "blackbox-cancel"]
        ),
        st.none() | st.sampled_from([b"", b"2", b"17", b"orders", b"\xff"]),
    )
)  # fmt: skip


@given(headers, st.none() | st.binary(), st.binary())
def test_every_attempt_delivers_the_message_unchanged(
    given: Headers, key: bytes | None, value: bytes
) -> None:
    retry, message = Retry("schedules"), failed(given, key=key, value=value)
    first = retry.schedule(message, NOW_S)
    last = first
    for offset in range(18, 21):
        last = retry.schedule(delivered(last, offset), NOW_S)
    own = [one for one in given if one[0] == "trace"]
    assert [one for one in last["headers"] if one[0] == "trace"] == own
    assert len(last["headers"]) == len(first["headers"])
    names = [name for name, _ in last["headers"] if name != "trace"]
    assert len(names) == len(set(names)) == 4 + (key is not None)
    again = delivered(last, 21)
    assert (again.topic(), again.key(), again.value()) == ("orders", key, value)
    assert int(held(last, ATTEMPT)[0] or b"") == int(held(first, ATTEMPT)[0] or b"") + 3
    assert held(last, ORIGINAL_TIMESTAMP) == held(first, ORIGINAL_TIMESTAMP)


def test_all_attempts_of_a_message_are_one_schedule() -> None:
    first = RETRY.schedule(failed(), NOW_S)
    second = RETRY.schedule(delivered(first, 18), NOW_S)
    assert first["key"] == second["key"] == b"orders/3@17"
    assert RETRY.schedule(delivered(second, 19), NOW_S)["key"] == b"orders/3@17"


def with_id(schedule_id: bytes) -> Message:
    """The message at orders/3@17, with the headers of a retry under this schedule id."""
    came: list[tuple[str, bytes | None]] = [
        (ATTEMPT, b"1"), ("scheduler-key", schedule_id), ("scheduler-target-topic", b"orders"),
        ("scheduler-target-key", b"k"),
    ]  # fmt: skip
    return failed(came)


@pytest.mark.parametrize(
    "forged",
    [
        b"\xff", b" ", b"", b"billing-reminder-7", b"bills/3@5", b"orders/3@17", b"orders/3@18",
        b"orders/3@%d" % 2**63, b"orders/%d@5" % 2**20, b"orders/03@5", b"orders/3@05", b"orders/3@-1",
        b" orders/3@5", b"orders/3@5\n", b"orders/3@",
    ],
)  # fmt: skip
def test_a_forged_schedule_id_is_ignored(forged: bytes) -> None:
    assert RETRY.schedule(with_id(forged), NOW_S)["key"] == b"orders/3@17"


@pytest.mark.parametrize("first", [b"orders/3@16", b"orders/3@0", b"orders/0@99"])
def test_the_place_of_an_earlier_record_of_the_topic_stays_the_schedule_id(first: bytes) -> None:
    assert RETRY.schedule(with_id(first), NOW_S)["key"] == first


@pytest.mark.parametrize("other", [{"topic": "bills"}, {"key": b"other"}, {"key": None}])
def test_a_message_with_the_headers_of_another_is_a_schedule_of_its_own(
    other: dict[str, Any],
) -> None:
    came = delivered(RETRY.schedule(failed(), NOW_S), 18)
    copied = failed(**{"headers": came.headers(), "offset": 4} | other)
    assert RETRY.schedule(copied, NOW_S)["key"] == f"{other.get('topic', 'orders')}/3@4".encode()


def test_a_message_that_was_scheduled_before_its_first_failure_is_a_schedule_of_its_own() -> None:
    came = failed([("scheduler-key", b"video"), ("scheduler-target-topic", b"orders")])
    assert RETRY.schedule(came, NOW_S)["key"] == b"orders/3@17"


def test_the_original_timestamp_of_a_message_is_kept() -> None:
    stale = failed([(ORIGINAL_TIMESTAMP, b"5")])
    assert held(RETRY.schedule(stale, NOW_S), ORIGINAL_TIMESTAMP) == [b"%d" % WRITTEN_S]
    kept = failed([(ATTEMPT, b"1"), (ORIGINAL_TIMESTAMP, b"5")])
    assert held(RETRY.schedule(kept, NOW_S), ORIGINAL_TIMESTAMP) == [b"5"]
    lost = failed([(ATTEMPT, b"1"), (ORIGINAL_TIMESTAMP, b"yesterday")])
    assert held(RETRY.schedule(lost, NOW_S), ORIGINAL_TIMESTAMP) == [b"%d" % WRITTEN_S]
    untold = failed(timestamp=(TIMESTAMP_NOT_AVAILABLE, 0))
    assert held(RETRY.schedule(untold, NOW_S + 0.9), ORIGINAL_TIMESTAMP) == [b"%d" % NOW_S]


def test_an_empty_message_is_retried_and_a_tombstone_refused() -> None:
    assert RETRY.schedule(failed(value=b""), NOW_S)["value"] == b""
    with pytest.raises(ValueError, match="orders/3@17 has no value"):
        RETRY.schedule(failed(value=None), NOW_S)


def test_a_consumer_error_is_not_retried() -> None:
    with pytest.raises(ValueError, match="not a message read by a consumer"):
        RETRY.schedule(failed(error=KafkaError(KafkaError._PARTITION_EOF)), NOW_S)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"attempts": 0}, "attempts is 0"),
        ({"shortest": timedelta()}, "shortest is 0:00:00"),
        ({"shortest": HOUR, "longest": HOUR / 2}, "longest 0:30:00"),
        ({"factor": 0.5}, "factor is 0.5"),
        ({"factor": float("nan")}, "factor is nan"),
        ({"factor": float("inf")}, "factor is inf"),
    ],
)
def test_invalid_retry_settings_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Retry("schedules", **wrong)
