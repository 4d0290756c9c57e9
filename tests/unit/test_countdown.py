from __future__ import annotations

import gc
import json
import re
import sys
from base64 import b64encode
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blackbox.formats import Format, Options
from blackbox.formats.countdown import Countdown
from blackbox.journal.topics import is_own_topic
from blackbox.records.request import Cancel, Headers, Invalid, Reason, Record, Request

WRITTEN_MS = 1767225600000
LATEST_MS = WRITTEN_MS + 2000
LONGEST_S = 34560000
PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
SECTION = PAGE.partition("### Field by field")[2].partition("### Reasons found after parsing")[0]
VALID = {"topic": '"orders"', "message": '"hi"', "countdown": "90"}

is_own = partial(is_own_topic, request_topics=["TB"], dead_letter_topic="blackbox.dead-letters")
format: Format = Countdown(Options(max_countdown_s=LONGEST_S, own_topics=is_own))


def parse(
    value: bytes | str | None, headers: Headers | None = None, *, written_ms: int = WRITTEN_MS
) -> Request | Cancel | Invalid:
    in_bytes = value.encode() if isinstance(value, str) else value
    found = format.parse(Record(7, written_ms, None, in_bytes, headers or []), LATEST_MS)
    assert found is not None
    return found


def accepted(value: bytes | str, headers: Headers | None = None) -> Request:
    request = parse(value, headers)
    assert isinstance(request, Request), request
    return request


def refused(value: bytes | str | None) -> Invalid:
    invalid = parse(value)
    assert isinstance(invalid, Invalid), invalid
    return invalid


def with_fields(fields: str, *, leave_out: str = "") -> str:
    """The JSON of a valid request with some fields replaced, as the tables of the page are read."""
    names = set(re.findall(r'"(\w+)":', fields)) | {leave_out}
    if "at" in names:
        names.add("countdown")
    rest = {} if "cancel" in names else {n: text for n, text in VALID.items() if n not in names}
    members = [f'"{name}": {text}' for name, text in rest.items()]
    return "{" + ", ".join([*members, fields] if fields else members) + "}"


def documented_rows() -> Iterator[tuple[str, str]]:
    for fields, left_out, outcome in re.findall(
        r"^\| (?:`([^`]+)`|without `(\w+)`) \| (.+) \|$", SECTION, re.MULTILINE
    ):
        if outcome != "outcome":
            yield with_fields(fields, leave_out=left_out), outcome


@pytest.mark.parametrize(("value", "outcome"), list(documented_rows()))
def test_every_documented_row_is_true(value: str, outcome: str) -> None:
    parsed = parse(value)

    if reason := re.match(r"refused: `([a-z-]+)`", outcome):
        assert isinstance(parsed, Invalid), parsed
        assert parsed.reason == reason[1], parsed.detail
    elif outcome == "cancels":
        assert parsed == Cancel("r-17")
    else:
        assert isinstance(parsed, Request), parsed
        check_accepted(parsed, outcome)


def check_accepted(request: Request, outcome: str) -> None:
    if delivered := re.match(r"delivered as (?:`([^`]+)`|an empty value)", outcome):
        assert request.message == (delivered[1] or "").encode()
    elif due := re.match(r"due \+(\d+) ms", outcome):
        assert request.due_ms == WRITTEN_MS + int(due[1])
    elif recurs := re.match(r"recurs (?:every (\d+) ms|when cron matches in (\S+))", outcome):
        wanted = f"every {recurs[1]}" if recurs[1] else f"cron {recurs[2]} "
        assert (request.recurs or "").startswith(wanted)
        assert request.due_ms == WRITTEN_MS + 90_000
    else:
        assert outcome.startswith("accepted"), f"not a form of outcome this test knows: {outcome}"


def test_the_tables_were_found() -> None:
    assert len(list(documented_rows())) > 120


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_word_is_documented(reason: Reason) -> None:
    assert f"`{reason}`" in PAGE


def test_every_reason_word_of_the_page_exists() -> None:
    words = set(re.findall(r"refused: `([a-z-]+)`", PAGE))
    words |= set(
        re.findall(
            r"^\| `([a-z-]+)` \| ",
            PAGE.partition("### Reasons found after parsing")[2],
            re.MULTILINE,
        )
    )

    # the page says that it is not a reason of a dead letter
    assert {Reason.BAD_TOPIC, Reason.UNKNOWN_TOPIC} <= words <= set(Reason) - {Reason.UNREACHABLE}


