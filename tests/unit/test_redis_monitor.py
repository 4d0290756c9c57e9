"""The reactions to Redis' memory use and clock."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import redis

from blackbox.config.settings import load
from blackbox.embedded import EmbeddedRedis
from blackbox.embedded.tcp_ports import free_port
from blackbox.engine.metrics import Metrics
from blackbox.engine.redis_monitor import PATIENT_CHECKS, RedisMonitor
from blackbox.records.clock import Clock
from blackbox.records.errors import IndexLost
from tests.contract.conftest import start_redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("watched"))
    start_redis(server)
    yield server
    server.stop()


@pytest.fixture
def client(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 0)
        yield client


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_monitor(url: str, metrics: Metrics, clock: Clock, told: list[str]) -> RedisMonitor:
    settings = load(kafka_bootstrap_servers="127.0.0.1:1", redis_url=url)
    return RedisMonitor(
        settings, metrics, clock,
        pause=lambda: told.append("pause"), resume=lambda: told.append("resume"),
    )  # fmt: skip


@pytest.fixture
def monitor(
    server: EmbeddedRedis, client: redis.Redis, metrics: Metrics, clock: Clock, told: list[str]
) -> RedisMonitor:
    return make_monitor(server.url, metrics, clock, told)


def use(client: redis.Redis, share: float) -> None:
    """Set the limit so that this share of it is used."""
    used: int = client.info("memory")["used_memory"]
    client.config_set("maxmemory", int(used / share))


def is_paused(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("blackbox_intake_paused")


def test_intake_pauses_at_85_percent_of_memory_and_resumes_at_75(
    monitor: RedisMonitor, client: redis.Redis, metrics: Metrics, told: list[str]
) -> None:
    for share, expected in (
        (0.80, []),
        (0.90, ["pause"]),
        (0.95, ["pause"]),
        (0.80, ["pause"]),
        (0.70, ["pause", "resume"]),
        (0.80, ["pause", "resume"]),
        (0.87, ["pause", "resume", "pause"]),
    ):
        use(client, share)
        monitor.check()
        assert told == expected, share
    assert is_paused(metrics) == 1


def test_intake_resumes_after_a_while_below_85_percent_of_memory(
    monitor: RedisMonitor, client: redis.Redis, told: list[str]
) -> None:
    for share, looks, expected in (
        (0.80, PATIENT_CHECKS * 2, []),
        (0.90, 1, ["pause"]),
        (0.80, PATIENT_CHECKS - 1, ["pause"]),
        (0.90, 1, ["pause"]),
        (0.80, PATIENT_CHECKS, ["pause"]),
        (0.80, 1, ["pause", "resume"]),
        (0.90, 1, ["pause", "resume", "pause"]),
        (0.80, PATIENT_CHECKS, ["pause", "resume", "pause"]),
        (0.80, 1, ["pause", "resume", "pause", "resume"]),
    ):
        use(client, share)
        for _ in range(looks):
            monitor.check()
        assert told == expected, share


def test_requests_for_next_week_do_not_pause_intake_for_good(
    metrics: Metrics, clock: Clock, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = make_monitor("redis://127.0.0.1:1/0", metrics, clock, told)
    fake = SimpleNamespace(used=0.90, now_ms=clock.latest_ms)
    fake.memory_used = lambda: fake.used
    monkeypatch.setattr(monitor, "_redis", fake)
    monitor.check()
    assert (told, is_paused(metrics)) == (["pause"], 1)

    fake.used = 0.80
    for _ in range(PATIENT_CHECKS):
        monitor.check()
    assert (told, is_paused(metrics)) == (["pause"], 1)
    for _ in range(100):
        monitor.check()
    assert (told, is_paused(metrics)) == (["pause", "resume"], 0)


def test_a_pause_and_its_end_are_logged_once(
    monitor: RedisMonitor, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "blackbox")
    for share in (0.9, 0.9, 0.9, 0.6, 0.6):
        use(client, share)
        monitor.check()
    [full, room] = caplog.messages
    assert full.startswith("Redis has used ")
    assert full.endswith("% of maxmemory; requests wait in Kafka")
    assert room == "Redis has room again; reading requests"


def test_a_redis_without_a_limit_is_never_full(monitor: RedisMonitor, told: list[str]) -> None:
    monitor.check()
    assert told == []


def test_a_batch_that_found_redis_full_pauses_intake(
    monitor: RedisMonitor, client: redis.Redis, metrics: Metrics, told: list[str]
) -> None:
    use(client, 0.80)
    monitor.pause_intake("Redis has no memory left; requests wait in Kafka until it has")
    monitor.pause_intake("again")
    monitor.check()
    assert (told, is_paused(metrics)) == (["pause"], 1)
    use(client, 0.70)
    monitor.check()
    assert (told, is_paused(metrics)) == (["pause", "resume"], 0)


def test_a_resume_does_not_overtake_the_pause_before_it(
    server: EmbeddedRedis, client: redis.Redis, metrics: Metrics, clock: Clock, told: list[str]
) -> None:
    pausing, may_go_on = Event(), Event()

    def pause() -> None:
        pausing.set()
        may_go_on.wait(5)
        told.append("pause")

    settings = load(kafka_bootstrap_servers="127.0.0.1:1", redis_url=server.url)
    monitor = RedisMonitor(
        settings, metrics, clock, pause=pause, resume=lambda: told.append("resume")
    )
    use(client, 0.5)
    with ThreadPoolExecutor(2) as threads:
        full = threads.submit(monitor.pause_intake, "full")
        assert pausing.wait(5)
        look = threads.submit(monitor.check)
        with pytest.raises(TimeoutError):
            look.result(timeout=0.2)
        may_go_on.set()
        full.result(timeout=5)
        look.result(timeout=5)
    assert told == ["pause", "resume"]


def test_a_clock_difference_is_logged_once_each_time_it_starts(
    monitor: RedisMonitor,
    clock: Clock,
    metrics: Metrics,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ahead_ms = iter((0, 5000, 5000, 0, 0, -5000, -5000))
    monkeypatch.setattr(clock, "observe", lambda ms: Clock.observe(clock, ms + next(ahead_ms)))
    for _ in range(7):
        monitor.check()
    said = [text for text in caplog.messages if "ms apart" in text]
    assert len(said) == 2
    skew_s = metrics.registry.get_sample_value("blackbox_redis_clock_skew_seconds")
    assert skew_s == pytest.approx(-5, abs=0.5)


def test_a_clock_difference_below_a_second_is_not_logged(
    monitor: RedisMonitor,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(clock, "observe", lambda ms: Clock.observe(clock, ms + 700))
    monitor.check()
    assert caplog.messages == []


def test_a_check_only_logs_that_redis_does_not_answer(
    metrics: Metrics, clock: Clock, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    monitor = make_monitor(f"redis://127.0.0.1:{free_port()}/0", metrics, clock, told)
    monitor.check()
    [text] = caplog.messages
    assert text.startswith("Redis does not answer TIME")
    assert told == []
    with pytest.raises(IndexLost):
        monitor.observe_clock()


def test_requests_stay_paused_while_redis_does_not_answer(
    tmp_path: Path, metrics: Metrics, clock: Clock, told: list[str]
) -> None:
    server = EmbeddedRedis(tmp_path)
    start_redis(server)
    monitor = make_monitor(server.url, metrics, clock, told)
    monitor.pause_intake("full")
    server.kill()
    monitor.check()
    assert told == ["pause"]
    server.start()
    monitor.check()
    server.stop()
    assert told == ["pause", "resume"]
