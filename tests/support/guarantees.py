"""Which test shows which statement of docs/guarantees.md, and the check that these tests passed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"

NO_TOOL = "no such tool here: "
"""How the reason of a skip starts if a tool is missing that the README does not require."""


def named_tests(text: str | None = None) -> set[str]:
    """The tests that the page, or a part of it, names, as `tests/unit/test_clock.py::test_…`."""
    whole = PAGE.read_text() if text is None else text
    return set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", whole))


def is_in_proof_only(name: str) -> bool:
    """Whether this test, a `path::function`, is marked `proof` with all its cases."""
    path, _, function = name.partition("::")
    source = PAGE.parents[1] / path
    tests = ast.parse(source.read_text()).body if source.exists() else []
    return any(
        isinstance(test, ast.FunctionDef)
        and test.name == function
        and "pytest.mark.proof" in map(ast.unparse, test.decorator_list)
        for test in tests
    )


class GuaranteedTests:
    """Fails a run of the whole suite in which a test that the page names did not pass.

    A test that lacked a tool is reported and does not fail the run; in CI it has already failed.
    Tests that only `make proof` runs are required there.
    """

    def __init__(self, *, is_proof: bool = False) -> None:
        self._is_proof = is_proof
        self._passed: set[str] = set()
        self._failed: set[str] = set()
        self._without_tool: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("[")[0]
        if (reason := _tool_missed(report)) is not None:
            self._without_tool[name] = reason
        elif report.failed or report.skipped:
            self._failed.add(name)
        elif report.when == "call":
            self._passed.add(name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if is_whole(session.config) and self._unproven():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        if is_whole(config):
            for name in self._unproven():
                terminalreporter.write_line(f"{PAGE.name} names {name}: it did not pass", red=True)
            for name in sorted(named_tests() & self._without_tool.keys() - self._failed):
                reason = self._without_tool[name]
                terminalreporter.write_line(f"{PAGE.name} names {name}: {reason}", yellow=True)

    def _unproven(self) -> list[str]:
        required = {name for name in named_tests() if self._is_proof or not is_in_proof_only(name)}
        return sorted(required - ((self._passed | self._without_tool.keys()) - self._failed))


def _tool_missed(report: pytest.TestReport) -> str | None:
    """Why the test was skipped, if a tool was missing."""
    if not report.skipped or not isinstance(report.longrepr, tuple):
        return None
    reason = report.longrepr[2].removeprefix("Skipped: ")
    return f"skipped, {reason}" if reason.startswith(NO_TOOL) else None


def is_whole(config: pytest.Config) -> bool:
    """Whether all tests run, not a selection."""
    is_all = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return is_all and not (config.option.keyword or config.option.markexpr)
