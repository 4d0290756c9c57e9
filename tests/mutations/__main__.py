"""Shows that the tests find bugs: each is put into a copy of the product, and the tests must fail.

`python -m tests.mutations [name ...]`; `--page` writes docs/mutations.md, where the rows of other bugs stay;
`--without-chaos` plays no faults; `--at-once 2` searches for two bugs at the same time.

The tests that the page names for a bug are run first; for a bug that is not on the page, the functions among the
bug's own tests. If none of them fails, or one no longer exists, all tests without servers are run, and then the tests
of the bug. The tests of all bugs are first run without a bug.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from tests.mutations.bugs import BUGS, Bug, Change

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mutations.md"
PARTS = (
    "blackbox",
    "tests",
    "docs",
    "pyproject.toml",
    "helm",
    "CHANGELOG.md",
    "README.md",
    "CONTRIBUTING.md",
)
WITHOUT_SERVICES = ("tests/unit", "tests/contract")
BROKEN = re.compile(r"^--seed \d+ --schedule \d+ \((.+)\), see ", re.MULTILINE)
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+(?:::\w+|\.py))", re.MULTILINE)
TEST = re.compile(r"`(tests/[^`]+)`")
ROW = re.compile(r"^\| (\S+) \| .* \| (.*) \| (.*) \|$", re.MULTILINE)
MOST_FAILURES = 3

MOST_SCHEDULES = "0.2"

ABOUT = """# Bugs that the tests find

This page lists bugs that `make mutations` planted in copies of blackbox, and shows that the tests find each of them.

- **found by**: the tests that failed with the bug. Tests on real servers run only if no test without servers found it.
- **chaos**: how many of the [schedules](chaos.md) that were played against the bug lost a request, delivered one twice, or
  hung.

| bug | what it does | found by | chaos |
| --- | --- | --- | --- |
"""


class Found(NamedTuple):
    """The tests that failed with the bug; if there are none, it was not found.

    `played` is the last fault it was played against, and how many schedules of it failed.
    """

    bug: Bug
    tests: tuple[str, ...] = ()
    played: str = "-"
    seconds: float = 0


def check_without_bugs(known: Iterable[Found]) -> None:
    """Raises SystemExit if a test that should find one of these fails without a bug."""
    tests = {test for one in known for test in one.tests or (*WITHOUT_SERVICES, *one.bug.tests)}
    if not tests:
        return
    with tempfile.TemporaryDirectory(prefix="blackbox-mutation-") as name:
        copy(Path(name))
        # one by one: with a test that no longer exists, pytest runs no others
        there = [test for test in sorted(tests) if is_there(test)]
        if failed := failing(there, Path(name), "--numprocesses", "3"):
            raise SystemExit(f"without a bug these fail already: {', '.join(failed)}")


def is_there(test: str) -> bool:
    path, _, function = test.partition("::")
    file = ROOT / path
    return file.exists() and (not function or f"def {function}(" in file.read_text())


def expected(bug: Bug) -> Found:
    """What is known of a bug before its first search: the functions among its tests."""
    return Found(bug, tuple(test for test in bug.tests if "::" in test))


def read(page: str) -> dict[str, Found]:
    """The result of each bug on the page, by its name."""
    bugs = {bug.name: bug for bug in BUGS}
    rows = [row for row in ROW.findall(page) if row[0] in bugs]
    return {name: Found(bugs[name], tuple(TEST.findall(by)), played) for name, by, played in rows}


def copy(folder: Path) -> None:
    """The product and its tests."""
    for part in PARTS:
        source = ROOT / part
        ignored = shutil.ignore_patterns("__pycache__")
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=ignored)
        else:
            shutil.copy(source, folder / part)


def apply(change: Change, path: Path) -> None:
    """Raises ValueError if the text does not occur exactly once."""
    text = path.read_text()
    if (count := text.count(change.old)) != 1:
        raise ValueError(f"{change.file} has this {count} times, not once: {change.old!r}")
    path.write_text(text.replace(change.old, change.new))


def look_for(bug: Bug, before: Found, *, is_played: bool) -> Found:
    """Run the tests on a copy with this bug: first those that found it before, then the quick ones."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="blackbox-mutation-") as name:
        folder = Path(name)
        copy(folder)
        for change in bug.changes:
            apply(change, folder / "blackbox" / change.file)
        failed = (
            failing(before.tests, folder)
            or failing(WITHOUT_SERVICES, folder)
            or failing(bug.tests, folder)
        )
        played = play_all(bug, folder) if is_played else before.played
    return Found(bug, failed, played, time.monotonic() - began)


