"""Each guarantee names the tests that show it; a run of all tests fails unless they pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.promises import PAGE, named_tests

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]


def test_every_promise_names_a_test() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| **")]
    assert rows
    for row in rows:
        assert "`tests/" in row.split("|")[-2], row


@pytest.mark.parametrize("name", sorted(named_tests()))
def test_every_test_that_is_named_exists(name: str) -> None:
    path, _, function = name.partition("::")
    assert f"def {function}(" in (ROOT / path).read_text()


@pytest.mark.parametrize(
    ("body", "code"),
    [("assert True", 0), ("import pytest; pytest.skip('not today')", 1), (None, 1)],
)
def test_a_run_without_a_test_that_was_promised_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, body: str | None, code: int
) -> None:
    page = pytester.path / "guarantees.md"
    page.write_text("`tests/test_it.py::test_promise`")
    monkeypatch.setattr("tests.promises.PAGE", page)
    pytester.makeini("[pytest]\ntestpaths = tests")
    tests = pytester.mkdir("tests")
    promised = f"def test_promise(): {body}\n" if body else ""
    (tests / "test_it.py").write_text(f"{promised}def test_other(): pass\n")
    pytester.makeconftest(
        "from tests.promises import Promises\n"
        "def pytest_configure(config): config.pluginmanager.register(Promises())\n"
    )
    assert pytester.inline_run().ret == code
