"""What a Spark session needs before it starts."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from blackbox.spark import spark_session


def test_the_package_for_executors_is_removed_when_the_driver_exits(tmp_path: Path) -> None:
    script = (
        "from blackbox.spark.spark_session import _packed; path = _packed(); "
        "assert path.is_file(); print(path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert Path(done.stdout.strip()).name == "blackbox.zip"
    assert list(tmp_path.iterdir()) == []


def test_the_package_for_executors_is_locked_against_cleaners_of_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    folder = os.open(spark_session._packed().parent, os.O_RDONLY)

    # As systemd-tmpfiles does before it removes the old files of a folder.
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)
