"""The faults of a soak, one per minute. Each fault repairs everything at its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, cycle
from pathlib import Path
from threading import Event

import redis

from tests.support.world import ServiceProcess, World

FROZEN_S = 3.0
PAST_SESSION_S = 15.0
"""The session timeout is 6 s."""


class Stage:
    """The servers, a service without faults, and another one with faults."""

    def __init__(self, world: World, kafka_config: Path) -> None:
        self.world = world
        self._kafka_config = kafka_config
        self.steady = self.start()
        self.other = self.start()

    def start(self) -> ServiceProcess:
        return self.world.start_service(
            kafka_config=self._kafka_config, retention_s=180, trim_interval_s=30
        ).wait_ready()


def redis_killed(stage: Stage) -> None:
    stage.world.redis.kill()
    stage.world.redis.start()


def service_killed(stage: Stage) -> None:
    stage.other.kill()
    stage.other = stage.start()


def service_stopped(stage: Stage) -> None:
    assert stage.other.stop() == 0
    stage.other = stage.start()


def service_frozen(stage: Stage) -> None:
    stage.other.freeze()
    _wait(PAST_SESSION_S)
    stage.other.thaw()


def redis_cut(stage: Stage) -> None:
    with redis.Redis.from_url(stage.world.redis.url) as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "YES")


def redis_frozen(stage: Stage) -> None:
    with _frozen(stage.world.redis.pid):
        _wait(FROZEN_S)


def kafka_frozen(stage: Stage) -> None:
    with _frozen(stage.world.kafka.pid):
        _wait(FROZEN_S)


def story() -> Iterator[tuple[str, Callable[[Stage], None]]]:
    """Redis is killed once, so that its later memory use shows any growth."""
    again = {
        "one of two services killed": service_killed,
        "connections to Redis cut": redis_cut,
        "Kafka frozen for 3 s": kafka_frozen,
        "one of two services frozen for 15 s": service_frozen,
        "Redis frozen for 3 s": redis_frozen,
        "one of two services stopped": service_stopped,
    }
    return chain([("Redis killed and started", redis_killed)], cycle(again.items()))


@contextmanager
def _frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _wait(seconds: float) -> None:
    Event().wait(seconds)
