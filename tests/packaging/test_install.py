"""How blackbox is installed: from a checkout. The package of that name on PyPI is unrelated."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("blackbox", "bench", "deploy", "docs", "helm")
STRANGERS = re.compile(rb"\bblackbox\[|pip install (-\S+ )*['\"]?blackbox\b")


def test_no_text_installs_the_unrelated_package_from_pypi() -> None:
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    texts = [path for path in (*ROOT.glob("*"), *inside) if path.is_file()]
    assert {"README.md", "audit.md", "batch.py"} <= {path.name for path in texts}
    assert [path for path in texts if STRANGERS.search(without_own_extras(path))] == []


def without_own_extras(path: Path) -> bytes:
    """In pyproject.toml the name refers to the project itself, not to PyPI."""
    text = path.read_bytes()
    return text.replace(b'"blackbox[server]"', b"") if path.name == "pyproject.toml" else text
