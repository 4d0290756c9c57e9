"""The interface of every contestant that runs as processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.peers.results import Executions
from blackbox.embedded import EmbeddedStack

GRACE_S = 20


class NotMeasured(Exception):
    """The reason for which a contestant is not measured."""


class Setting(NamedTuple):
    """A setting that was chosen, and why."""

    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Jobs with consecutive numbers: all due at `due_ms`, or at an even rate of `per_s` with delays of 2 to 6 s."""

    first: int
    count: int
    due_ms: int = 0
    per_s: int = 0

    @property
    def arguments(self) -> list[str]:
        kind, third = ("paced", self.per_s) if self.per_s else ("at", self.due_ms)
        return [kind, str(self.first), str(self.count), str(third)]


class Scheduled(NamedTuple):
    """Wall time and processor time of the client that scheduled the jobs."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Site:
    """The servers, and the folders for what is installed and for what a run writes."""

    stack: EmbeddedStack
    installed: Path
    folder: Path


class Contestant(ABC):
    """One system under test. `recovery_s`: after this time its documentation promises lost work back."""

    name: str
    target: str
    settings: Sequence[Setting]
    recovery_s: float = 10.0
    needs_worker_to_schedule = False
    client_is_worker = False
    # Kafka also runs, idle, beside those that do not use it.
    servers: Sequence[str]

    @abstractmethod
    def install(self) -> str:
        """Install what is missing, and return the version. Raises NotMeasured."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all jobs. No worker runs."""

    @abstractmethod
    def start(self) -> None:
        """Start the workers. They may not be ready yet."""

    @abstractmethod
    def schedule(self, plan: Plan) -> Scheduled:
        """Returns when all jobs are stored."""

    @abstractmethod
    def executed(self) -> int:
        """A cheap, rough number of executions since `clear`."""

    @abstractmethod
    def executions(self) -> Executions:
        """All executions since `clear`."""

    @abstractmethod
    def workers(self) -> list[psutil.Process]:
        """The processes that were started, without their children."""

    @abstractmethod
    def end(self, how: signal.Signals) -> None:
        """End all workers with their children."""

    @abstractmethod
    def close(self) -> None:
        """Give up connections, because the servers may end. No worker runs."""

    def kafka_bytes(self) -> int:
        """The size of the jobs in Kafka's files."""
        return 0


class Workers:
    """Processes with sessions of their own, so that a kill reaches their children."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, commands: Sequence[Sequence[str]], folder: Path, env: dict[str, str]) -> None:
        with self._log.open("ab") as log:
            for command in commands:
                process = subprocess.Popen(
                    command, cwd=folder, env=env, stdout=log, stderr=log,
                    stdin=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
                self._running.append(process)

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(one.pid) for one in self._running if one.poll() is None]

    def end(self, how: signal.Signals) -> None:
        for one in self._running:
            if how == signal.SIGKILL:
                _kill_session(one)
            else:
                one.send_signal(how)
        for one in self._running:
            with suppress(subprocess.TimeoutExpired):
                one.wait(GRACE_S)
            _kill_session(one)
            one.wait()
        self._running.clear()


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def answer(
    command: Sequence[str], folder: Path, env: dict[str, str], timeout_s: float
) -> Scheduled:
    """Run a client that schedules jobs and prints its figures."""
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NotMeasured(f"scheduling took longer than {timeout_s:.0f} s") from error
    if done.returncode != 0:
        raise NotMeasured(f"scheduling failed: {(done.stderr or done.stdout).strip()[-300:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Scheduled(found["seconds"], found["cpu_s"])
