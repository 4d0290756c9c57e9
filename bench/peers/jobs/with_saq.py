"""saq: the job, the settings of its workers, and how jobs are scheduled."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from executions import record
from saq import Queue

AT_ONCE = 200
QUEUE = Queue.from_url(os.environ["BENCH_REDIS_URL"])


async def execute(_: dict[str, Any], *, message: str) -> None:
    record(message)


settings = {
    "queue": QUEUE,
    "functions": [("execute", execute)],
    "concurrency": 10,
    "timers": {"schedule": 1, "sweep": 60},
}

_loop = asyncio.new_event_loop()


def add(jobs: list[tuple[str, int]]) -> None:
    _loop.run_until_complete(_add(jobs))


async def _add(jobs: list[tuple[str, int]]) -> None:
    for begin in range(0, len(jobs), AT_ONCE):
        await asyncio.gather(
            *(
                QUEUE.enqueue(
                    "execute", message=message, scheduled=due_ms // 1000, retries=3, ttl=-1
                )
                for message, due_ms in jobs[begin : begin + AT_ONCE]
            )
        )