NESTED = 100_000
WHOLE_VALUES: list[tuple[str, bytes | None, Reason]] = [
    ("a Kafka tombstone", None, Reason.EMPTY),
    ("an empty value", b"", Reason.EMPTY),
    ("only blanks", b" \r\n\t ", Reason.EMPTY),
    ("plain text", b"hello", Reason.NOT_JSON),
    ("cut off", b'{"topic": "orders", "mess', Reason.NOT_JSON),
    ("text behind the object", with_fields("").encode() + b" x", Reason.NOT_JSON),
    ("two objects", with_fields("").encode() * 2, Reason.NOT_JSON),
    ("a comment", b'{"topic": "orders" /* mine */}', Reason.NOT_JSON),
    ("single quotes", b"{'topic': 'orders'}", Reason.NOT_JSON),
    ("a trailing comma", b'{"topic": "orders",}', Reason.NOT_JSON),
    ("a leading zero", with_fields('"countdown": 090').encode(), Reason.NOT_JSON),
    ("a control character", b'{"topic": "or\x00ders"}', Reason.NOT_JSON),
    ("a byte order mark", b"\xef\xbb\xbf" + with_fields("").encode(), Reason.NOT_JSON),
    ("UTF-16", with_fields("").encode("utf-16"), Reason.NOT_JSON),
    ("Latin-1", with_fields('"message": "café"').encode("latin-1"), Reason.NOT_JSON),
    ("binary", bytes(range(256)), Reason.NOT_JSON),
    (
        "arrays 300 deep",
        with_fields(f'"message": {"[" * 300}{"]" * 300}').encode(),
        Reason.NOT_JSON,
    ),
    ("arrays very deep", b"[" * NESTED + b"]" * NESTED, Reason.NOT_JSON),
    ("objects very deep", b'{"message":' * NESTED + b"1" + b"}" * NESTED, Reason.NOT_JSON),
    ("unclosed arrays", b"[" * NESTED, Reason.NOT_JSON),
    ("NaN in no known field", with_fields('"n": NaN').encode(), Reason.NOT_JSON),
    ("NaN alone", b"NaN", Reason.NOT_JSON),
    ("a very long number", b'{"n": ' + b"9" * 10_000 + b"}", Reason.NOT_JSON),
    ("a very long due time", b'{"at": ' + b"9" * 10_000 + b"}", Reason.BAD_DUE_TIME),
    ("half a surrogate pair as a name", rb'{"\ud800": 1}', Reason.NOT_JSON),
    ("half a surrogate pair in the key", with_fields(r'"key": "\udc00"').encode(), Reason.BAD_KEY),
    ("an array", b"[]", Reason.NOT_AN_OBJECT),
    ("a deep array", b"[" * 600 + b"]" * 600, Reason.NOT_AN_OBJECT),
    ("a string", b'"orders"', Reason.NOT_AN_OBJECT),
    ("a number", b"90", Reason.NOT_AN_OBJECT),
    ("null", b"null", Reason.NOT_AN_OBJECT),
    ("an empty object", b"{}", Reason.BAD_TOPIC),
    (
        "a topic of 250 characters",
        with_fields(f'"topic": "{"a" * 250}"').encode(),
        Reason.BAD_TOPIC,
    ),
    ("an id of 256 characters", with_fields(f'"id": "{"a" * 256}"').encode(), Reason.BAD_ID),
]


@pytest.mark.parametrize(
    ("value", "reason"), [row[1:] for row in WHOLE_VALUES], ids=[row[0] for row in WHOLE_VALUES]
)
def test_an_invalid_value_is_refused_with_its_reason(value: bytes | None, reason: Reason) -> None:
    assert refused(value).reason is reason


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (with_fields('"countdown": Infinity'), ["countdown is 'Infinity'", "finite"]),
        (with_fields('"countdown": 1e999'), ["countdown is '1e999'", "finite"]),
        (with_fields('"countdown": "90"'), ["countdown is '90'", "number of seconds"]),
        (with_fields('"countdown": 34560001'), ["34560001", "BLACKBOX_MAX_COUNTDOWN_S"]),
        (with_fields('"at": "2026-01-01T00:00:00"'), ["2026-01-01T00:00:00", "offset"]),
        (with_fields('"at": "2026-02-30T00:00:00Z"'), ["2026-02-30", "day is out of range"]),
        (with_fields('"at": 1, "countdown": 1'), ["both", "exactly one"]),
        (with_fields("", leave_out="countdown"), ["neither", "exactly one"]),
        (with_fields('"countdwon": 90'), ["countdwon", "did you mean countdown?"]),
        (with_fields('"zzz": 90'), ["zzz", "known fields are topic, message"]),
        (with_fields('"message": {"a": 1, "a": 1}'), ["'a'", "twice"]),
        (with_fields('"topic": "TB"'), ["'TB'", "use another topic"]),
        ('{"topic": "orders"', ["not valid JSON", "column"]),
    ],
)
def test_a_detail_names_the_value_and_the_remedy(value: str, words: list[str]) -> None:
    detail = refused(value).detail

    assert [word for word in words if word not in detail] == [], detail


