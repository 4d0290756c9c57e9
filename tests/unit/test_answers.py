"""The form in which dead letters are shown."""

from __future__ import annotations

import json

import pytest

from blackbox.api.answers import LetterState
from blackbox.journal.dead_letter_topic import DeadLetter


def shown(value: bytes, most_bytes: int) -> tuple[str | None, str | None]:
    letter = DeadLetter(
        place="letters/0@1", at_ms=0, reason="x", detail="x", source="x", caller=None,
        key=None, value=value, headers=[], value_bytes=len(value),
    )  # fmt: skip
    told = LetterState.of(letter, most_bytes)
    return told.value, told.value_encoding


@pytest.mark.parametrize(
    ("value", "whole"),
    [(b"\x01" * 50, 16), (b'"' * 150, 50), ("ä".encode() * 100, 50), (b"a" * 200, 100)],
)
def test_a_text_is_cut_to_the_byte_limit_of_its_json(value: bytes, whole: int) -> None:
    text, encoding = shown(value, 100)
    assert (text, encoding) == (value.decode()[:whole], None)
    assert len(json.dumps(text, ensure_ascii=False).encode()) - 2 <= 100


@pytest.mark.parametrize("value", [b"", b"a" * 100, b"\x01" * 16, b'"' * 50])
def test_a_text_whose_json_fits_is_not_cut(value: bytes) -> None:
    assert shown(value, 100) == (value.decode(), None)


def test_binary_content_is_cut_to_the_byte_limit_of_its_base64() -> None:
    assert shown(b"\xff" * 200, 100) == ("/" * 100, "base64")
