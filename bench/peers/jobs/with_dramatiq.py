"""dramatiq: the actor, its broker, and how messages are scheduled."""

from __future__ import annotations

import os
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from executions import record

# In a million commands, those that also give work of dead workers back.
MAINTENANCE = 10_000

broker = RedisBroker(url=os.environ["BENCH_REDIS_URL"], maintenance_chance=MAINTENANCE)
dramatiq.set_broker(broker)


@dramatiq.actor(actor_name="execute")
def execute(message: str) -> None:
    record(message)


def add(jobs: list[tuple[str, int]]) -> None:
    for message, due_ms in jobs:
        delay_ms = max(0, due_ms - time.time_ns() // 1_000_000)
        broker.enqueue(execute.message(message), delay=delay_ms)
