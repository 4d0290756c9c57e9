"""How a worker of a Python peer records that it executed a job. It needs only the standard library."""

from __future__ import annotations

import os
import time

# The number of a job and its due time, with which its message begins.
HEAD = 21

_file = os.open(os.environ["BENCH_EXECUTIONS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def record(message: str) -> None:
    # One system call for each execution: with a buffer, a killed worker would lose what it executed.
    os.write(_file, f"{message[:HEAD]} {time.time_ns() // 1_000_000:013d}\n".encode())
