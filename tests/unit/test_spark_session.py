"""What a Spark session needs before it starts."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


class FakeBuilder:
    """In place of the builder of a session: it keeps the settings."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self

    def config(self, *, map: dict[str, str]) -> FakeBuilder:
        self.settings = map
        return self

    def getOrCreate(self) -> Any:  # noqa: N802, as Spark names it
        return SimpleNamespace(sparkContext=SimpleNamespace(addPyFile=lambda _: None))


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """The settings with which a session starts."""

    def of(master: str, settings: dict[str, str] | None = None) -> dict[str, str]:
        builder = FakeBuilder()
        monkeypatch.setattr(spark_session, "SparkSession", SimpleNamespace(builder=builder))
        monkeypatch.setattr(spark_session, "_packed", lambda: "blackbox.zip")
        monkeypatch.setenv("PYSPARK_PYTHON", "python3")
        spark_session.start_session(master, settings)
        return builder.settings

    return of


@pytest.mark.parametrize("master", ["spark://spark:7077", "k8s://https://kubernetes"])
def test_an_executor_whose_host_is_gone_is_replaced_within_half_a_minute(
    settings: Callable[..., dict[str, str]], master: str
) -> None:
    chosen = settings(master)
    timeout_s, look_s, heartbeat_s = (
        int(chosen[f"spark.{name}"].removesuffix("s"))
        for name in ("network.timeout", "network.timeoutInterval", "executor.heartbeatInterval")
    )
    assert timeout_s + look_s < 30
    assert 3 * heartbeat_s < timeout_s  # a busy executor may miss some

    own = settings(master, {"spark.executor.heartbeatInterval": "30s"})
    assert "spark.network.timeout" not in own, "Spark refuses a longer interval than the timeout"
    assert "spark.network.timeout" not in settings("local[4]")


def test_failed_executors_do_not_count_for_the_whole_life_of_a_driver(
    settings: Callable[..., dict[str, str]],
) -> None:
    assert settings("k8s://https://kubernetes")["spark.executor.failuresValidityInterval"] == "1h"
