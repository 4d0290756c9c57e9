"""Celery: the task, the settings of its workers, and how tasks are scheduled."""

from __future__ import annotations

import os
from datetime import UTC, datetime

from celery import Celery
from executions import record

VISIBILITY_S = 120

app = Celery("bench", broker=os.environ["BENCH_REDIS_URL"])
app.conf.update(
    task_ignore_result=True,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=128,
    broker_transport_options={"visibility_timeout": VISIBILITY_S, "unacked_restore_throttle": 1},
    visibility_timeout=VISIBILITY_S,
    broker_connection_retry_on_startup=True,
)


@app.task(name="execute")
def execute(message: str) -> None:
    record(message)


def add(jobs: list[tuple[str, int]]) -> None:
    with app.producer_pool.acquire(block=True) as producer:
        for message, due_ms in jobs:
            execute.apply_async(
                (message,), eta=datetime.fromtimestamp(due_ms / 1000, UTC), producer=producer
            )
