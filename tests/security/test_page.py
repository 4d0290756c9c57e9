"""`docs/security.md` shows what `deploy/` ships, and names existing tests."""

from __future__ import annotations

import re

from tests.security.rights import REDIS_ACL, ROOT, kafka_rights

PAGE = (ROOT / "docs" / "security.md").read_text()
HERE = ROOT / "tests" / "security"


def test_the_page_shows_the_shipped_redis_users() -> None:
    assert f"```text\n{REDIS_ACL.read_text()}```" in PAGE


def test_the_page_shows_the_shipped_kafka_permissions() -> None:
    rows = [
        f"| {r.command} | {r.resource} `{r.name}`{'…' if r.pattern == 'prefixed' else ''} "
        f"| {r.operation} | {r.what_for} |"
        for r in kafka_rights()
    ]
    table = PAGE.partition("| command | resource | operation | what for |\n")[2].partition("\n\n")[
        0
    ]
    assert table.splitlines()[1:] == rows


def test_the_tests_that_the_page_names_exist() -> None:
    shown = PAGE.partition("## ")[0]
    files = set(re.findall(r"`(test_\w+\.py)`", shown))
    names = set(re.findall(r"`(test_\w+)`", shown))
    assert files
    assert names
    assert all((HERE / name).exists() for name in files)
    source = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    assert [name for name in names if f"def {name}(" not in source] == []
