"""Services that start ten times faster: they are forked from a process that has imported all modules."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Lock

LOOK_S = 0.02

_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(["blackbox.cli", "blackbox.run", __name__])
_one_at_a_time = Lock()
"""`multiprocessing` checks all its children from time to time, and is not thread-safe."""


class Forked:
    """`blackbox run` as a child of the fork server, with the interface of a `Popen`.

    The functions `before` are called in the child before the command.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        log: Path,
        options: Sequence[str],
        before: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._process = ForkServerProcess(
            target=_serve, args=(dict(environment), log, options, before), daemon=True
        )
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
    environment: Mapping[str, str],
    log: Path,
    options: Sequence[str],
    before: Sequence[Callable[[], None]],
) -> None:
    # Not only added to: the fork server has the environment of the time when it was started.
    os.environ.clear()
    os.environ.update(environment)
    written_to = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(written_to, standard)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for prepare in before:
        prepare()
    from blackbox.cli import app

    app(["run", *options])
