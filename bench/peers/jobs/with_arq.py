"""arq: the job, the settings of its workers, and how jobs are scheduled."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime
from typing import Any

from arq import create_pool
from arq.connections import ArqRedis, RedisSettings
from arq.worker import func
from executions import record

REDIS = RedisSettings.from_dsn(os.environ["BENCH_REDIS_URL"])
# Calls under way at once; each needs a connection.
AT_ONCE = 50
LOG = {"version": 1, "loggers": {"arq": {"level": "ERROR"}}}


async def execute(_: dict[str, Any], message: str) -> None:
    record(message)


class WorkerSettings:
    functions = (func(execute, name="execute", keep_result=0),)
    redis_settings = REDIS
    max_jobs = 200
    queue_read_limit = 1000
    poll_delay = 0.05
    job_timeout = 10
    keep_result = 0
    log_results = False


_loop = asyncio.new_event_loop()
_pool: ArqRedis | None = None


def add(jobs: list[tuple[str, int]]) -> None:
    _loop.run_until_complete(_add(jobs))


async def _add(jobs: list[tuple[str, int]]) -> None:
    global _pool
    _pool = _pool or await create_pool(REDIS)
    for begin in range(0, len(jobs), AT_ONCE):
        await asyncio.gather(
            *(
                _pool.enqueue_job(
                    "execute", message, _defer_until=datetime.fromtimestamp(due_ms / 1000, UTC)
                )
                for message, due_ms in jobs[begin : begin + AT_ONCE]
            )
        )
