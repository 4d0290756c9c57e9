"""Reference pages match the code, and links between pages have targets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from blackbox.core.plan import Binding
from blackbox.records.entry import Entry
from blackbox.records.receipt import Receipt
from tests.docs.docstrings import items_in
from tests.docs.pages import DOCS, PARTS, generated_pages, parts_of, rewritten
from tests.docs.redis import state_fields

ROOT = DOCS.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", generated_pages(), ids=lambda page: page.name)
def test_a_reference_page_matches_the_code(page: Path) -> None:
    text = page.read_text()
    assert rewritten(text) == text, f"docs/{page.name} is out of date: run `make docs`"


def test_every_generated_part_is_in_one_page() -> None:
    assert sorted(name for page in generated_pages() for name in parts_of(page)) == sorted(PARTS)


def test_every_documented_field_of_the_key_state_exists_in_the_code() -> None:
    code = "".join(path.read_text() for path in (ROOT / "blackbox" / "index").glob("*.py"))
    assert [
        name for name in state_fields().keys() - Binding._fields if f'"{name}"' not in code
    ] == []


def test_every_part_of_a_payload_and_of_a_receipt_is_documented() -> None:
    assert items_in(Entry.__doc__ or "").keys() == set(Entry._fields)
    assert items_in(Receipt.__doc__ or "").keys() == {part.name for part in fields(Receipt)}


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
    repeated = {f"{anchor}-{n}" for anchor, most in found.items() for n in range(1, most + 1)}
    return frozenset(found) | repeated


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text()))
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" not in link:
                yield page, link


def test_every_link_between_pages_leads_somewhere() -> None:
    dead = []
    for page, link in links():
        path, _, anchor = link.partition("#")
        to = (page.parent / path).resolve() if path else page
        if not to.exists() or (anchor and anchor not in anchors(to)):
            dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert dead == []
