"""The format `future`: which records are callbacks, and how others are refused."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st

from blackbox.formats import Options, make_format
from blackbox.formats.proto.future_pb2 import Future
from blackbox.records.request import Headers, Invalid, Reason, Record, Request

NOW_MS = 1_800_000_000_000
CONTRACT = make_format(
    "future", Options(max_countdown_s=1000, own_topics=lambda topic: topic.startswith("timers"))
)
CALLBACK = Future(callBackTopic="orders", callBackKey="o-7", callBack=b"\x00\xffcall")


def parse(key: bytes | None = b"1800000090", value: bytes | None = None) -> Request | Invalid:
    value = CALLBACK.SerializeToString() if value is None else value
    headers: Headers = [("CALLER_SERVICE", b"shop"), ("trace", b"\xff")]
    found = CONTRACT.parse(Record(5, NOW_MS, key, value, headers), NOW_MS)
    assert isinstance(found, Request | Invalid)
    return found


def test_a_callback_goes_to_its_topic_under_its_key_at_its_second() -> None:
    assert parse() == Request(
        target="orders",
        message=b"\x00\xffcall",
        due_ms=1_800_000_090_000,
        key=b"o-7",
        headers=[("CALLER_SERVICE", b"shop"), ("trace", b"\xff")],
        caller="shop",
        caller_id=None,
        expires_ms=None,
    )


def test_a_callback_without_key_and_message_has_an_empty_key_and_message() -> None:
    asked = parse(value=Future(callBackTopic="orders").SerializeToString())
    assert isinstance(asked, Request)
    assert (asked.key, asked.message) == (b"", b"")


@pytest.mark.parametrize("key", [b"1799999999", b"0", b"-5"])
def test_a_past_second_is_due_at_once(key: bytes) -> None:
    asked = parse(key)
    assert isinstance(asked, Request)
    assert asked.due_ms == NOW_MS


@pytest.mark.parametrize(
    ("key", "value", "reason", "told"),
    [
        (None, None, Reason.BAD_DUE_TIME, "the key is missing; give its expiry in Unix seconds"),
        (b"", None, Reason.BAD_DUE_TIME, "the key is b''"),
        (b"1.5", None, Reason.BAD_DUE_TIME, "the key is b'1.5'"),
        (b" 1800000090", None, Reason.BAD_DUE_TIME, "b' 1800000090'"),
        (b"9" * 19, None, Reason.BAD_DUE_TIME, "Unix seconds"),
        (b"1800001001", None, Reason.TOO_FAR, "b'1800001001' is later than 1000 s"),
        (b"1800000090", b"{", Reason.NOT_PROTOBUF, "not a protobuf Future"),
        (b"1800000090", b"", Reason.BAD_TOPIC, "callBackTopic is ''"),
        (b"1800000090", b"\n\x01\xff", Reason.NOT_PROTOBUF, "not a protobuf Future"),
        (
            b"1800000090",
            Future(callBackTopic="a b").SerializeToString(),
            Reason.BAD_TOPIC,
            "callBackTopic is 'a b'",
        ),
        (
            b"1800000090",
            Future(callBackTopic="timers").SerializeToString(),
            Reason.FORBIDDEN_TOPIC,
            "belongs to Kafka or blackbox",
        ),
    ],
)
def test_an_invalid_record_is_refused_with_its_reason(
    key: bytes | None, value: bytes | None, reason: Reason, told: str
) -> None:
    refused = parse(key, value)
    assert isinstance(refused, Invalid)
    assert refused.reason is reason
    assert told in refused.detail


def test_a_record_without_a_value_is_empty() -> None:
    refused = CONTRACT.parse(Record(5, NOW_MS, b"1800000090", None, []), NOW_MS)
    assert isinstance(refused, Invalid)
    assert refused.reason is Reason.EMPTY


@given(key=st.none() | st.binary(max_size=24), value=st.none() | st.binary(max_size=60))
def test_arbitrary_bytes_raise_nothing(key: bytes | None, value: bytes | None) -> None:
    CONTRACT.parse(Record(5, NOW_MS, key, value, []), NOW_MS)


def test_the_fields_have_the_numbers_of_the_contract() -> None:
    found = descriptor_pb2.DescriptorProto()
    Future.DESCRIPTOR.CopyToProto(found)
    assert {field.name: field.number for field in found.field} == {
        "callBackTopic": 1,
        "callBackKey": 2,
        "callBack": 3,
    }
