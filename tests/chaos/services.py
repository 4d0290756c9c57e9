"""Services that start ten times faster: they are forked from a process that has imported all modules."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Lock
from typing import cast

from tests.chaos import crash_points
from tests.chaos.crash_points import Crash
from tests.chaos.servers import WrongClock
from tests.world import ServiceProcess

LOOK_S = 0.02

_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(["blackbox.cli", "blackbox.run", __name__])
_one_at_a_time = Lock()
"""`multiprocessing` checks all its children from time to time, and is not thread-safe."""


class ForkedService(ServiceProcess):
    """A service with its own process and configuration.

    With a `crash`, it ends after that step. With a `clock`, it uses that clock as its host's clock.
    """

    def __init__(
        self,
        environment: dict[str, str],
        log: Path,
        options: Sequence[str] = (),
        crash: Crash | None = None,
        clock: WrongClock | None = None,
    ) -> None:
        self._crash, self._clock = crash, clock
        super().__init__(environment, log, options)

    def _begin(
        self, environment: dict[str, str], options: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        own = os.environ | environment, self.log, options, self._crash, self._clock
        forked = Forked(_serve, own)
        return cast("subprocess.Popen[bytes]", forked)  # it has the methods that services need


class Forked:
    """A child of the fork server, with the interface of a `Popen`."""

    def __init__(self, target: Callable[..., None], arguments: tuple[object, ...]) -> None:
        self._process = ForkServerProcess(target=target, args=arguments, daemon=True)
        with _one_at_a_time:
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with _one_at_a_time:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        began = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - began > timeout:
                raise subprocess.TimeoutExpired("blackbox run", timeout)
            time.sleep(LOOK_S)
        return code

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _serve(
    environment: dict[str, str],
    log: Path,
    options: Sequence[str],
    crash: Crash | None,
    clock: WrongClock | None,
) -> None:
    os.environ.update(environment)
    written_to = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(written_to, standard)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if crash is not None:
        crash_points.install(crash)
    if clock is not None:
        right_ns = time.time_ns
        time.time_ns = lambda: right_ns() + clock.wrong_by_s() * 1_000_000_000
    from blackbox.cli import app

    app(["run", *options])
