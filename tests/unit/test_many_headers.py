"""How many headers the record of a request may have, in each format."""

from __future__ import annotations

import orjson
import pytest

from blackbox.core.interpret import interpret_record, refused_entry
from blackbox.core.plan import Carried, Change, Replacement
from blackbox.formats import FORMATS, Options, make_format
from blackbox.formats.format import MAX_HEADERS
from blackbox.formats.proto import timer_pb2
from blackbox.formats.proto.future_pb2 import Future
from blackbox.records import entry as entries
from blackbox.records.entry import Entry
from blackbox.records.recurrence import next_request_headers, next_request_value
from blackbox.records.request import Cancel, Headers, Invalid, Reason, Record, Request, request_id
from tests.contract.held import SHARD

NOW_MS = 1_700_000_000_000
SECOND = b"%d" % (NOW_MS // 1000 + 60)
SCHEDULE: Headers = [("scheduler-epoch", SECOND), ("scheduler-target-topic", b"orders")]
ASKED = orjson.dumps({"topic": "orders", "message": "m", "countdown": 60})
RECORDS: dict[str, tuple[bytes | None, bytes, Headers]] = {
    "countdown": (None, ASKED, []),
    "scheduler": (b"id", b"m", SCHEDULE),
    "future": (SECOND, Future(callBackTopic="orders").SerializeToString(), []),
    "timer": (
        b"k",
        timer_pb2.Timer(
            header=timer_pb2.Header.FromString(b"\x0a\x04shop"),
            action=1,
            correlation_id="a",
            expire_at=int(SECOND),
        ).SerializeToString(),
        [],
    ),
}
TINY = ("a", b"\xff")


def read(record: Record, format_name: str = "countdown") -> Change | None:
    options = Options(86_400, lambda topic: topic == "TB", topic="TB", output_topic="out")
    return interpret_record(make_format(format_name, options), record, NOW_MS, None)[0]


def record(format_name: str, count: int) -> Record:
    """A record of this format with so many headers."""
    key, value, headers = RECORDS[format_name]
    return Record(7, NOW_MS, key, value, [*headers, *[TINY] * (count - len(headers))])


def test_there_is_a_record_of_each_format() -> None:
    assert RECORDS.keys() == FORMATS.keys()


@pytest.mark.parametrize("format_name", RECORDS)
def test_a_record_has_a_thousand_headers_at_most(format_name: str) -> None:
    assert type(read(record(format_name, MAX_HEADERS), format_name)) is Request

    entry = read(record(format_name, MAX_HEADERS + 1), format_name)

    assert isinstance(entry, Entry)
    assert entry.reason == Reason.BAD_HEADERS
    assert entry.detail == "the record has 1001 headers; give at most 1000"


@pytest.mark.parametrize(
    "value",
    [ASKED, b'{"id": "a", "cancel": true}', b'{"id": "\\u0061", "cancel": true}'],
    ids=["request", "cancel", "cancel in another spelling"],
)
def test_a_usual_record_has_a_thousand_headers_at_most(value: bytes) -> None:
    format = make_format("countdown", Options(86_400, lambda topic: topic == "TB", topic="TB"))
    usual = Record(7, NOW_MS, None, value, [TINY] * MAX_HEADERS)
    format.parse(
        usual, NOW_MS
    )  # from now on its target is a usual one, and it is parsed the quick way

    asked = format.parse(usual, NOW_MS)
    refused = format.parse(usual._replace(headers=[TINY] * (MAX_HEADERS + 1)), NOW_MS)

    assert isinstance(asked, Request | Cancel)
    assert isinstance(refused, Invalid)
    assert refused.reason == Reason.BAD_HEADERS


@pytest.mark.parametrize("tiny", [TINY, ("a", None), ("", None), ("", b"")])
def test_a_record_with_many_headers_takes_little_room_in_redis(
    tiny: tuple[str, bytes | None],
) -> None:
    many = record("countdown", 0)._replace(headers=[tiny] * 50_000)

    entry = read(many)

    assert isinstance(entry, Entry)
    assert entry.left_bytes > 0
    assert len(entries.encode(entry)) < 1000


def test_an_invalid_record_with_empty_headers_is_large_as_well() -> None:
    nothing = Record(7, NOW_MS, None, b"", [("", None)] * 200)

    assert refused_entry(nothing, Invalid(Reason.EMPTY, "no value"), NOW_MS).left_bytes == 2000


@pytest.mark.parametrize(
    ("own", "kind"),
    [
        (("blackbox-carried", b"[3,3,1,false]"), Carried),
        (("blackbox-replaces", request_id(SHARD, 3).encode()), Replacement),
        (("blackbox-follows", b"TB/3@3"), Request),
        (("blackbox-again", b"TB/3@3"), Request),
    ],
    ids=lambda own: own[0] if isinstance(own, tuple) else "",
)
@pytest.mark.parametrize(("count", "is_accepted"), [(MAX_HEADERS, True), (MAX_HEADERS + 1, False)])
def test_headers_of_blackbox_do_not_count(
    own: tuple[str, bytes], kind: type, count: int, is_accepted: bool
) -> None:
    once = record("countdown", count)

    change = read(once._replace(headers=[*once.headers, own]))

    content = change.content if isinstance(change, Carried) else change
    is_refused = isinstance(content, Entry) and content.reason == Reason.BAD_HEADERS
    assert is_refused is not is_accepted
    assert isinstance(change, kind) or not is_accepted


def test_a_tombstone_has_all_headers_of_its_message() -> None:
    headers: Headers = [
        *[TINY] * MAX_HEADERS,
        ("scheduler-key", b"id"),
        ("blackbox-source", b"TB/3@1"),
    ]
    assert read(Record(7, NOW_MS, b"id", None, headers), "scheduler") is None
    assert type(read(Record(7, NOW_MS, b"id", None, headers[:-1]), "scheduler")) is Cancel


def test_the_headers_of_a_recurring_request_and_its_record_fit_into_its_next_record() -> None:
    asked = {"topic": "orders", "message": "m", "id": "a", "every": 60}
    own = {f"h{number}": "1" for number in range(MAX_HEADERS // 2)}
    first = record("countdown", MAX_HEADERS - len(own))
    request = read(first._replace(value=orjson.dumps(asked | {"headers": own})))
    assert isinstance(request, Request)
    entry = Entry(*request)
    headers: Headers = [
        (name, value.encode() if isinstance(value, str) else value)
        for name, value in next_request_headers(entry.headers, "TB/3@7")
    ]

    following = read(Record(8, NOW_MS, b"a", next_request_value(entry, NOW_MS), headers))

    assert isinstance(following, Request)
    assert len(following.headers) == MAX_HEADERS
    too_many = first._replace(
        headers=[*first.headers, TINY], value=orjson.dumps(asked | {"headers": own})
    )
    refused = read(too_many)
    assert isinstance(refused, Entry)
    assert refused.detail == "headers has 500 names, and the record 501 headers; give at most 1000"
