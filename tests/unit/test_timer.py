"""The format `timer`: both contracts, distinguished by the content of a record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

import blackbox
from blackbox.formats import Options, make_format
from blackbox.formats.proto import future_pb2 as future
from blackbox.formats.proto import timer_pb2 as older
from blackbox.formats.proto import xray_pb2 as current
from blackbox.records.request import Cancel, Headers, Invalid, Reason, Record, Request

NOW_MS = 1_800_000_000_000
AT_S = 1_800_000_090
CONTRACT = make_format(
    "timer",
    Options(max_countdown_s=1000, own_topics=lambda topic: False, output_topic="timer.expired"),
)
HEADER = older.Header.FromString(b"\x0a\x04shop\x10\x07")
CONTEXT = [
    current.Request.ContextEntry(key="b", value="2"),
    current.Request.ContextEntry(key="a", value="1"),
]
ASKED = current.Request(context=CONTEXT, correlation_id="t-1", type="any")


def parse(message: Message | bytes | None) -> Request | Cancel | Invalid:
    value = message.SerializeToString() if isinstance(message, Message) else message
    headers: Headers = [("CALLER_SERVICE", b"shop")]
    found = CONTRACT.parse(Record(5, NOW_MS, b"the key", value, headers), NOW_MS)
    assert found is not None
    return found


def requested(message: Message) -> Request:
    found = parse(message)
    assert isinstance(found, Request)
    return found


def test_an_older_timer_is_answered_with_its_header_and_correlation_id() -> None:
    asked = requested(
        older.Timer(header=HEADER, correlation_id="t-1", expire_at=AT_S, payload=b"p", exchange="e")
    )
    assert (asked.target, asked.key, asked.due_ms) == ("timer.expired", b"the key", AT_S * 1000)
    assert (asked.caller, asked.caller_id) == ("shop", "t-1")
    answer = older.TimerExpired.FromString(asked.message or b"")
    assert answer.header.SerializeToString() == b"\x0a\x04shop\x10\x07"
    assert answer.correlation_id == "t-1"
    assert not answer.HasField("universe")


def test_an_older_timer_without_a_header_gets_an_answer_without_one() -> None:
    asked = requested(older.Timer(action=1, correlation_id="t-1", expire_at=AT_S))
    assert not older.TimerExpired.FromString(asked.message or b"").HasField("header")


def test_a_current_timer_is_answered_with_the_whole_request() -> None:
    asked = requested(current.TimerCreate(request=ASKED, expire_at=AT_S))
    assert (asked.target, asked.key, asked.due_ms) == ("timer.expired", b"the key", AT_S * 1000)
    assert asked.caller_id == "t-1"
    answer = current.TimerExpired.FromString(asked.message or b"")
    assert answer.response.request == ASKED
    assert answer.response.type == "xray.events.TimerExpired"


@pytest.mark.parametrize("module", [future, older, current])
def test_no_timer_contract_contains_a_slow_map_field(
    module: ModuleType,
) -> None:
    messages = list(module.DESCRIPTOR.message_types_by_name.values())
    for message in messages:
        messages += message.nested_types

    assert [message.full_name for message in messages if message.GetOptions().map_entry] == []


def test_a_context_that_is_not_utf8_is_refused() -> None:
    refused = parse(b"\x0a\x0a\x12\x03\x0a\x01\xff\x1a\x03t-1\x30\x01")

    assert isinstance(refused, Invalid)
    assert refused.reason is Reason.NOT_PROTOBUF


def test_unknown_fields_of_a_timer_request_are_returned() -> None:
    more = ASKED.SerializeToString() + b"\x4a\x05hello"
    value = b"\x0a" + bytes([len(more)]) + more + b"\x30\x01"
    asked = parse(value)
    assert isinstance(asked, Request)
    answer = current.TimerExpired.FromString(asked.message or b"")
    assert b"\x4a\x05hello" in answer.response.request.SerializeToString()


@pytest.mark.parametrize(
    "message",
    [
        older.Timer(action=2, correlation_id="t-1"),
        older.Timer(action=2, correlation_id="t-1", expire_at=AT_S, header=HEADER),
        current.TimerCancel(request=ASKED),
        current.TimerCreate(
            request=current.Request(correlation_id="t-1", type="xray.events.TimerCancel"),
            expire_at=AT_S,
        ),
    ],
)
def test_a_cancel_names_its_correlation_id(message: Message) -> None:
    assert parse(message) == Cancel("t-1")


@pytest.mark.parametrize(
    "message",
    [
        older.Timer(correlation_id="t-1", expire_at=0),
        older.Timer(correlation_id="t-1", expire_at=AT_S - 100),
        current.TimerCreate(request=ASKED, expire_at=1),
        current.TimerCreate(
            request=current.Request(correlation_id="t-1", type="xray.events.TimerCreate")
        ),
    ],
)
def test_a_past_second_is_due_at_once(message: Message) -> None:
    assert requested(message).due_ms == NOW_MS


@pytest.mark.parametrize(
    ("message", "reason", "told"),
    [
        (None, Reason.EMPTY, "no value"),
        (b"{", Reason.NOT_PROTOBUF, "not a protobuf timer"),
        (b"", Reason.BAD_ID, "correlation_id is missing"),
        (older.Timer(expire_at=AT_S), Reason.BAD_ID, "correlation_id is missing"),
        (older.Timer(correlation_id="", expire_at=AT_S), Reason.BAD_ID, "correlation_id is ''"),
        (older.Timer(correlation_id="a\n", expire_at=AT_S), Reason.BAD_ID, r"'a\n'"),
        (older.Timer(correlation_id="x" * 256, expire_at=AT_S), Reason.BAD_ID, "1 to 255"),
        (b"\x1a\x01\xff\x30\x01", Reason.BAD_ID, r"b'\xff'"),
        (older.Timer(correlation_id="t-1"), Reason.BAD_DUE_TIME, "expire_at is missing"),
        (older.Timer(correlation_id="t-1", expire_at=AT_S + 1000), Reason.TOO_FAR, "1000 s"),
        (older.Timer(correlation_id="t-1", expire_at=2**64 - 1), Reason.TOO_FAR, "1000 s"),
        (older.Timer(correlation_id="t-1", action=3), Reason.BAD_CANCEL, "action is 3"),
        (current.TimerCreate(expire_at=AT_S), Reason.BAD_ID, "correlation_id is missing"),
    ],
)
def test_an_invalid_record_is_refused_with_its_reason(
    message: Message | bytes | None, reason: Reason, told: str
) -> None:
    refused = parse(message)
    assert isinstance(refused, Invalid)
    assert refused.reason is reason
    assert told in refused.detail


@given(value=st.binary(max_size=80))
def test_arbitrary_bytes_raise_nothing(value: bytes) -> None:
    parse(value)


def test_the_generated_modules_match_their_proto_files(tmp_path: Path) -> None:
    folder = Path(blackbox.__file__).parent / "formats" / "proto"
    files = [f"blackbox/formats/proto/{path.name}" for path in sorted(folder.glob("*.proto"))]
    written = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder.parents[2]}", *written, *files],
        check=True,
    )
    for path in folder.glob("*_pb2.py*"):
        assert (tmp_path / "blackbox/formats/proto" / path.name).read_text() == path.read_text(), (
            "run make protos"
        )
