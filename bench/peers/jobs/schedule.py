"""Schedule jobs with a Python peer. It runs in the environment of the peer.

`schedule.py MODULE at FIRST COUNT DUE_MS` schedules jobs for one instant, and
`schedule.py MODULE paced FIRST COUNT PER_SECOND` at an even rate.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator

BYTES = 200
AT_ONCE = 1000
SHORTEST_MS, LONGEST_MS = 2000, 6000
# The times of some peers are whole seconds.
ROUNDED_MS = int(os.environ.get("BENCH_ROUNDED_MS", "1"))

Jobs = list[tuple[str, int]]
"""Messages and their due times, in ms since 1970."""


def job(number: int, due_ms: int) -> tuple[str, int]:
    due_ms = -(-due_ms // ROUNDED_MS) * ROUNDED_MS
    return f"{number:07d} {due_ms:013d} ".ljust(BYTES, "."), due_ms


def at(first: int, count: int, due_ms: int) -> Iterator[Jobs]:
    for begin in range(first, first + count, AT_ONCE):
        yield [job(number, due_ms) for number in range(begin, min(begin + AT_ONCE, first + count))]


def paced(first: int, count: int, per_second: int) -> Iterator[Jobs]:
    began, sent = time.monotonic(), 0
    while sent < count:
        ready = min(count, int((time.monotonic() - began) * per_second), sent + AT_ONCE)
        if ready == sent:
            time.sleep(0.005)
            continue
        now_ms = time.time_ns() // 1_000_000
        yield [job(first + number, now_ms + delay_ms(number)) for number in range(sent, ready)]
        sent = ready


def delay_ms(number: int) -> int:
    # A prime: jobs that are scheduled together are due far apart.
    return SHORTEST_MS + number * 7919 % 1000 * (LONGEST_MS - SHORTEST_MS) // 1000


def run(arguments: list[str], add: Callable[[Jobs], None]) -> dict[str, float]:
    """Seconds and processor time for all jobs."""
    kind, *numbers = arguments
    first, count, third = map(int, numbers)
    began, began_cpu = time.monotonic(), time.process_time()
    for jobs in (at if kind == "at" else paced)(first, count, third):
        add(jobs)
    return {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - began_cpu}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[2:], importlib.import_module(sys.argv[1]).add)))
