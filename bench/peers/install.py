"""Install peers from their registries, at pinned versions, below one folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.peers.contestant import NotMeasured

DEADLINE_S = 900
JOBS = Path(__file__).parent / "jobs"


def python_packages(folder: Path, packages: Sequence[str]) -> Path:
    """A virtual environment with these packages. Returns its bin folder."""
    marker = folder / "installed"
    if not marker.exists() or marker.read_text().split() != list(packages):
        run([sys.executable, "-m", "venv", "--clear", str(folder)], folder.parent)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        run([*pip, "--disable-pip-version-check", *packages], folder.parent)
        marker.write_text("\n".join(packages))
    return folder / "bin"


def version_in(bin: Path, package: str) -> str:
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    return run([str(bin / "python"), "-c", ask], bin)


def node_packages(folder: Path, packages: Sequence[str], script: str) -> Path:
    """A folder with these packages and a copy of the script, which finds them there."""
    for tool in ("node", "npm"):
        need(tool)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(JOBS / script, folder / script)
    marker = folder / "installed"
    if not marker.exists() or marker.read_text().split() != list(packages):
        options = ["--prefix", str(folder), "--no-audit", "--no-fund", "--save-exact", "--silent"]
        run(["npm", "install", *options, *packages], folder)
        marker.write_text("\n".join(packages))
    return folder / script


def go_program(folder: Path, sources: str) -> Path:
    """The program that is built from these sources, in a folder of its own."""
    need("go")
    shutil.copytree(JOBS / sources, folder, dirs_exist_ok=True)
    program = folder / "program"
    run(["go", "build", "-o", str(program), "."], folder)
    return program


def need(tool: str) -> str:
    found = shutil.which(tool)
    if found is None:
        raise NotMeasured(f"`{tool}` is not installed")
    return found


def run(command: Sequence[str], folder: Path) -> str:
    """The output of the command. Raises NotMeasured with the end of its errors."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMeasured(f"`{Path(command[0]).name}`: {error}") from error
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[-300:]
        raise NotMeasured(f"`{Path(command[0]).name}` failed: {said}")
    return done.stdout.strip()
