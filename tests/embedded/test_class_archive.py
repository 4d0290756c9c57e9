"""Class archives: servers start from a complete one, and never from an incomplete one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from blackbox.embedded.java import find_java
from blackbox.support.class_archive import NAME, STATE, making, using

OR_NOT_AT_ALL = "-Xshare:on"


def java(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [find_java(), *flags, "-version"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def leave_half(flags: tuple[str, ...], folder: Path) -> None:
    java(*flags)
    [made] = folder.glob(f"*/{NAME}")
    half = made.read_bytes()[: made.stat().st_size // 2]
    made.unlink()
    made.write_bytes(half)


def test_a_jvm_starts_from_an_archive_that_another_one_made(tmp_path: Path) -> None:
    assert using(tmp_path) == ()
    with making(tmp_path, find_java()) as flags:
        java(*flags)
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME, STATE]
    assert java(*using(tmp_path), OR_NOT_AT_ALL).returncode == 0


def test_an_incomplete_archive_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, current = tmp_path / "jars", tmp_path / "current"
    folder.mkdir()
    current.mkdir()
    monkeypatch.chdir(current)
    context = making(folder, find_java())
    leave_half(context.__enter__(), folder)
    with pytest.raises(subprocess.CalledProcessError):
        context.__exit__(None, None, None)
    assert list(folder.iterdir()) == []
    assert list(current.iterdir()) == [], "the JVM that crashed left its log here"


def damage(folder: Path, how: str) -> None:
    """Change the archive in place; its mode and modification time change only if it is written."""
    archive = folder / NAME
    archive.chmod(0o600)
    before = archive.stat()
    if how == "cut":
        os.truncate(archive, before.st_size // 2)
    elif how == "cut, with the time of before":
        os.truncate(archive, before.st_size // 2)
        os.utime(archive, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif how == "written to":
        os.utime(archive, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    elif how == "without its state":
        (folder / STATE).unlink()
    else:
        (folder / STATE).write_bytes(b"\xff")


@pytest.mark.parametrize(
    "how",
    [
        "cut",
        "cut, with the time of before",
        "written to",
        "without its state",
        "with half of its state",
    ],
)
def test_a_changed_archive_is_not_used(tmp_path: Path, how: str) -> None:
    with making(tmp_path, find_java()) as flags:
        java(*flags)
    assert using(tmp_path) != ()
    damage(tmp_path, how)
    assert using(tmp_path) == ()


def test_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    left = tmp_path / "classes-q1w2e3"
    left.mkdir()
    (left / NAME).write_bytes(b"half")
    with making(tmp_path, find_java()) as flags:
        assert not left.exists()
        java(*flags)
