"""Both engines while neither Kafka nor Redis answers: their probes, and what they do each second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from blackbox.api.app import make_probes
from blackbox.api.health import Health
from blackbox.config.settings import load
from blackbox.engine import shard_pool
from blackbox.engine.metrics import Metrics
from blackbox.engine.process import ProcessEngine
from blackbox.engine.shard_owner import ShardOwner
from blackbox.engine.shard_session import ShardSession
from blackbox.engine.spark import driver
from blackbox.engine.spark.driver import SparkEngine
from blackbox.records.errors import JournalLost
from blackbox.records.request import Shard
from tests.support.world import until

SHARD = Shard("TB", 0)


def probe(engine: Health, path: str) -> tuple[int, Any]:
    async def ask() -> httpx.Response:
        app = httpx.ASGITransport(app=make_probes(engine, Metrics()))
        async with httpx.AsyncClient(transport=app, base_url="http://127.0.0.1") as client:
            return await client.get(path)

    answer = asyncio.run(ask())
    return answer.status_code, answer.json()


@pytest.fixture
def process_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessEngine]:
    """An engine that found Kafka and Redis when it started; every shard without a tick is stuck."""
    monkeypatch.setattr(shard_pool, "STUCK_S", float("-inf"))
    settings = load(kafka_bootstrap_servers="127.0.0.1:1", redis_url="redis://127.0.0.1:1/0")
    engine = ProcessEngine(settings, Metrics())
    monkeypatch.setattr(engine._monitor, "observe_clock", lambda: None)
    monkeypatch.setattr(engine._topics, "ensure", lambda: None)
    yield engine
    engine.stop()


class StuckTasks:
    """Spark tasks that own the shard and make no progress."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: {SHARD: "no progress"} if name == "stuck" else {}


class ColdStream(StuckTasks):
    """An intake stream that cannot read yet."""

    is_warm = False


@pytest.fixture
def spark_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SparkEngine]:
    """The same, with tasks that make no progress."""
    session = SimpleNamespace(
        version="4", sparkContext=SimpleNamespace(master="local"), stop=lambda: None
    )
    monkeypatch.setattr(driver, "start_session", lambda *_: session)
    for name in ("DispatchWindows", "IntakeStream"):
        monkeypatch.setattr(driver, name, lambda *_, **__: StuckTasks())
    settings = load(kafka_bootstrap_servers="127.0.0.1:1", redis_url="redis://127.0.0.1:1/0")
    engine = SparkEngine(settings, Metrics(), only=None, failed=lambda reason: None)
    monkeypatch.setattr(engine, "_count_slots", lambda: 4)
    monkeypatch.setattr(engine._monitor, "observe_clock", lambda: None)
    monkeypatch.setattr(engine._topics, "ensure", lambda: None)
    yield engine
    engine.stop()


def test_a_process_is_live_while_a_shard_opens_for_minutes(
    process_engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, may_end = Event(), Event()

    def slow(_: ShardOwner) -> ShardSession:
        opens.set()
        assert may_end.wait(30)
        raise JournalLost("the test ends")

    monkeypatch.setattr(process_engine._pool, "_open_session", slow)
    process_engine.start()
    process_engine._pool.gain(SHARD)
    try:
        assert opens.wait(10)
        assert probe(process_engine, "/livez") == (200, {"live": True, "stuck": ["TB-0"]})
    finally:
        may_end.set()
        process_engine._pool.lose([SHARD])


def test_a_process_is_live_while_kafka_and_redis_are_away(process_engine: ProcessEngine) -> None:
    process_engine.start()
    process_engine._pool.gain(SHARD)
    until("the opening fails", process_engine.why_not_open)

    assert probe(process_engine, "/livez") == (200, {"live": True, "stuck": ["TB-0"]})
    assert probe(process_engine, "/readyz")[0] == 503
    process_engine._pool.lose([SHARD])


def test_a_driver_is_live_while_its_tasks_make_no_progress(spark_engine: SparkEngine) -> None:
    spark_engine.start()

    assert probe(spark_engine, "/livez") == (200, {"live": True, "stuck": ["TB-0"]})


@pytest.mark.parametrize("has_others", [True, False])
def test_a_driver_takes_shards_from_others_only_when_it_is_warm(
    spark_engine: SparkEngine, monkeypatch: pytest.MonkeyPatch, has_others: bool
) -> None:
    stream = ColdStream()
    joined = Event()
    monkeypatch.setattr(driver, "IntakeStream", lambda *_, **__: stream)
    monkeypatch.setattr(spark_engine._membership, "has_others", lambda: has_others)
    monkeypatch.setattr(spark_engine._membership, "start", joined.set)

    spark_engine.start()

    if has_others:
        [job] = [one for one in spark_engine._scheduler.get_jobs() if one.id == "join"]
        job.func()
        assert not joined.is_set()
        stream.is_warm = True
    until("it joins", joined.is_set)


def test_a_driver_that_never_gets_warm_joins_after_two_minutes(
    spark_engine: SparkEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = Event()
    monkeypatch.setattr(driver, "WARM_UP_S", 0.0)
    monkeypatch.setattr(driver, "IntakeStream", lambda *_, **__: ColdStream())
    monkeypatch.setattr(spark_engine._membership, "has_others", lambda: True)
    monkeypatch.setattr(spark_engine._membership, "start", joined.set)

    spark_engine.start()

    until("it joins", joined.is_set)


@pytest.mark.parametrize(("at_once", "slots"), [(0, 2), (1, 2), (2, 2), (12, 12)])
def test_the_slots_are_the_tasks_that_spark_runs_at_once_whatever_its_settings(
    at_once: int, slots: int
) -> None:
    profiles = SimpleNamespace(defaultResourceProfile=lambda: "default")
    java = SimpleNamespace(
        isStopped=lambda: False,
        resourceProfileManager=lambda: profiles,
        maxNumConcurrentTasks={"default": at_once}.__getitem__,
    )
    # As `spark.default.parallelism` sets it.
    context = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: java), defaultParallelism=24)
    settings = load(kafka_bootstrap_servers="127.0.0.1:1", redis_url="redis://127.0.0.1:1/0")
    engine = SparkEngine(settings, Metrics(), only=None, failed=lambda reason: None)
    engine._session = SimpleNamespace(sparkContext=context)  # type: ignore[assignment]

    assert engine._count_slots() == slots


def test_a_process_that_no_longer_reads_requests_is_not_live(
    process_engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Thread(target=lambda: None)
    monkeypatch.setattr(process_engine, "_intake", ended)
    assert process_engine.is_live()
    process_engine.start()
    ended.join()

    assert probe(process_engine, "/livez")[0] == 503


@pytest.mark.parametrize("name", ["process_engine", "spark_engine"])
def test_an_engine_looks_each_second_for_shards_without_a_receipts_partition(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine: ProcessEngine | SparkEngine = request.getfixturevalue(name)
    grown: list[set[Shard]] = []
    monkeypatch.setattr(engine._topics, "grow_receipts", grown.append)
    monkeypatch.setattr(engine._membership, "owned", lambda: {SHARD})
    engine.start()

    [job] = [one for one in engine._scheduler.get_jobs() if one.id == "grow"]
    assert job.trigger.interval == timedelta(seconds=1)
    job.func()
    assert {SHARD} in grown
