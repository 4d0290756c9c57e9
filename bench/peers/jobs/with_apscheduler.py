"""APScheduler: one process that holds the scheduler, and to which jobs are sent.

Its documentation forbids two processes with one job store. So the process that runs the jobs also adds
them: `with_apscheduler.py serve` listens on a socket, and other arguments are sent to it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import UTC, datetime
from multiprocessing.connection import Client, Connection, Listener
from typing import Any
from urllib.parse import unquote, urlsplit

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.redis import RedisJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from executions import record
from schedule import run

SOCKET = os.environ["BENCH_SOCKET"]
START_S = 30


def execute(message: str) -> None:
    record(message)


def scheduler() -> BackgroundScheduler:
    url = urlsplit(os.environ["BENCH_REDIS_URL"])
    store = RedisJobStore(host=url.hostname, port=url.port, password=unquote(url.password or ""))
    return BackgroundScheduler(
        jobstores={"default": store},
        executors={"default": ThreadPoolExecutor(20)},
        job_defaults={"misfire_grace_time": None, "coalesce": True},
        timezone=UTC,
    )


def serve() -> None:
    running = scheduler()
    running.start()

    def add(jobs: list[tuple[str, int]]) -> None:
        for message, due_ms in jobs:
            when = datetime.fromtimestamp(due_ms / 1000, UTC)
            running.add_job("with_apscheduler:execute", "date", run_date=when, args=(message,))

    if os.path.exists(SOCKET):
        os.unlink(SOCKET)
    with Listener(SOCKET, "AF_UNIX") as listener:
        while True:
            with listener.accept() as connection:
                connection.send(run(connection.recv(), add))


def ask(arguments: list[str]) -> Any:
    with connected() as connection:
        connection.send(arguments)
        return connection.recv()


def connected() -> Connection:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return Client(SOCKET, "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            # The server has just been started.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        print(json.dumps(ask(sys.argv[1:])))
