"""An installation of `pip install .` without a registry: it links to the files of its dependencies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, distribution, requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def packages() -> set[str]:
    """The distributions that are installed with blackbox without an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[str] = set()
    waiting = plain(project["dependencies"])
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= plain(requires(name) or []) - found
    return found


def plain(requirements: list[str]) -> set[str]:
    """The names of the packages that are required here without an extra."""
    needed = map(Requirement, requirements)
    return {
        re.sub(r"[-_.]+", "-", each.name).lower()
        for each in needed
        if each.marker is None or each.marker.evaluate({"extra": ""})
    }


def install(folder: Path) -> Path:
    """Fill `folder` with blackbox and its `packages()`; for PYTHONPATH of a `python -S`."""
    folder.mkdir()
    (folder / "blackbox").symlink_to(ROOT / "blackbox")
    for name in packages():
        dist = distribution(name)
        for top in tops(dist):
            (folder / top).symlink_to(Path(str(dist.locate_file(top))))
    return folder


def tops(dist: Distribution) -> set[str]:
    """The files and folders of a distribution beside those of others."""
    first = {path.parts[0] for path in dist.files or ()}
    return {name for name in first if name not in ("..", "__pycache__")}


def python(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with this installation and nothing else."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        env=environment, cwd=installed.parent, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
