"""Archives of classes: servers start from them, and nothing starts from half of one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from blackbox.embedded.java import find_java
from blackbox.support.class_archive import NAME, making, using

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


def test_a_jvm_starts_from_the_archive_that_another_left(tmp_path: Path) -> None:
    assert using(tmp_path) == ()
    with making(tmp_path, find_java()) as flags:
        java(*flags)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert java(*using(tmp_path), OR_NOT_AT_ALL).returncode == 0


def test_half_an_archive_is_not_kept(tmp_path: Path) -> None:
    context = making(tmp_path, find_java())
    leave_half(context.__enter__(), tmp_path)
    with pytest.raises(subprocess.CalledProcessError):
        context.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == []
