"""Pages with generated parts. The text around these parts is written by hand.

A part lies between `<!-- begin NAME: … -->` and `<!-- end NAME -->`, and `PARTS` has its content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.docs import cli, http, metrics, path, records, redis, settings

DOCS = Path(__file__).parents[2] / "docs"

PARTS: Mapping[str, Callable[[], str]] = {
    "buckets": metrics.table_of_buckets,
    "cli": cli.commands,
    "cli-commands": cli.table_of_commands,
    "exit-codes": cli.table_of_exit_codes,
    "http-objects": http.objects,
    "http-open": http.table_of_open_paths,
    "http-requests": http.operations,
    "http-statuses": http.table_of_statuses,
    "http": http.table_of_requests,
    "metrics": metrics.table_of_metrics,
    "path": path.summary,
    "path-dispatch": path.dispatch,
    "path-intake": path.intake,
    **records.EXAMPLES,
    "receipt": records.table_of_receipt,
    "redis-example": redis.example,
    "redis-keys": redis.table_of_keys,
    "redis-payload": redis.table_of_payload,
    "redis-shared": redis.table_of_shared,
    "redis-state": redis.table_of_state,
    "settings": settings.table_of_settings,
}
"""The content of each part, by name."""

_PART = re.compile(
    r"(<!-- begin ([\w-]+): `make docs` [^\n]* -->\n).*?(<!-- end \2 -->)", re.DOTALL
)


def generated_pages() -> list[Path]:
    """The pages of `docs/` that have generated parts."""
    return [page for page in sorted(DOCS.glob("*.md")) if _PART.search(page.read_text())]


def parts_of(page: Path) -> list[str]:
    """The names of the generated parts of a page."""
    return [found[2] for found in _PART.finditer(page.read_text())]


def rewritten(text: str) -> str:
    """The text of a page with its parts as the code has them. Raises KeyError for an unknown part."""
    return _PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n\n{found[3]}", text)
