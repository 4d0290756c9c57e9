"""A server process that never outlives the Python process that started it."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from blackbox.embedded import orphan_guard

KILL_DEADLINE_S = 10.0
LOCK_DEADLINE_S = 5.0
POLL_S = 0.02
LOG_TAIL_LINES = 15


class EmbeddedError(RuntimeError):
    """An embedded server cannot be started; the text says why and what to do next."""


class ServerDiedError(EmbeddedError):
    """The server ended before it answered; `log` is what it logged since its start."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


class GuardedProcess:
    """One child process in a session of its own, behind a guard that kills it when this process ends.

    Its `environment` is that of this process unless given: unlike `command`, only this user can see it.
    `disposable` is removed if this process dies first;
    `lock` is a file descriptor that the guard keeps open for as long as the server may be alive.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        disposable: Path | None = None,
        lock: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        self._guard = subprocess.Popen(
            [
                # Isolated: no environment variable or site package may keep the guard from running.
                *(sys.executable, "-I", "-S", orphan_guard.__file__),
                *(str(os.getpid()), str(log), str(disposable or ""), *command),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            # Ctrl-C reaches the whole process group, and only this process may stop servers.
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )
        try:
            self.pid = self._read_pid(command[0])
        except BaseException:
            self._release()
            raise

    def _read_pid(self, program: str) -> int:
        assert self._guard.stdout is not None
        answer = self._guard.stdout.readline().decode(errors="replace").strip()
        if not answer.isdigit():
            reason = answer.removeprefix("error: ") or "its guard process exited"
            raise EmbeddedError(f"cannot start {program}: {reason}")
        return int(answer)

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet (a stopped one is running)."""
        return self._guard.poll() is None

    def wait(self, timeout_s: float) -> int | None:
        """The exit code (128 + n after signal n), or None if it still runs after `timeout_s`."""
        try:
            code = self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._release()
        return code

    def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`."""
        if self.is_running:
            self._signal(signal.SIGTERM)
            # A stopped process handles SIGTERM only when it continues.
            self._signal(signal.SIGCONT)
            if self.wait(grace_s) is None:
                self.kill()
        self._release()

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        if self.is_running:
            self._signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(KILL_DEADLINE_S)
        self._release()

    def tail(self) -> str:
        return "\n".join(self._logged().splitlines()[-LOG_TAIL_LINES:])

    def wait_until(self, answers: Callable[[], bool], *, name: str, deadline_s: float) -> None:
        """Return once `answers()` is true; otherwise kill the process and raise, with its log."""
        give_up_at_s = time.monotonic() + deadline_s
        try:
            while not answers():
                if not self.is_running:
                    raise self._died(f"{name} exited while starting")
                if time.monotonic() > give_up_at_s:
                    raise self._died(f"{name} did not answer within {deadline_s:g} s")
                time.sleep(POLL_S)
        except BaseException:
            self.kill()
            raise

    def _died(self, what: str) -> ServerDiedError:
        tail = self.tail() or "(empty)"
        return ServerDiedError(f"{what}; the end of {self._log}:\n{tail}", self._logged())

    def _logged(self) -> str:
        if not self._log.exists():
            return ""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _release(self) -> None:
        # The end of its stdin tells the guard to kill what is left, and to end.
        for pipe in (self._guard.stdin, self._guard.stdout):
            if pipe is not None:
                pipe.close()
        if self._guard.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(KILL_DEADLINE_S)


def version_output(*command: str) -> str:
    """The output of a command that prints a version; empty if it cannot be run."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stderr + answer.stdout


def file_of_package(package: str, pattern: str) -> Path | None:
    """The first file that the glob pattern names in an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    files = (file for folder in folders or () for file in sorted(Path(folder).glob(pattern)))
    return next(files, None)


def lock_folder(folder: Path, deadline_s: float = LOCK_DEADLINE_S) -> int:
    """A file descriptor that locks `folder` against other processes until all its copies close."""
    # The guard of a killed owner holds a copy until its server is gone, so a busy lock is retried.
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    give_up_at_s = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > give_up_at_s:
                os.close(descriptor)
                raise EmbeddedError(
                    f"{folder} is in use by another process; stop it, or use another folder"
                ) from None
            time.sleep(POLL_S)
