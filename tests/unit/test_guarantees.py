"""Each guarantee names the tests that show it; a run of all tests fails unless they pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.guarantees import PAGE, named_tests

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]


def test_every_guarantee_names_a_test() -> None:
    page = PAGE.read_text()
    rows = [line for line in page.splitlines() if line.startswith("| **")]
    for row in rows:
        assert "`tests/" in row.split("|")[-2], row
    guarantees = page.partition("## The guarantees\n")[2].partition("\n## ")[0]
    named = dict.fromkeys(row.split("**")[1] for row in rows)
    assert [*named] == re.findall(r"^### (.+)$", guarantees, re.MULTILINE) != []


@pytest.mark.parametrize("name", sorted(named_tests()))
def test_every_test_that_is_named_exists(name: str) -> None:
    path, _, function = name.partition("::")
    assert f"def {function}(" in (ROOT / path).read_text()


SKIP = "import pytest; pytest.skip('not today')"
NO_SERVER = "from tests.conftest import missing; missing('no Kafka')"
NO_TOOL = "from tests.conftest import missing_tool; missing_tool('no faketime')"


@pytest.mark.parametrize(
    ("body", "code"), [("assert True", 0), (SKIP, 1), (NO_SERVER, 1), (None, 1)]
)
def test_a_run_fails_if_a_test_of_a_guarantee_did_not_pass(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, body: str | None, code: int
) -> None:
    guaranteed = f"def test_promise(): {body}" if body else ""
    assert run_whole(pytester, monkeypatch, guaranteed).ret == code


PARAMETERS = """import pytest
@pytest.mark.parametrize("number", [1, 2])
def test_promise(number):
    if number == 2: {}
"""
FIXTURE = """import pytest
@pytest.fixture
def tool(): {}
def test_promise(tool): pass
"""


@pytest.mark.parametrize("guaranteed", ["def test_promise(): {}", PARAMETERS, FIXTURE])
def test_a_missing_tool_on_a_laptop_is_reported_and_fails_no_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, guaranteed: str
) -> None:
    monkeypatch.delenv("CI", raising=False)
    run = run_whole(pytester, monkeypatch, guaranteed.format(NO_TOOL))
    assert run.ret == 0
    told = "guarantees.md names tests/test_it.py::test_promise: skipped, no such tool here: no faketime"
    run.stdout.fnmatch_lines([told])


def test_a_failure_beside_a_missing_tool_fails_the_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    guaranteed = f"{PARAMETERS.format(NO_TOOL)}    else: {SKIP}"
    run = run_whole(pytester, monkeypatch, guaranteed)
    assert run.ret == 1
    run.stdout.fnmatch_lines(
        ["guarantees.md names tests/test_it.py::test_promise: it did not pass"]
    )


def test_a_missing_tool_fails_the_run_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    run = run_whole(pytester, monkeypatch, f"def test_promise(): {NO_TOOL}")
    assert run.ret == 1
    run.assert_outcomes(failed=1, passed=1)


@pytest.mark.parametrize(("is_proof", "code"), [(False, 0), (True, 1)])
def test_a_test_marked_proof_is_required_only_in_a_proof(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, is_proof: bool, code: int
) -> None:
    guaranteed = f"import pytest\n@pytest.mark.proof\ndef test_promise(): {SKIP}"
    assert (
        run_whole(pytester, monkeypatch, guaranteed, f"GuaranteedTests(is_proof={is_proof})").ret
        == code
    )


def test_the_page_of_a_proof_shows_the_results_of_each_guarantee(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = "ProofPage(__import__('pathlib').Path('proof.md'))"
    run_whole(pytester, monkeypatch, PARAMETERS.format("assert False"), plugin)
    page = (pytester.path / "proof.md").read_text()
    assert "**2 passed, 1 failed, 0 skipped** in 0 minutes" in page
    assert "| Never lost | `tests/test_it.py::test_promise` | **1 failed** | 0 |" in page
    assert "| `tests/test_it.py` | 3 | **1 failed** | 0 |" in page


def run_whole(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    guaranteed: str,
    plugin: str = "GuaranteedTests()",
) -> pytest.RunResult:
    """A run of all tests of a project whose page names `test_promise`; it needs no other plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    page = pytester.mkdir("docs") / "guarantees.md"
    page.write_text("| **Never lost.** | `tests/test_it.py::test_promise` |")
    for module in ("guarantees", "proof"):
        monkeypatch.setattr(f"tests.support.{module}.PAGE", page)
    pytester.makeini("[pytest]\ntestpaths = tests\nmarkers = proof")
    tests = pytester.mkdir("tests")
    (tests / "test_it.py").write_text(f"{guaranteed}\ndef test_other(): pass\n")
    pytester.makeconftest(
        "from tests.support.guarantees import GuaranteedTests\nfrom tests.support.proof import ProofPage\n"
        f"def pytest_configure(config): config.pluginmanager.register({plugin})\n"
    )
    return pytester.runpytest_inprocess()
