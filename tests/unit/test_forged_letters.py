"""Dead letters and marks that others wrote into a shared dead-letter topic."""

from __future__ import annotations

import pytest

from blackbox.journal.dead_letter_topic import HEADER, MOST_CHARS, DeadLetter, _closing_of
from blackbox.records.outgoing import LETTER_HEADERS, MAX_DETAIL, dead_letters
from blackbox.records.request import MAX_OFFSET, MAX_PARTITION, Headers, Reason, Record, Shard

LONGEST_TOPIC = "t" * 249


def letter(headers: Headers) -> DeadLetter:
    return DeadLetter.of(Record(0, 0, None, b"a request", headers), "letters/0@0")


@pytest.mark.parametrize("text", ["x", "ä", "😀", "\udcff"])
def test_what_a_letter_says_is_cut(text: str) -> None:
    held = (100_000 * text).encode(errors="surrogateescape")
    found = letter([(name, held) for name in LETTER_HEADERS])
    lengths = [len(found.reason), len(found.detail), len(found.source)]
    assert lengths == list(MOST_CHARS.values())


def test_a_letter_without_its_headers_says_nothing() -> None:
    found = letter([("blackbox-reason", None), (100_000 * "x", b"x"), ("a", b"b")])
    assert (found.reason, found.detail, found.source) == ("", "", "")


@pytest.mark.parametrize("character", ["x", "😀"])
def test_the_longest_letters_of_blackbox_are_not_cut(character: str) -> None:
    shard, offset = Shard(LONGEST_TOPIC, MAX_PARTITION), MAX_OFFSET
    record = Record(offset, 0, b"key", b"value", [])
    for reason in Reason:
        for written in dead_letters(
            shard, LONGEST_TOPIC, record, reason, MAX_DETAIL * character + "cut"
        ):
            headers: Headers = [(name, str(text or "").encode()) for name, text in written.headers]
            found = letter(headers)
            said = (found.reason, found.detail, found.source)
            assert said == tuple(text for _, text in written.headers)


def mark(place: str) -> Record:
    return Record(0, 0, None, None, [(HEADER, f"discarded {place}".encode())])


def test_a_mark_longer_than_any_place_is_ignored() -> None:
    longest = f"{LONGEST_TOPIC}/{MAX_PARTITION}@{MAX_OFFSET}"
    assert _closing_of(mark(longest)) == [(longest, "discarded")]
    assert _closing_of(mark(100 * "x" + longest)) == []
