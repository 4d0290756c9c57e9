"""The format `scheduler`: which records are schedules, and how others are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blackbox.formats import Options, make_format
from blackbox.records.request import Cancel, Headers, Invalid, Reason, Record, Request

NOW_MS = 1_800_000_000_123
EPOCH = ("scheduler-epoch", b"1800000090")
TOPIC = ("scheduler-target-topic", b"videos")
KEY = ("scheduler-target-key", b"\xff\x00")


def parse(
    headers: Headers,
    *,
    key: bytes | None = b"video-1",
    value: bytes | None = b"\x00\xfe",
    grace_s: int | None = None,
) -> Request | Cancel | Invalid | None:
    format = make_format(
        "scheduler",
        Options(
            max_countdown_s=1000,
            own_topics=lambda topic: topic.startswith("schedules"),
            topic="schedules",
            grace_s=grace_s,
        ),
    )
    return format.parse(Record(5, NOW_MS, key, value, headers), NOW_MS)


def requested(headers: Headers, *, grace_s: int | None = None) -> Request:
    found = parse(headers, grace_s=grace_s)
    assert isinstance(found, Request), found
    return found


def test_a_schedule_is_parsed_from_its_headers() -> None:
    headers: Headers = [("trace", b"1"), EPOCH, TOPIC, KEY, ("CALLER_SERVICE", b"tv"), ("x", None)]
    assert parse(headers) == Request(
        target="videos",
        message=b"\x00\xfe",
        due_ms=1_800_000_090_000,
        key=b"\xff\x00",
        headers=[
            *headers,
            ("scheduler-timestamp", b"1800000000"),
            ("scheduler-key", b"video-1"),
            ("scheduler-topic", b"schedules"),
        ],
        caller="tv",
        caller_id="video-1",
        expires_ms=None,
    )


def test_the_first_header_of_a_name_wins_and_all_pass_through() -> None:
    again: Headers = [("scheduler-epoch", b"x"), ("scheduler-target-topic", b"other"), KEY]
    found = requested([EPOCH, TOPIC, *again])
    assert (found.target, found.due_ms) == ("videos", 1_800_000_090_000)
    assert found.headers[:5] == [EPOCH, TOPIC, *again]


def test_without_a_target_key_the_message_has_none() -> None:
    assert requested([EPOCH, TOPIC]).key is None


@pytest.mark.parametrize("epoch", [b"0", b"1799999999", b"+5", b"-0"])
def test_a_past_epoch_is_due_at_once(epoch: bytes) -> None:
    assert requested([("scheduler-epoch", epoch), TOPIC]).due_ms == NOW_MS


def test_with_a_grace_interval_a_schedule_expires_after_its_epoch() -> None:
    assert requested([EPOCH, TOPIC], grace_s=3).expires_ms == 1_800_000_093_000
    past = requested([("scheduler-epoch", b"1799999990"), TOPIC], grace_s=3)
    assert past.expires_ms == 1_799_999_993_000


def test_a_null_value_cancels_and_an_empty_one_is_a_message() -> None:
    assert parse([], value=None) == Cancel("video-1")
    assert parse([("blackbox-source", b"other/0@5")], value=None) == Cancel("video-1")
    found = parse([EPOCH, TOPIC], value=b"")
    assert isinstance(found, Request)
    assert found.message == b""


def test_a_tombstone_of_blackbox_is_not_a_cancel() -> None:
    assert parse([EPOCH, ("blackbox-source", b"schedules/0@5")], value=None) is None
    valued = parse([EPOCH, TOPIC, ("blackbox-source", b"schedules/0@5")])
    assert isinstance(valued, Request)


def test_a_cancel_with_the_headers_of_another_schedules_message_is_a_cancel() -> None:
    copied: Headers = [EPOCH, ("scheduler-key", b"video-2"), ("blackbox-source", b"schedules/0@5")]
    assert parse(copied, value=None) == Cancel("video-1")
    own: Headers = [copied[1], ("scheduler-key", b"video-1"), copied[2]]
    assert parse(own, value=None) is None


@pytest.mark.parametrize(
    ("headers", "key", "reason", "said"),
    [
        ([EPOCH, TOPIC], None, Reason.BAD_ID, "the key is missing"),
        ([EPOCH, TOPIC], b" \t", Reason.BAD_ID, "blank"),
        ([EPOCH, TOPIC], b"\xff", Reason.BAD_ID, "not UTF-8"),
        ([TOPIC], b"k", Reason.BAD_DUE_TIME, "scheduler-epoch is missing"),
        ([("scheduler-epoch", None), TOPIC], b"k", Reason.BAD_DUE_TIME, "missing"),
        ([("scheduler-epoch", b"-1"), TOPIC], b"k", Reason.BAD_DUE_TIME, "b'-1'"),
        ([("scheduler-epoch", b"1e9"), TOPIC], b"k", Reason.BAD_DUE_TIME, "b'1e9'"),
        ([("scheduler-epoch", b"9223372036854775808"), TOPIC], b"k", Reason.BAD_DUE_TIME, "922337"),
        ([("scheduler-epoch", b"9223372036854775807"), TOPIC], b"k", Reason.TOO_FAR, "1000 s"),
        ([("scheduler-epoch", b"1800001001"), TOPIC], b"k", Reason.TOO_FAR, "1800001001"),
        ([EPOCH], b"k", Reason.BAD_TOPIC, "scheduler-target-topic is missing"),
        ([EPOCH, ("scheduler-target-topic", b"")], b"k", Reason.BAD_TOPIC, "empty"),
        ([EPOCH, ("scheduler-target-topic", b"a b")], b"k", Reason.BAD_TOPIC, "a b"),
        (
            [EPOCH, ("scheduler-target-topic", b"schedules")],
            b"k",
            Reason.FORBIDDEN_TOPIC,
            "another",
        ),
    ],
)
def test_an_invalid_schedule_is_refused_with_the_cause(
    headers: Headers, key: bytes | None, reason: Reason, said: str
) -> None:
    found = parse(headers, key=key)
    assert isinstance(found, Invalid)
    assert found.reason == reason
    assert said in found.detail


def test_an_id_has_1024_bytes_at_most() -> None:
    longest = "ä" * 512
    found = parse([EPOCH, TOPIC], key=longest.encode())
    assert isinstance(found, Request)
    assert found.caller_id == longest
    assert parse([], key=longest.encode(), value=None) == Cancel(longest)

    for value in (b"m", None):
        refused = parse([EPOCH, TOPIC], key=longest.encode() + b"x", value=value)
        assert isinstance(refused, Invalid)
        assert refused.reason is Reason.BAD_ID
        assert (
            "the key has 1025 bytes; the id of a schedule may have at most 1024" in refused.detail
        )
        assert "such as a hash" in refused.detail


def test_the_tombstone_of_a_schedule_with_a_too_long_id_is_ignored() -> None:
    own: Headers = [("blackbox-source", b"schedules/0@5")]
    assert parse(own, key=b"x" * 1025, value=None) is None


def test_a_cancel_without_a_valid_id_is_refused() -> None:
    assert isinstance(parse([], key=b" ", value=None), Invalid)


@given(
    st.one_of(st.none(), st.binary(max_size=30)),
    st.one_of(st.none(), st.binary(max_size=30)),
    st.lists(
        st.tuples(
            st.sampled_from(["scheduler-epoch", "scheduler-target-topic", "blackbox-source", "x"]),
            st.one_of(st.none(), st.binary(max_size=25), st.just(b"1800000090")),
        ),
        max_size=5,
    ),
)
def test_any_record_is_parsed_or_refused(
    key: bytes | None, value: bytes | None, headers: Headers
) -> None:
    assert isinstance(parse(headers, key=key, value=value), Request | Cancel | Invalid | None)
