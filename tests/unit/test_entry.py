from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blackbox.records.entry import Entry, HeaderValues, decode, encode
from blackbox.records.request import MAX_OFFSET, Reason

texts = st.text(max_size=20)
epoch_ms = st.integers(0, 2**53)
headers = st.lists(st.tuples(texts, st.none() | st.binary(max_size=20)), max_size=4)
entries = st.builds(
    Entry,
    target=texts,
    message=st.none() | st.binary(max_size=200),
    due_ms=epoch_ms,
    key=st.none() | st.binary(max_size=20),
    headers=headers,
    caller=st.none() | texts,
    caller_id=st.none() | texts,
    expires_ms=st.none() | epoch_ms,
    attempts=st.integers(0, 1000),
    shortened=st.integers(0, 2),
    waits=st.integers(0, 1000),
    alone=st.booleans(),
    reason=st.none() | st.sampled_from([*Reason, "", "word"]),
    detail=st.none() | texts,
    origin=st.none() | st.integers(0, MAX_OFFSET),
    left_bytes=st.integers(0, MAX_OFFSET),
)


def _in_bytes(pairs: HeaderValues) -> list[tuple[str, bytes | None]]:
    return [(name, held.encode() if isinstance(held, str) else held) for name, held in pairs]


@given(entries)
def test_an_entry_is_read_as_it_was_stored(entry: Entry) -> None:
    again = decode(encode(entry))

    assert _in_bytes(again.headers) == _in_bytes(entry.headers)
    assert again._replace(headers=()) == entry._replace(headers=())


@given(entries)
def test_an_entry_that_was_read_is_stored_in_the_same_bytes(entry: Entry) -> None:
    stored = encode(entry)

    assert encode(decode(stored)) == stored


@given(st.binary(max_size=300))
def test_the_message_is_stored_unchanged_after_the_first_newline(message: bytes) -> None:
    assert encode(Entry("orders", message, 1)).partition(b"\n")[2] == message


def test_a_tombstone_is_not_an_empty_message() -> None:
    assert decode(encode(Entry("orders", None, 1))).message is None
    assert decode(encode(Entry("orders", b"", 1))).message == b""


def test_an_empty_key_is_not_a_missing_key() -> None:
    assert decode(encode(Entry("orders", b"", 1, key=b""))).key == b""
    assert decode(encode(Entry("orders", b"", 1))).key is None


@pytest.mark.parametrize("caller", [None, "shop"])
def test_a_header_with_a_nul_is_kept_as_bytes(
    caller: str | None,
) -> None:
    given_headers = [("a", b"one\x00two"), ("b", b"text"), ("c", b"\\u0000"), ("d", b"\x00")]

    again = decode(encode(Entry("orders", b"", 1, headers=given_headers, caller=caller)))

    assert again.headers == [("a", b"one\x00two"), ("b", "text"), ("c", "\\u0000"), ("d", b"\x00")]


def test_binary_and_null_headers_keep_their_order() -> None:
    given_headers = [("a", b"\xff\x00"), ("b", None), ("a", b"text"), ("c", b'{"base64":"AA=="}')]

    again = decode(encode(Entry("orders", b"", 1, headers=given_headers)))

    assert _in_bytes(again.headers) == given_headers


def test_absent_fields_take_no_room() -> None:
    assert encode(Entry("orders", b"hi", 1)) == b'{"target":"orders","due_ms":1}\nhi'


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"no newline",
        b"\n",
        b"{}\n",
        b"17\nhi",
        b'["target"]\nhi',
        b'{"target":"orders"}\nhi',
        b'{"target":"orders","due_ms":1,"of a later version":2}\nhi',
        b'{"target":"orders","due_ms":1,"headers":[["a"]]}\nhi',
        b'{"target":"orders","due_ms":1,"key":{"base64":"?"}}\nhi',
    ],
)
def test_a_value_that_is_not_an_entry_is_refused(stored: bytes) -> None:
    with pytest.raises(ValueError, match="not an entry"):
        decode(stored)


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_refused(stored: bytes) -> None:
    with pytest.raises(ValueError, match="not an entry"):
        decode(stored)
