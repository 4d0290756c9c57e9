"""The page `docs/proof.md`: the results of a run of all tests."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.guarantees import PAGE, named_tests

ROOT = Path(__file__).parents[2]


class ProofPage:
    """Gathers the reports of a run and writes the page at its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = datetime.now(UTC)
        self._seconds: dict[str, float] = defaultdict(float)
        self._outcomes: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.when == "call" or not report.passed:
            self._outcomes[report.nodeid].add(report.outcome)

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(self.text())

    def text(self) -> str:
        lasted = (datetime.now(UTC) - self._began).total_seconds() / 60
        counts = [sum(self._is(name, one) for name in self._outcomes) for one in _OUTCOMES]
        numbers = ", ".join(
            f"{count:,} {one}" for count, one in zip(counts, _OUTCOMES, strict=True)
        )
        return _PAGE.format(
            began=f"{self._began:%Y-%m-%d %H:%M} UTC",
            commit=_commit(),
            minutes=f"{lasted:.0f}",
            numbers=numbers,
            machine=f"{os.cpu_count()} cores, Python {platform.python_version()}",
            guarantees="\n".join(self._guarantees()),
            files="\n".join(self._files()),
        )

    def _is(self, name: str, outcome: str) -> bool:
        found = self._outcomes[name]
        return outcome in found and (outcome == "failed" or "failed" not in found)

    def _guarantees(self) -> list[str]:
        rows = []
        for line in PAGE.read_text().splitlines():
            if not line.startswith("| **"):
                continue
            promise = line.split("**")[1].rstrip(".")
            for test in sorted(named_tests(line)):
                cases = [name for name in self._outcomes if name.partition("[")[0] == test]
                took = sum(self._seconds[name] for name in cases)
                rows.append(f"| {promise} | `{test}` | {self._result(cases)} | {took:.0f} |")
        return rows

    def _files(self) -> list[str]:
        files: dict[str, list[str]] = defaultdict(list)
        for name in self._outcomes:
            files[name.partition("::")[0]].append(name)
        return [
            f"| `{file}` | {len(names)} | {self._result(names)} | {sum(self._seconds[n] for n in names):.0f} |"
            for file, names in sorted(files.items())
        ]

    def _result(self, names: list[str]) -> str:
        if not names:
            return "**not run**"
        failed = sum(self._is(name, "failed") for name in names)
        skipped = sum(self._is(name, "skipped") for name in names)
        told = f"**{failed} failed**" if failed else "passed"
        return f"{told}, {skipped} skipped" if skipped else told


_OUTCOMES = ("passed", "failed", "skipped")

_PAGE = """# The latest proof

`make proof` runs every test, including those that `make test` leaves out because they take long, and writes this page.

{began}, commit {commit}: **{numbers}** in {minutes} minutes ({machine}).

## Guarantees

The tests that [the guarantees](guarantees.md) name, with all their cases.

| guarantee | test | result | s |
| --- | --- | --- | ---: |
{guarantees}

## All tests

| file | tests | result | s |
| --- | ---: | --- | ---: |
{files}
"""


def _commit() -> str:
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip() or "unknown"
