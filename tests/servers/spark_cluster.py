"""A standalone Spark cluster of processes: a master, and workers with folders of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil
import pyspark

from blackbox.embedded.tcp_ports import HOST, free_port
from tests.support.world import until

SPARK = Path(pyspark.__file__).parent
EXECUTOR_MEMORY_MB = 512


class Cluster:
    """Starts the master; `add_worker` adds workers of two cores. Everything ends with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._master: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []

    @property
    def master(self) -> str:
        return f"spark://{HOST}:{self._port}"

    def __enter__(self) -> Cluster:
        self.start_master("master")
        return self

    def start_master(self, name: str) -> None:
        """Start the master; it knows nothing of an earlier one."""
        self._master = self._start(
            name, "org.apache.spark.deploy.master.Master",
            "--host", HOST, "--port", str(self._port), "--webui-port", "0",
        )  # fmt: skip
        until("the master listens", lambda: b"I have been elected" in self._log(name))

    def restart_master(self) -> None:
        assert self._master is not None
        kill_tree(self._master)
        self.start_master("restarted-master")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in [*self.workers, self._master]:
            if process is not None:
                kill_tree(process)

    def add_worker(self) -> subprocess.Popen[bytes]:
        """A worker, once the master knows it."""
        name = f"worker-{len(self.workers)}"
        worker = self._start(
            name, "org.apache.spark.deploy.worker.Worker",
            "--host", HOST, "--webui-port", "0", "--cores", "2", "--memory", "2g",
            "--work-dir", str(self._folder / name), self.master,
        )  # fmt: skip
        self.workers.append(worker)
        registered = b"Successfully registered with master"
        until("the worker is registered", lambda: registered in self._log(name))
        return worker

    def settings(self, python: Path) -> Path:
        """A file of Spark settings for an application on this cluster."""
        file = self._folder / "spark.properties"
        file.write_text(
            f"spark.pyspark.python={python}\nspark.driver.host={HOST}\n"
            f"spark.driver.bindAddress={HOST}\nspark.executor.memory={EXECUTOR_MEMORY_MB}m\n"
        )
        return file

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        folder = self._folder / name
        folder.mkdir(parents=True)
        with (folder / "log").open("wb") as log:
            return subprocess.Popen(
                [SPARK / "bin" / "spark-class", *command],
                cwd=folder,
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": str(folder),
                    "SPARK_HOME": str(SPARK),
                    "SPARK_LOCAL_IP": HOST,
                    "SPARK_DAEMON_MEMORY": "256m",
                },
                stdout=log,
                stderr=log,
            )

    def _log(self, name: str) -> bytes:
        return (self._folder / name / "log").read_bytes()


def freeze_tree(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and everything it started; their connections stay open, as if their machine were cut off."""
    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            one.suspend()


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill -9 of a process and everything it started, as a machine that loses power."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    process.kill()
    process.wait()
    for child in family:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue


def python_without_blackbox(folder: Path) -> Path:
    """A Python with everything that blackbox depends on, but not blackbox itself."""
    venv.create(folder, symlinks=True, with_pip=False)
    [packages] = folder.glob("lib/python*/site-packages")
    for place in map(Path, sys.path):
        if place.name == "site-packages":
            for package in place.iterdir():
                is_ours = "blackbox" in package.name
                if not is_ours and not (packages / package.name).exists():
                    (packages / package.name).symlink_to(package)
    return folder / "bin" / "python"
