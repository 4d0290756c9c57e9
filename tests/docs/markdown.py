"""Markdown of the generated parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a pipe in a cell is escaped, and a cell is one line."""
    return "\n".join(map(_row, [head, ["---"] * len(head), *rows]))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", r"\|").strip()


def paragraphs(text: str) -> list[str]:
    """Its paragraphs, each on one line."""
    return [" ".join(part.split()) for part in text.strip().split("\n\n")]


def code(text: object) -> str:
    return f"`{text}`"


def codes(texts: Iterable[object]) -> str:
    return ", ".join(map(code, texts))


def limits(least: float | None, most: float | None) -> str:
    """`1 to 1,000`, `at least 1`, `at most 1,000`, or nothing."""
    if least is None:
        return "" if most is None else f"at most {most:,}"
    return f"at least {least:,}" if most is None else f"{least:,} to {most:,}"
