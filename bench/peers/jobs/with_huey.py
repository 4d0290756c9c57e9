"""huey: the task, its queue, and how tasks are scheduled."""

from __future__ import annotations

import os
import time

from executions import record
from huey import RedisHuey

huey = RedisHuey("bench", url=os.environ["BENCH_REDIS_URL"], results=False)


@huey.task(name="execute")
def execute(message: str) -> None:
    record(message)


def add(jobs: list[tuple[str, int]]) -> None:
    for message, due_ms in jobs:
        # Not `eta`, of which a naive one is rounded down to seconds.
        execute.schedule((message,), delay=max(0.0, due_ms / 1000 - time.time()))
