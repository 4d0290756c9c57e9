"""The planted bugs still fit the product's text, and the order in which tests search for them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutations import __main__ as mutations
from tests.mutations.__main__ import (
    PAGE,
    ROOT,
    WITHOUT_SERVICES,
    Found,
    apply,
    expected,
    failing,
    is_there,
    look_for,
    read,
    written,
)
from tests.mutations.bugs import BUGS, Bug

BEFORE = ("tests/unit/test_resolve.py::test_one",)
BUG = Bug("bug", "does harm", (), ("a fault", "another"), ("tests/service/test_retry.py",))
STAGES = [BEFORE, WITHOUT_SERVICES, BUG.tests]


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_every_planted_bug_still_fits_the_code(bug: Bug, tmp_path: Path) -> None:
    for change in bug.changes:
        path = tmp_path / Path(change.file).name
        path.write_text((ROOT / "blackbox" / change.file).read_text())
        apply(change, path)
        ast.parse(path.read_text())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tests_that_found_a_bug_before_are_run_first(
    monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    asked: list[Sequence[str]] = []

    def fails_at(tests: Sequence[str], folder: Path) -> tuple[str, ...]:
        asked.append(tests)
        return ("a test",) if len(asked) == stage else ()

    monkeypatch.setattr(mutations, "copy", lambda _: None)
    monkeypatch.setattr(mutations, "failing", fails_at)

    one = look_for(BUG, Found(BUG, BEFORE), is_played=False)

    assert asked == STAGES[:stage]
    assert one.tests == ("a test",)


def test_of_a_new_bug_the_functions_among_its_tests_are_run_first() -> None:
    bug = BUG._replace(tests=("tests/unit/test_resolve.py::test_one", *BUG.tests))
    assert expected(bug).tests == BEFORE
    assert expected(BUG).tests == ()


@pytest.mark.parametrize(
    ("is_played", "played"), [(True, "another: 2 of 5"), (False, "a fault: 1 of 3")]
)
def test_a_fault_that_is_not_played_keeps_its_earlier_result(
    monkeypatch: pytest.MonkeyPatch, is_played: bool, played: str
) -> None:
    monkeypatch.setattr(mutations, "copy", lambda _: None)
    monkeypatch.setattr(mutations, "failing", lambda *_: ())
    monkeypatch.setattr(
        mutations, "play", lambda fault, _: (0, 5) if fault == "a fault" else (2, 5)
    )

    one = look_for(BUG, Found(BUG, BEFORE, "a fault: 1 of 3"), is_played=is_played)

    assert one.played == played


def test_the_page_is_read_as_it_was_written() -> None:
    first, second, third, *_ = BUGS
    found = {
        first.name: Found(
            first, ("tests/unit/test_a.py::test_a", "tests/service/test_b.py::test_b")
        ),
        second.name: Found(second, (), "a fault: 1 of 3"),
    }

    assert read(written(found)) == found
    assert third.name not in written(found)


def test_each_test_that_the_page_names_exists() -> None:
    gone = {
        name: [test for test in found.tests if not is_there(test)]
        for name, found in read(PAGE.read_text()).items()
    }
    assert {name: tests for name, tests in gone.items() if tests} == {}


@pytest.mark.proof
def test_no_test_is_run_if_a_named_test_is_gone(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_fails(): assert False\n")
    there, gone = "test_some.py::test_fails", "test_some.py::test_gone"

    assert failing((there,), tmp_path) == (there,)
    for tests in ((there, gone), (there, "test_gone.py::test_gone"), ()):
        assert failing(tests, tmp_path) == ()