def test_a_topic_and_an_id_of_the_longest_length_are_accepted() -> None:
    request = accepted(with_fields(f'"topic": "{"t" * 249}", "id": "{"i" * 255}"'))

    assert (request.target, request.caller_id) == ("t" * 249, "i" * 255)


def test_a_message_of_two_megabytes_is_accepted() -> None:
    message = "x" * 2_000_000

    assert accepted(with_fields(f'"message": "{message}"')).message == message.encode()


def filled(unit: str) -> str:
    """0.3 MB of this piece of JSON, repeated."""
    return ",".join([unit] * (300_000 // (len(unit) + 1)))


NAMES = ",".join(f'"{number:x}":1' for number in range(30_000))
STRINGS = NAMES.replace(":1", ':"1"')
HARD_TO_READ = {
    "a countdown that is no number": '"countdown": NaN, "message": [' + filled("1") + "]",
    "a number beyond all limits": '"message": [' + filled("1") + ", 1e999]",
    "half a surrogate pair": '"message": [' + filled("1") + r', "\ud800"]',
    "numbers that orjson writes differently": '"message": [' + filled("1e0") + "]",
    "long numbers": '"message": [' + filled("123456789012345678901234567890") + "]",
    "objects with such a number": '"message": [' + filled('{"":1e0}') + "]",
    "names beside such a number": '"message": {' + NAMES + ', "x": 1e0}',
    "a name that is written twice": '"message": {' + NAMES + ', "a": 1}',
    "a field that is written twice": filled('"message":1'),
    "escaped strings": '"message": [' + filled(r'"\u0041"') + ", 1e0]",
    "headers": '"message": 1e0, "headers": {' + STRINGS + "}",
}


@pytest.mark.parametrize("fields", HARD_TO_READ.values(), ids=HARD_TO_READ)
def test_no_python_code_runs_for_each_element_of_a_long_value(
    fields: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = with_fields(fields).encode()
    lengths, calls = [0], []
    read = json.loads

    def reading(text: str | bytes, **hooks: Any) -> Any:
        lengths.append(len(text))
        return read(text, **hooks)

    monkeypatch.setattr(json, "loads", reading)
    profiled = sys.getprofile()
    gc.disable()  # what other tests have left may run code when it is collected
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        parse(value)
    finally:
        sys.setprofile(profiled)
        gc.enable()

    assert max(lengths) <= 10 << 10, "by Python's parser, which calls Python code for each number"
    assert len(calls) < 1000


def test_a_long_value_with_bad_json_is_refused_with_the_position_of_the_error() -> None:
    invalid = refused(with_fields(f'"countdown": NaN, "message": [{filled("1")}]'))

    assert invalid.reason is Reason.NOT_JSON
    assert "line 1 column" in invalid.detail


def test_a_key_written_twice_in_a_long_value_is_refused() -> None:
    invalid = refused(with_fields(f'"message": {{{NAMES}, "a": 1.0}}'))

    assert invalid.reason is Reason.DUPLICATE_KEY
    assert "a key is written twice" in invalid.detail


def test_a_key_written_twice_above_deep_nesting_is_refused() -> None:
    deep = "[" * 1000 + "]" * 1000

    assert refused(f'{{"message": {deep}, "message": 1}}').reason is Reason.DUPLICATE_KEY


def test_a_request_has_a_thousand_headers_at_most() -> None:
    def headers(count: int) -> str:
        return with_fields(f'"headers": {json.dumps({f"h{i}": "1" for i in range(count)})}')

    assert len(accepted(headers(1000)).headers) == 1000
    invalid = refused(headers(1001))
    assert invalid.reason is Reason.BAD_HEADERS
    assert "headers has 1001 names; give at most 1000" in invalid.detail


def test_an_array_nested_200_deep_is_delivered() -> None:
    message = "[" * 200 + "]" * 200

    assert accepted(with_fields(f'"message": {message}')).message == message.encode()


def test_a_request_with_every_field_becomes_exactly_that() -> None:
    value = with_fields(
        '"id": "r-17", "key": "käse", "headers": {"b": "ü", "a": ""}, "expires_after": 1.1'
    )
    own: Headers = [("CALLER_SERVICE", b"billing"), ("n", None), ("blackbox-id", b"\xff")]

    assert parse(value, own) == Request(
        target="orders",
        message=b"hi",
        due_ms=WRITTEN_MS + 90000,
        key="käse".encode(),
        headers=[*own, ("b", "ü".encode()), ("a", b"")],
        caller="billing",
        caller_id="r-17",
        expires_ms=WRITTEN_MS + 91100,
    )


def test_optional_fields_are_absent_when_not_given() -> None:
    request = accepted(with_fields(""))

    assert (request.key, request.headers, request.caller_id, request.expires_ms) == (
        None,
        [],
        None,
        None,
    )


def test_the_countdown_of_a_record_from_the_future_runs_from_now() -> None:
    parsed = parse(with_fields(""), written_ms=LATEST_MS + 86_400_000)

    assert isinstance(parsed, Request)
    assert parsed.due_ms == LATEST_MS + 90000


def test_a_countdown_starts_at_the_timestamp_that_the_broker_set() -> None:
    ahead_ms = LATEST_MS + 3_600_000
    value = with_fields('"countdown": 60').encode()
    for _ in range(2):  # the second time it is a known one, which is read by a faster path
        stamped = Record(7, ahead_ms, None, value, [], has_broker_time=True)
        asked = format.parse(stamped, LATEST_MS)
        assert isinstance(asked, Request)
        assert asked.due_ms == ahead_ms + 60_000


def test_the_countdown_of_a_record_without_timestamp_runs_from_now() -> None:
    parsed = parse(with_fields(""), written_ms=-1)

    assert isinstance(parsed, Request)
    assert parsed.due_ms == LATEST_MS + 90000


def test_an_empty_key_is_not_a_missing_key() -> None:
    assert accepted(with_fields('"key": ""')).key == b""


@pytest.mark.parametrize(
    ("headers", "caller"),
    [
        ([], None),
        ([("CALLER_SERVICE", b"billing")], "billing"),
        ([("trace", b"\xff"), ("CALLER_SERVICE", "käse".encode())], "käse"),
        ([("CALLER_SERVICE", b"first"), ("CALLER_SERVICE", b"second")], "first"),
        ([("CALLER_SERVICE", b"\xff")], None),
        ([("CALLER_SERVICE", None)], None),
        ([("CALLER_SERVICE", b"")], None),
        ([("caller_service", b"billing")], None),
        ([("CALLER_SERVICE", b"x" * 255)], "x" * 255),
        ([("CALLER_SERVICE", ("\U0001f4a3" * 255).encode())], "\U0001f4a3" * 255),
        ([("CALLER_SERVICE", b"x" * 256)], None),
        ([("CALLER_SERVICE", b"x" * 500_000)], None),
        ([("CALLER_SERVICE", ("\U0001f4a3" * 256).encode())], None),
        ([("CALLER_SERVICE", "a\u202egnillib".encode())], None),
        ([("CALLER_SERVICE", "a\u200bbilling".encode())], None),
        ([("CALLER_SERVICE", b"two\nlines")], None),
    ],
)
def test_the_first_caller_header_names_the_caller(headers: Headers, caller: str | None) -> None:
    request = accepted(with_fields(""), headers)

    assert (request.caller, request.headers) == (caller, headers)


@pytest.mark.parametrize("mark", ["blackbox-follows", "blackbox-again"])
def test_headers_of_follow_ups_and_renewals_are_not_delivered(mark: str) -> None:
    own: Headers = [("trace", b"1")]
    asked = accepted(with_fields(f'"at": {WRITTEN_MS}'), [*own, (mark, b"TB/0@3")])
    assert asked.headers == own


@pytest.mark.parametrize("name", ["CALLER_SERVICE", "blackbox-id", "blackbox-x", "", "a\\n"])
def test_a_reserved_header_is_refused(name: str) -> None:
    value = with_fields(f'"headers": {{"a": "b", "{name}": "root"}}')
    refused = parse(value, [("CALLER_SERVICE", b"shop")])
    assert isinstance(refused, Invalid)
    assert refused.reason == "bad-headers"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)
fields = st.sampled_from([*VALID, "at", "id", "cancel", "key", "headers", "encoding", "x"])
layouts = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "separators": st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")]),
        "indent": st.none() | st.just(2),
    }
)


