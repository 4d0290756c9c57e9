"""The bugs that the tests are shown to find still fit the product's text."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations.__main__ import ROOT, apply
from tests.mutations.bugs import BUGS, Bug


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_bug_can_still_be_put_into_the_product(bug: Bug, tmp_path: Path) -> None:
    for change in bug.changes:
        path = tmp_path / Path(change.file).name
        path.write_text((ROOT / "blackbox" / change.file).read_text())
        apply(change, path)
        ast.parse(path.read_text())
