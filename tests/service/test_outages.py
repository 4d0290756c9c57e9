"""Kafka or Redis fails and returns: nothing is lost or duplicated, and a stop remains quick."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from blackbox.embedded import EmbeddedStack
from tests.service.test_oscillator import topic, wait_written
from tests.support.world import ServiceProcess, World, both_engines_at_length, until

pytestmark = [pytest.mark.service, pytest.mark.fault]

STOP_S = 5.0


@pytest.fixture
def own_world(tmp_path: Path, engine: str) -> Iterator[World]:
    """A world with its own Kafka and Redis."""
    with EmbeddedStack() as stack, World(stack.kafka, stack.redis, tmp_path, engine) as world:
        yield world


def kill_kafka(world: World) -> Callable[[], None]:
    world.kafka.kill()
    return world.kafka.start


def kill_redis(world: World) -> Callable[[], None]:
    world.redis.kill()
    return world.redis.start


def has_delivered(service: ServiceProcess, more_than: float) -> bool:
    return service.metric("blackbox_delivered_total") > more_than


@both_engines_at_length
def test_restarted_servers_under_load_lose_and_duplicate_nothing(own_world: World) -> None:
    service = own_world.start_service(oscillator_topic=topic(own_world)).wait_ready()
    for kill in (kill_kafka, kill_redis):
        before = service.metric("blackbox_delivered_total")
        own_world.ask(3000, within_s=4)
        until("some more are delivered", partial(has_delivered, service, before + 500))
        start_again = kill(own_world)
        until("it noticed", lambda: service.get("/readyz")[0] == 503)
        start_again()
        verdict = own_world.wait_delivered(timeout_s=90)
        assert verdict.is_exact, (kill, verdict)
        until("it is ready again", lambda: service.get("/readyz")[0] == 200)
        wait_written(own_world, int(time.time()))


def freeze_kafka(world: World) -> Callable[[], None]:
    """It accepts data and does not answer: every call waits for its timeout."""
    os.kill(world.kafka.pid, signal.SIGSTOP)
    return lambda: os.kill(world.kafka.pid, signal.SIGCONT)


@pytest.mark.proof
@both_engines_at_length
def test_a_stop_takes_less_than_five_seconds_while_kafka_hangs(own_world: World) -> None:
    service = own_world.start_service(oscillator_topic=topic(own_world)).wait_ready()
    own_world.ask(1000, within_s=3)
    until("some are delivered", lambda: service.metric("blackbox_delivered_total") > 100)
    thaw = freeze_kafka(own_world)
    assert service.stop(timeout_s=STOP_S) == 0
    thaw()
    own_world.start_service().wait_ready()
    verdict = own_world.wait_delivered(timeout_s=90)
    assert verdict.is_exact, verdict


@both_engines_at_length
@pytest.mark.parametrize("kill", [pytest.param(kill_kafka, marks=pytest.mark.proof), kill_redis])
def test_a_stop_takes_less_than_five_seconds_while_a_server_is_down(
    own_world: World, kill: Callable[[World], Callable[[], None]]
) -> None:
    service = own_world.start_service().wait_ready()
    own_world.ask(1000, within_s=3)
    start_again = kill(own_world)
    until("it noticed", lambda: service.get("/readyz")[0] == 503)
    assert service.stop(timeout_s=STOP_S) == 0
    start_again()
    own_world.start_service().wait_ready()
    verdict = own_world.wait_delivered(timeout_s=90)
    assert verdict.is_exact, verdict
