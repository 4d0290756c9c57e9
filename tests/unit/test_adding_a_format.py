"""What docs/adding-a-format.md says is all it takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from blackbox import formats
from blackbox.config.settings import Settings
from blackbox.config.wiring import formats as formats_of
from blackbox.records.request import Invalid, Reason, Record, Request

PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-format.md").read_text()
[SOURCE] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
[ROW] = re.findall(r'^    "line": (FormatDescription\(.*\)),$', PAGE, re.MULTILINE)
NOW_MS = 1_769_842_700_000


@pytest.fixture
def format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> formats.Format:
    """The format of the page, added to the product as the page says, and removed after the test."""
    (tmp_path / "line.py").write_text(SOURCE)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    monkeypatch.setitem(
        formats.FORMATS, "line", eval(ROW, {"FormatDescription": formats.FormatDescription})
    )
    given = {"kafka_bootstrap_servers": "localhost:1", "redis_url": "redis://localhost:1"}
    return formats_of(Settings(**given, request_topics="lines:line"))["lines"]  # type: ignore[arg-type]


def parsed(format: formats.Format, value: bytes | None) -> object:
    record = Record(0, NOW_MS, b"k", value, [("CALLER_SERVICE", b"billing")])
    return format.parse(record, NOW_MS)


def test_the_example_is_a_format_of_sixty_lines(format: formats.Format) -> None:
    assert len(SOURCE.splitlines()) <= 60
    assert parsed(format, b"1769842800 reminders Pay the invoice") == Request(
        "reminders", b"Pay the invoice", 1_769_842_800_000, b"k",
        [("CALLER_SERVICE", b"billing")], "billing", None, None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, Reason.BAD_MESSAGE),
        (b"\xff", Reason.BAD_MESSAGE),
        (b"soon reminders x", Reason.BAD_DUE_TIME),
        (b"9" * 5000 + b" reminders x", Reason.BAD_DUE_TIME),
        (b"9999999999 reminders x", Reason.TOO_FAR),
        (b"1769842800 a/b x", Reason.BAD_TOPIC),
        (b"1769842800 lines x", Reason.FORBIDDEN_TOPIC),
    ],
)
def test_what_it_refuses_says_why(
    format: formats.Format, value: bytes | None, reason: Reason
) -> None:
    refused = parsed(format, value)
    assert isinstance(refused, Invalid)
    assert refused.reason == reason