def check_bounded(parsed: Request | Cancel | Invalid) -> None:
    if isinstance(parsed, Invalid):
        assert parsed.detail.isprintable()
        assert 0 < len(parsed.detail) <= 300


@given(st.none() | st.binary(max_size=300))
def test_arbitrary_bytes_never_raise(value: bytes | None) -> None:
    check_bounded(parse(value))


@given(json_values)
def test_arbitrary_json_never_raises(value: Any) -> None:
    check_bounded(parse(json.dumps(value)))


@given(st.dictionaries(fields | st.text(max_size=200), json_values, max_size=8))
def test_arbitrary_fields_never_raise(asked: dict[str, Any]) -> None:
    check_bounded(parse(json.dumps({"topic": "orders", "message": "hi", "countdown": 9} | asked)))


@given(fields, st.text(min_size=60, max_size=3000) | st.integers(10**70, 10**300))
def test_a_detail_stays_short_whatever_it_shows(field: str, held: Any) -> None:
    check_bounded(parse(with_fields(f'"encoding": "base64", "{field}": {json.dumps(held)}')))


@given(st.data())
def test_mutated_requests_never_raise(data: st.DataObject) -> None:
    value = with_fields('"at": null, "countdown": 9, "id": "r-17", "headers": {"a": "b"}').encode()
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(value)))
        end = data.draw(st.integers(start, min(len(value), start + 3)))
        value = value[:start] + data.draw(st.binary(max_size=3)) + value[end:]

    check_bounded(parse(value))


