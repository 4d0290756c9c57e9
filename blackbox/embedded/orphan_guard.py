"""Run one server as a child and kill it when the process that asked for it is gone.

Started by `GuardedProcess` as a script of its own, standard library only.
Arguments: the owner's pid, the log file, a folder to remove if orphaned (or ""), the command.
Prints the server's pid, or a line that starts with `error:`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

OWNER_CHECK_S = 1.0
REMOVE_ATTEMPTS = 20
PR_SET_PDEATHSIG = 1


def wait_for_end_of_owner(owner_pid: int) -> None:
    # The owner holds the write end of stdin: end of file means that it has ended, however it ended.
    # A child forked by the owner keeps the pipe open, so the parent pid is checked as well.
    while os.getppid() == owner_pid:
        readable, _, _ = select.select([0], [], [], OWNER_CHECK_S)
        if readable and not os.read(0, 1):
            return


def die_with_this_guard() -> Callable[[], None] | None:
    """A function that a child runs before exec, so that the server is killed with its guard (Linux)."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_group(process_group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process_group, signal.SIGKILL)


def remove(folder: str) -> None:
    # The owner or another server's guard may be removing it too, while a server still writes.
    for _ in range(REMOVE_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.05)


def start_server(command: list[str], log: str) -> subprocess.Popen[bytes]:
    with open(log, "ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_this_guard(),
        )


def main(owner_pid: int, log: str, disposable: str, command: list[str]) -> int:
    try:
        server = start_server(command, log)
    except OSError as error:
        print(f"error: {error}", flush=True)
        return 1
    # Only now: a server inherits ignored signals and could then not be stopped gracefully.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    orphaned = threading.Event()

    def end_with_owner() -> None:
        wait_for_end_of_owner(owner_pid)
        orphaned.set()
        kill_group(server.pid)

    threading.Thread(target=end_with_owner, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        print(server.pid, flush=True)
    code = server.wait()
    # What the server itself has started, in its group.
    kill_group(server.pid)
    if orphaned.is_set() and disposable:
        remove(disposable)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    exit_code = main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
    # Not sys.exit: a broken stdout must not print a traceback at interpreter shutdown.
    os._exit(exit_code)
