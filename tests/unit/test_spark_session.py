"""What a Spark session needs before it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


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
