"""When Redis is full, requests stay in Kafka; nothing is refused, nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import redis
from confluent_kafka.admin import AdminClient, NewTopic

from blackbox.embedded import EmbeddedRedis, EmbeddedStack
from tests.support.world import ServiceProcess, World, both_engines_at_length, until

pytestmark = pytest.mark.service

RECOVERS_IN_S = 10.0
GARBAGE = 10_000


@contextmanager
def stopped(server: EmbeddedRedis) -> Iterator[None]:
    """A Redis that hangs during the context."""
    with redis.Redis.from_url(server.url) as client:
        process = psutil.Process(client.info("server")["process_id"])
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@pytest.fixture
def small_world(stack: EmbeddedStack, tmp_path: Path, engine: str) -> Iterator[World]:
    """A world whose Redis has room for a fraction of the requests."""
    redis = EmbeddedRedis(tmp_path / "redis", settings={"maxmemory": "12mb"})
    redis.start()
    with World(stack.kafka, redis, tmp_path, engine) as world:
        yield world
    redis.stop()


@pytest.mark.proof
@both_engines_at_length
@pytest.mark.timeout(300)
def test_more_requests_than_redis_can_hold_are_all_delivered(small_world: World) -> None:
    service = small_world.start_service().wait_ready()
    small_world.ask(20_000, from_s=6, within_s=10, size=1000)  # all before the first is due
    until("intake is paused", lambda: service.metric("blackbox_intake_paused") == 1)
    verdict = small_world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict
    until("intake continues", lambda: service.metric("blackbox_intake_paused") == 0)


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_a_service_started_with_more_requests_than_room_delivers_them_all(
    small_world: World,
) -> None:
    small_world.ask(20_000, within_s=1, size=1000)
    small_world.start_service()
    verdict = small_world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict


@pytest.mark.timeout(300)
def test_all_requests_are_stored_ten_seconds_after_redis_has_room(small_world: World) -> None:
    service = small_world.start_service().wait_ready()
    small_world.ask(20_000, within_s=3600, from_s=1800, size=1000)
    until("intake is paused", lambda: service.metric("blackbox_intake_paused") == 1)
    with redis.Redis.from_url(small_world.redis.url) as client:
        client.config_set("maxmemory", "1gb")
    began = time.monotonic()
    until("all are stored", lambda: service.metric("blackbox_pending") == 20_000)
    took_s = time.monotonic() - began
    print(f"room for all: stored {took_s:.1f} s later")
    assert took_s < RECOVERS_IN_S


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_lookups_are_fast_while_redis_is_full(small_world: World) -> None:
    service = small_world.start_service().wait_ready()
    small_world.ask(20_000, within_s=3600, from_s=1800, size=1000)
    until("intake is paused", lambda: service.metric("blackbox_intake_paused") == 1)
    with httpx.Client(base_url=service.address, trust_env=False, timeout=30) as client:
        client.get("/requests/nobody")  # the first one connects to Kafka
        began = time.monotonic()
        for _ in range(10):
            assert client.get("/requests/nobody").status_code == 404
        took_s = time.monotonic() - began
    print(f"ten look-ups by a caller's id: {took_s:.2f} s")
    assert took_s < 5


def test_probes_and_sends_are_answered_while_lookups_wait_for_a_hanging_redis(
    fragile_world: World,
) -> None:
    world = fragile_world
    service = world.start_service().wait_ready()
    with httpx.Client(base_url=service.address, trust_env=False, timeout=60) as client:
        asked = {"topic": world.targets[0], "message": "hi", "countdown": 3600}
        for path in ("/stats", "/requests", "/requests/nobody"):
            assert client.get(path).status_code in (200, 404)
        with stopped(world.redis), ThreadPoolExecutor(60) as pool:
            paths = ["/stats", "/requests", "/requests/nobody", "/targets/paused"] * 15
            looks = [pool.submit(client.get, path) for path in paths]
            time.sleep(0.5)
            began = time.monotonic()
            assert client.get("/livez").status_code == 200
            assert client.get("/liveness").status_code == 200
            assert client.post("/requests", json=asked).status_code == 201
            took_s = time.monotonic() - began
            assert {look.result().status_code for look in looks} <= {
                200,
                503,
            }  # some answers were cached
            ended_s = time.monotonic() - began
    print(f"two probes and a request: {took_s:.2f} s; the last of 60 looks: {ended_s:.1f} s")
    assert took_s < 2
    assert ended_s < 20


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_refused_requests_fill_redis_while_the_dead_letter_topic_is_missing(
    small_world: World,
) -> None:
    """Intake of all callers pauses; what is due is delivered. With the topic, all continues."""
    world = small_world
    service = world.start_service().wait_ready()
    world.ask(100, from_s=20, within_s=25, partition=1)
    until("they are stored", lambda: service.metric("blackbox_pending") == 100)
    admin = AdminClient({"bootstrap.servers": world.kafka.bootstrap_servers})
    [deleted] = admin.delete_topics([world.dead_letters]).values()
    deleted.result(30)
    for _ in range(GARBAGE):
        world.send_raw("{" * 800, partition=0)
    world.flush()
    until("intake is paused", lambda: service.metric("blackbox_intake_paused") == 1)
    until("those of others are delivered", lambda: delivered(service) == 100)
    world.ask(100, within_s=1, partition=1)
    assert delivered(service) == 100
    assert service.metric("blackbox_intake_paused") == 1

    world.create(NewTopic(world.dead_letters, 1))

    until("all have an outcome", lambda: service.metric("blackbox_dead_total") == GARBAGE, 120)
    verdict = world.wait_delivered(timeout_s=60)
    assert verdict.is_exact, verdict
    until("intake continues", lambda: service.metric("blackbox_intake_paused") == 0)


def delivered(service: ServiceProcess) -> float:
    return service.metric("blackbox_delivered_total")