def failing(tests: Sequence[str], folder: Path, *options: str) -> tuple[str, ...]:
    """Which of these fail; none if one of them does not exist, because pytest then runs no others."""
    if not tests:
        return ()
    command = [
        sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider",
        "--maxfail", str(MOST_FAILURES), "--deselect", "tests/unit/test_mutations.py",
        *options, *tests,
    ]  # fmt: skip
    with_long_ones = os.environ | {"BLACKBOX_TEST_PROOF": "1"}
    ended = subprocess.run(
        command, cwd=folder, env=with_long_ones, capture_output=True, text=True, check=False
    )
    return tuple(dict.fromkeys(FAILED.findall(ended.stdout)))


def play_all(bug: Bug, folder: Path) -> str:
    """Play its faults one after the other, until one shows it; returns the result of the last one."""
    played = "-"
    for fault in bug.faults:
        broken, schedules = play(fault, folder)
        played = f"{fault}: {broken} of {schedules}"
        if broken:
            break
    return played


def play(fault: str, folder: Path) -> tuple[int, int]:
    """How many of how many schedules of this fault violate a guarantee."""
    command = [
        sys.executable, "-m", "tests.chaos", "--fault", fault, "--share", MOST_SCHEDULES,
    ]  # fmt: skip
    inside = os.environ | {"TMPDIR": str(folder)}
    ended = subprocess.run(
        command, cwd=folder, env=inside, capture_output=True, text=True, check=False
    )
    [schedules] = re.findall(r"^seed \d+: (\d+) schedules", ended.stdout, re.MULTILINE)
    return len(BROKEN.findall(ended.stdout)), int(schedules)


def run(
    names: Annotated[list[str] | None, typer.Argument(help="Only these bugs.")] = None,
    page: Annotated[bool, typer.Option("--page", help="Write docs/mutations.md.")] = False,
    without_chaos: Annotated[
        bool,
        typer.Option("--without-chaos", help="Play no faults; the page keeps what they showed."),
    ] = False,
    at_once: Annotated[int, typer.Option(min=1, help="How many bugs to search for at once.")] = 1,
) -> None:
    """Exit code 1 if some bug is not found."""
    console = Console()
    unknown = set(names or ()) - {bug.name for bug in BUGS}
    if unknown:
        raise typer.BadParameter(f"no such bug: {', '.join(sorted(unknown))}")
    before = read(PAGE.read_text())
    known = [
        before.get(bug.name) or expected(bug) for bug in BUGS if not names or bug.name in names
    ]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        Progress(*columns, TimeElapsedColumn(), console=console) as bar,
        ThreadPoolExecutor(at_once) as pool,
    ):
        shown = bar.add_task("without a bug", total=len(known))
        check_without_bugs(known)
        rows, writing = dict(before), Lock()

        def search(one: Found) -> Found:
            bar.update(shown, description=one.bug.name)
            done = look_for(one.bug, one, is_played=not without_chaos)
            bar.advance(shown)
            if not console.is_terminal or not done.tests:
                console.print(f"{one.bug.name}: {len(done.tests)} tests failed; {done.played}")
            with writing:  # after each bug, because a run takes more than an hour
                rows[one.bug.name] = done
                if page:
                    write_page(rows)
            return done

        found = list(pool.map(search, known))
    console.print(_table(found))
    check_without_bugs(
        now
        for before_it, now in zip(known, found, strict=True)
        if now.tests and not set(now.tests) <= set(before_it.tests)
    )
    raise typer.Exit(int(not all(one.tests for one in found)))


def write_page(found: Mapping[str, Found]) -> None:
    new = PAGE.with_suffix(".new")
    new.write_text(written(found))
    new.replace(PAGE)  # as a whole: the page is copied for the next search at the same time


def written(found: Mapping[str, Found]) -> str:
    """The page, in the order of the bugs; without bugs that were never searched."""
    return ABOUT + "".join(_row(found[bug.name]) for bug in BUGS if bug.name in found)


def _table(found: list[Found]) -> Table:
    table = Table(title="Bugs, and the tests that find them")
    for name in ("bug", "found by", "chaos", "s"):
        table.add_column(name, overflow="fold")
    for one in found:
        tests = "\n".join(one.tests) or "NOT FOUND"
        table.add_row(one.bug.name, tests, one.played, f"{one.seconds:.0f}")
    return table


def _row(one: Found) -> str:
    tests = ", ".join(f"`{test}`" for test in one.tests) or "**not found**"
    return f"| {one.bug.name} | {one.bug.what} | {tests} | {one.played} |\n"


if __name__ == "__main__":
    typer.run(run)
