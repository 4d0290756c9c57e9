"""Peers that keep their jobs in Redis. Their workers append each execution to a file."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis

from bench.peers.contestant import Contestant, Plan, Scheduled, Setting, Site, Workers, answer
from bench.peers.install import JOBS, go_program, node_packages, python_packages, run, version_in
from bench.peers.results import LINE, Executions, read_lines

SCHEDULE_DEADLINE_S = 600


@dataclass(frozen=True, slots=True)
class Spec:
    """A peer: what is installed, the commands of its workers and of its client, and its settings.

    Commands begin with `python`, `node`, `program`, or a command of the virtual environment.
    """

    name: str
    kind: str
    packages: Sequence[str]
    workers: Sequence[Sequence[str]]
    client: Sequence[str]
    settings: Sequence[Setting]
    recovery_s: float
    whole_seconds: bool = False
    schedules_in_worker: bool = False


class RedisPeer(Contestant):
    target = "a function call"
    servers = ("Redis",)

    def __init__(self, site: Site, spec: Spec) -> None:
        self._site, self._spec = site, spec
        self.name, self.settings, self.recovery_s = spec.name, spec.settings, spec.recovery_s
        self.needs_worker_to_schedule = self.client_is_worker = spec.schedules_in_worker
        self._home = site.installed / spec.name.lower()
        slug = spec.name.lower()
        self._executions = site.folder / f"{slug}.executions"
        self._workers = Workers(site.folder / f"{slug}.log")
        self._bin: dict[str, str] = {}
        self._folder = JOBS
        self._redis = redis.Redis.from_url(site.stack.redis_url, socket_timeout=120)

    def install(self) -> str:
        spec = self._spec
        if spec.kind == "python":
            bin = python_packages(self._home, spec.packages)
            self._bin = {path.name: str(path) for path in bin.iterdir()}
            name = spec.packages[0].split("=")[0].split("[")[0]
            return f"{version_in(bin, name)}, redis-py {version_in(bin, 'redis')}"
        if spec.kind == "node":
            script = node_packages(self._home, spec.packages, "bullmq.mjs")
            self._folder = script.parent
            return f"{spec.packages[0].split('@')[1]}, Node {run(['node', '--version'], script.parent)}"
        program = go_program(self._home, "asynq")
        self._bin = {"program": str(program)}
        return (
            f"{spec.packages[0].split('@')[1]}, {run(['go', 'env', 'GOVERSION'], program.parent)}"
        )

    def clear(self) -> None:
        self._redis.flushall()
        self._executions.write_bytes(b"")

    def start(self) -> None:
        self._workers.start(
            [self._command(one) for one in self._spec.workers], self._folder, self._environment()
        )

    def schedule(self, plan: Plan) -> Scheduled:
        command = [*self._command(self._spec.client), *plan.arguments]
        return answer(command, self._folder, self._environment(), SCHEDULE_DEADLINE_S)

    def executed(self) -> int:
        return self._executions.stat().st_size // LINE

    def executions(self) -> Executions:
        return read_lines(self._executions.read_bytes())

    def workers(self) -> list[psutil.Process]:
        return self._workers.processes()

    def end(self, how: signal.Signals) -> None:
        self._workers.end(how)

    def close(self) -> None:
        self._redis.close()

    def _command(self, command: Sequence[str]) -> list[str]:
        return [self._bin.get(command[0], command[0]), *command[1:]]

    def _environment(self) -> dict[str, str]:
        own = {
            "BENCH_REDIS_URL": self._site.stack.redis_url,
            "BENCH_EXECUTIONS": str(self._executions),
            "BENCH_SOCKET": str(Path(self._site.folder, "peer.socket")),
            "BENCH_ROUNDED_MS": "1000" if self._spec.whole_seconds else "1",
            "PYTHONPATH": str(JOBS),
        }
        return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
