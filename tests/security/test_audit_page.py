"""The HTML page of the audit shows text of callers, and contains only its own tags."""

from __future__ import annotations

from collections.abc import Mapping
from html.parser import HTMLParser

import pytest

from blackbox.jobs.audit.audit import AuditVerdict
from blackbox.jobs.audit.positions import PositionFinding
from blackbox.jobs.audit.report import page
from tests.security.hostile_texts import TEXTS

WRITABLE = [text for text in TEXTS if text.encode(errors="replace").decode() == text]
"""Names of callers are UTF-8."""

SHOWN = 8


class Tags(HTMLParser):
    """The tags of a page with the names of their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[tuple[str, tuple[str, ...]]] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add((tag, tuple(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def verdict_about(*names: str) -> AuditVerdict:
    """A verdict in which callers, targets and details have these names."""
    counts: dict[str | None, Mapping[str, int]] = {
        name: {"delivered": 1, "dead": 1} for name in names
    }
    findings = [
        PositionFinding("lost", "TB", 0, n, "id", name, name) for n, name in enumerate(names)
    ]
    return AuditVerdict(
        seen_ms=0, took_s=1.0, topics=["TB"], shards=1, states={"delivered": 1},
        callers=counts, targets=counts, hours={}, cancels=0, cold=0, unknown=0,
        by_kind={"lost": len(names)}, exceptions=findings, lateness=None, due=None, asked=None,
        delivered=None,
    )  # fmt: skip


@pytest.mark.parametrize("first", range(0, len(WRITABLE), SHOWN))
def test_text_of_callers_adds_no_tags_to_the_audit_page(first: int) -> None:
    texts = WRITABLE[first : first + SHOWN]
    plain = Tags(page(verdict_about(*(f"plain{n}" for n in range(len(texts))))))
    hostile = Tags(page(verdict_about(*texts)))
    assert hostile.tags == plain.tags
    assert [text for text in texts if text.strip()[:20] not in hostile.text] == []