@given(st.text(), layouts)
def test_a_string_is_delivered_as_its_utf8_bytes(message: str, layout: dict[str, Any]) -> None:
    asked = {"topic": "orders", "message": message, "countdown": 1.5}

    assert accepted(json.dumps(asked, **layout)).message == message.encode()


@given(st.binary())
def test_base64_is_delivered_as_its_decoded_bytes(message: bytes) -> None:
    text = b64encode(message).decode()

    assert accepted(with_fields(f'"encoding": "base64", "message": "{text}"')).message == message


number_texts = st.from_regex(
    r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?", fullmatch=True
)
names = st.sampled_from(["a", "b", "a b", "message", "topic", "é", '"', "\\"]).map(json.dumps)
message_texts = st.recursive(
    number_texts | names | st.sampled_from(["null", "true", "false"]),
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda held: "[" + " ,\t".join(held) + "]")
        | st.lists(st.tuples(names, inner), max_size=4).map(
            lambda pairs: "{" + ", ".join(f"{name}: {held}" for name, held in pairs) + "}"
        )
    ),
    max_leaves=8,
)


class TwiceNamedError(Exception):
    pass


def exactly(text: str | bytes) -> Any:
    def pairs(found: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        if len(dict(found)) < len(found):
            raise TwiceNamedError
        return found

    return json.loads(text, parse_int=Decimal, parse_float=Decimal, object_pairs_hook=pairs)


@given(message_texts)
@example('{"a":1,"a":1}')
@example('{"message":{"message":5},"message":5}')
@example('{"a": 1E400, "a": "a"}')
@example('{"a":12345678901234567890123,"b":{"a":1.00}}')
def test_a_message_is_delivered_exactly_or_refused(message: str) -> None:
    parsed = parse(with_fields("", leave_out="message")[:-1] + f', "message": {message}}}')

    if isinstance(parsed, Invalid) and parsed.reason is Reason.DUPLICATE_KEY:
        with pytest.raises(TwiceNamedError):
            exactly(message)
    elif isinstance(parsed, Invalid):
        assert parsed.reason is Reason.BAD_MESSAGE
        assert re.search(r"inf", repr(json.loads(message)))
    else:
        assert isinstance(parsed, Request)
        expected = exactly(message)
        if isinstance(expected, str):
            assert parsed.message == expected.encode()
        elif parsed.message is None:
            assert message == "null"
        else:
            assert exactly(parsed.message) == expected


@given(
    message_texts,
    st.lists(
        st.sampled_from(
            [
                r'"key": "\\\"\\\\"',
                r'"key": "a\u0022, \u005c"',
                '"key": "{message:"',
                r'"headers": {"a\"\\": "1,2", "b": "\u00e9"}',
                '"id": "r-17"',
                '"expires_after": 1.50',
                '"expires_after": null',
            ]
        ),
        max_size=3,
        unique_by=lambda field: field[:4],
    ),
    st.integers(0, 4),
)
def test_a_message_is_delivered_exactly_whatever_fields_surround_it(
    message: str, others: list[str], place: int
) -> None:
    held = f'[{message}, 1.0e0, "\\" \\\\", 12.10]'
    fields = [*others, '"topic": "orders"', '"countdown": 9.00']
    fields.insert(place, f'"message" : {held}')
    parsed = parse("{" + " , ".join(fields) + "}")

    if isinstance(parsed, Invalid):
        assert parsed.reason in {Reason.DUPLICATE_KEY, Reason.BAD_MESSAGE}, parsed.detail
    else:
        assert isinstance(parsed, Request)
        assert parsed.message is not None
        assert exactly(parsed.message) == exactly(held)
        assert parsed.message.endswith(rb',1.0e0,"\" \\",12.10]')
        assert orjson.dumps(orjson.loads(parsed.message)) == orjson.dumps(orjson.loads(held))


@given(st.sampled_from([*map(json.dumps, VALID), r'"\u0074opic"', r'"at"']), json_values)
def test_a_field_written_twice_never_passes(name: str, held: Any) -> None:
    text = json.dumps(held)

    value = with_fields("")[:-1] + f", {name}: {text}, {name}: {text}}}"

    assert isinstance(parse(value), Invalid)


@given(st.sampled_from(['"id": "b"', '"id": null', r'"\u0069d": "b"', '"cancel": true']))
def test_a_cancel_with_a_field_twice_never_passes(again: str) -> None:
    assert isinstance(parse(f'{{"id": "a", "cancel": true, {again}}}'), Invalid)


@given(st.sampled_from(["id", "cancel", "topic", "countdown"]), json_values, json_values, st.data())
def test_a_further_field_that_is_null_changes_nothing(
    name: str, held: Any, other: Any, data: st.DataObject
) -> None:
    accepted(with_fields(""))  # its topic is a known one from now on
    named = {"topic": "orders", "message": other, "countdown": 9, "id": "a"}
    asked = data.draw(st.sampled_from([named, {"id": "a", "cancel": True}])) | {name: held}

    assert parse(json.dumps(asked)) == parse(json.dumps(asked | {"key": None}))


@given(st.floats(0, LONGEST_S, exclude_min=True) | st.integers(1, LONGEST_S))
@example(1.1)
@example(0.1 + 0.2)
@example(34559999.999)
@example(5e-324)
def test_a_countdown_ends_at_the_first_millisecond_that_is_not_early(countdown: float) -> None:
    request = accepted(with_fields(f'"countdown": {countdown!r}'))

    assert request.due_ms - WRITTEN_MS == ceil(Decimal(repr(countdown)) * 1000)


@given(st.integers(-(2**63), 2**63), st.integers(-1, 2**53))
def test_a_due_time_is_never_before_the_request_nor_too_far(at: int, written_ms: int) -> None:
    parsed = parse(with_fields(f'"at": {at}'), written_ms=written_ms)
    start_ms = written_ms if 0 <= written_ms <= LATEST_MS else LATEST_MS

    if at > start_ms + LONGEST_S * 1000:
        assert isinstance(parsed, Invalid)
        assert parsed.reason is Reason.TOO_FAR
    else:
        assert isinstance(parsed, Request)
        assert parsed.due_ms == max(at, start_ms)


@given(
    st.datetimes(timezones=st.timezones())
    | st.datetimes(datetime(2025, 12, 1), datetime(2027, 3, 1), timezones=st.timezones())
)
def test_every_rfc_3339_instant_is_parsed_exactly(at: datetime) -> None:
    text = at.isoformat()
    parsed = parse(with_fields(f'"at": "{text}"'))
    at_ms = int(at.replace(microsecond=0).timestamp()) * 1000 + ceil(at.microsecond / 1000)

    if re.search(r":\d\d:\d\d$", text.partition("T")[2][8:]):
        assert isinstance(parsed, Invalid), "an offset with seconds is not RFC 3339"
    elif isinstance(parsed, Request):
        assert parsed.due_ms == max(at_ms, WRITTEN_MS)
    else:
        assert at_ms > WRITTEN_MS + LONGEST_S * 1000
