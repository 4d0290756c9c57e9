"""The steps in docs/adding-a-format.md are sufficient."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from blackbox import formats
from blackbox.config.settings import Settings
from blackbox.config.wiring import formats as formats_of
from blackbox.formats.format import parser_error
from blackbox.records.request import Invalid, Reason, Record, Request

PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-format.md").read_text()
[SOURCE] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
[ROW] = re.findall(r'^    "note": (FormatDescription\(.*\)),$', PAGE, re.MULTILINE)
NOW_MS = 1_769_842_700_000


@pytest.fixture
def format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> formats.Format:
    """The format of the page, added to the product as the page says, and removed after the test."""
    (tmp_path / "note.py").write_text(SOURCE)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    monkeypatch.setitem(
        formats.FORMATS, "note", eval(ROW, {"FormatDescription": formats.FormatDescription})
    )
    given = {"kafka_bootstrap_servers": "localhost:1", "redis_url": "redis://localhost:1"}
    return formats_of(Settings(**given, request_topics="notes:note"))["notes"]  # type: ignore[arg-type]


def parsed(format: formats.Format, value: bytes | None) -> object:
    record = Record(0, NOW_MS, b"k", value, [("CALLER_SERVICE", b"billing")])
    return format.parse(record, NOW_MS)


def test_the_example_is_a_format_of_sixty_lines(format: formats.Format) -> None:
    assert len(SOURCE.splitlines()) <= 60
    value = b'{"to": "reminders", "text": "Pay the invoice", "in": 1.5}'
    assert parsed(format, value) == Request(
        "reminders", b"Pay the invoice", NOW_MS + 1500, b"k",
        [("CALLER_SERVICE", b"billing")], "billing", None, None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "reason", "field"),
    [
        (None, Reason.EMPTY, ""),
        (b"\xff", Reason.NOT_JSON, ""),
        (b'{"to": "reminders", "text": 7, "in": 90}', Reason.BAD_MESSAGE, "text"),
        (b'{"to": "reminders", "text": "x", "in": "90"}', Reason.BAD_DUE_TIME, "in"),
        (b'{"to": "reminders", "text": "x", "in": 1e308}', Reason.TOO_FAR, "in"),
        (b'{"to": "reminders", "text": "x", "in": 1e999}', Reason.BAD_DUE_TIME, "in"),
        (b'{"to": "reminders", "text": "x", "in": 9, "at": 9}', Reason.UNKNOWN_FIELD, "at"),
        (b'{"text": "x", "in": 90}', Reason.BAD_TOPIC, "to"),
        (b'{"to": "a/b", "text": "x", "in": 90}', Reason.BAD_TOPIC, "to"),
        (b'{"to": "notes", "text": "x", "in": 90}', Reason.FORBIDDEN_TOPIC, "to"),
    ],
)
def test_the_example_refuses_records_with_a_reason(
    format: formats.Format, value: bytes | None, reason: Reason, field: str
) -> None:
    refused = parsed(format, value)
    assert isinstance(refused, Invalid)
    assert refused.reason == reason
    assert field in refused.detail


def test_a_fault_in_a_parser_makes_a_dead_letter_and_does_not_stop_the_shard(
    format: formats.Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(record: Record, latest_ms: int) -> Request:
        raise KeyError("to")

    monkeypatch.setattr("blackbox.formats.format.parser_error", parser_error)
    monkeypatch.setattr(format, "_read", read)

    found = parsed(format, b"{}")

    assert isinstance(found, Invalid)
    assert found.reason is Reason.PARSER_ERROR
    assert re.search(r"KeyError at test_adding_a_format.py:\d+", found.detail)
