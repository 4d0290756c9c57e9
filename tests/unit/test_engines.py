"""Both engines while neither Kafka nor Redis answers: their probes, and what they do each second."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
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
from blackbox.engine.spark.driver import SparkEngine, slots_for
from blackbox.engine.spark.spark_watch import NEW_NODE_S, NO_SLOTS_S, SILENCE_S, EngineFailed
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

    def renew(self) -> bool:
        return True

    def unheard(self) -> set[int]:
        return set()


class ColdStream(StuckTasks):
    """An intake stream that cannot read yet."""

    is_warm = False


def session_with(conf: dict[str, str]) -> Any:
    """A session of Spark with this configuration."""
    context = SimpleNamespace(master="local", getConf=lambda: conf)
    return SimpleNamespace(version="4", sparkContext=context, stop=lambda: None)


@pytest.fixture
def spark_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SparkEngine]:
    """The same, with tasks that make no progress."""
    monkeypatch.setattr(driver, "start_session", lambda *_: session_with({}))
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


def job(engine: SparkEngine, name: str) -> Callable[[], None]:
    """What the engine does each second under this name."""
    [found] = [one for one in engine._scheduler.get_jobs() if one.id == name]
    work: Callable[[], None] = found.func
    return work


@pytest.mark.parametrize("has_others", [True, False])
def test_a_driver_without_an_executor_takes_no_shards(
    spark_engine: SparkEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_others: bool,
) -> None:
    joined, slots = Event(), iter([0])
    monkeypatch.setattr(driver, "WARM_UP_S", 0.0)
    monkeypatch.setattr(spark_engine, "_count_slots", lambda: next(slots, 4))
    monkeypatch.setattr(spark_engine, "_check_every_second", lambda: None)
    monkeypatch.setattr(spark_engine._membership, "has_others", lambda: has_others)
    monkeypatch.setattr(spark_engine._membership, "start", joined.set)
    with caplog.at_level(logging.INFO):
        spark_engine.start()

    job(spark_engine, "join")()

    assert not joined.is_set()
    assert "waiting for an executor of Spark" in caplog.text
    SparkEngine._check_every_second(spark_engine)  # it has one
    until("it joins", joined.is_set)


def test_a_driver_ends_when_it_has_had_no_executor_for_a_minute(
    spark_engine: SparkEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[Exception] = []
    slots = 0
    spark_engine.failed = failures.append
    monkeypatch.setattr(spark_engine, "_count_slots", lambda: slots)
    monkeypatch.setattr(spark_engine._scheduler, "start", lambda: None)
    spark_engine.start()

    def look(seconds: int) -> None:
        for _ in range(seconds):
            job(spark_engine, "slots")()
            job(spark_engine, "renew")()

    look(2 * SILENCE_S)  # it never had one: another driver may deliver
    assert failures == []
    slots = 4
    look(1)
    slots = 0
    look(NO_SLOTS_S)
    assert failures == []
    look(1)
    assert [type(failure) for failure in failures] == [EngineFailed]
    assert "no executor for 60 s" in str(failures[0])


def test_a_driver_ends_when_its_jvm_does_not_answer(
    spark_engine: SparkEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[Exception] = []
    spark_engine.failed = failures.append
    monkeypatch.setattr(spark_engine._scheduler, "start", lambda: None)
    spark_engine.start()
    job(spark_engine, "slots")()
    for _ in range(SILENCE_S):
        job(spark_engine, "renew")()
    assert failures == []

    job(spark_engine, "renew")()

    assert "JVM has not answered" in str(failures[0])


@pytest.mark.parametrize(
    ("slots", "can_hear", "is_failure"), [(4, True, True), (0, True, False), (4, False, False)]
)
def test_a_driver_ends_when_spark_does_not_begin_a_window_although_it_has_slots(
    spark_engine: SparkEngine,
    monkeypatch: pytest.MonkeyPatch,
    slots: int,
    can_hear: bool,
    is_failure: bool,
) -> None:
    failures: list[Exception] = []
    windows = StuckTasks()
    windows.renew = lambda: can_hear  # type: ignore[method-assign]
    windows.unheard = lambda: {1}  # type: ignore[method-assign]
    spark_engine.failed = failures.append
    monkeypatch.setattr(driver, "DispatchWindows", lambda *_, **__: windows)
    monkeypatch.setattr(spark_engine, "_count_slots", lambda: slots)
    monkeypatch.setattr(spark_engine._scheduler, "start", lambda: None)
    spark_engine.start()
    for _ in range(SILENCE_S + 1):
        job(spark_engine, "slots")()
        job(spark_engine, "renew")()

    assert bool(failures) is is_failure
    assert not failures or "has not begun a window" in str(failures[0])


RUN_WITH_A_HUNG_JVM = """
from importlib import import_module
from threading import Event, Thread
from blackbox.engine.spark.spark_watch import EngineFailed

def serve(*_):
    Thread(target=Event().wait).start()
    raise EngineFailed("it hangs")

import_module("blackbox.run").serve = serve
command = import_module("blackbox.cli.run")
command._check_engine = lambda *_: None
command.run()
"""


def test_a_service_whose_spark_failed_ends_although_threads_wait_for_its_jvm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_WITH_A_HUNG_JVM],
        env=os.environ | {"BLACKBOX_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1"},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip

    assert done.returncode == 1
    assert "Spark failed: EngineFailed: it hangs" in done.stderr


@pytest.mark.parametrize(("at_once", "slots"), [(0, 1), (1, 1), (2, 2), (12, 12)])
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

    assert engine._count_slots() == at_once
    assert slots_for("dispatch", at_once, "dispatch") == slots
    assert slots_for("dispatch", at_once, None) + slots_for("intake", at_once, None) >= 2


class IdleStream(StuckTasks):
    """An intake stream without new requests."""

    is_in_batch = False


@pytest.fixture
def start_intake(
    spark_engine: SparkEngine, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[IdleStream, list[Exception]]]:
    """Start a driver of intake alone, which Spark gives executors as it allocates them; it has them, and fails later."""

    def start(allocates: str) -> tuple[IdleStream, list[Exception]]:
        stream, failures = IdleStream(), list[Exception]()
        conf = {"spark.dynamicAllocation.enabled": allocates}
        monkeypatch.setattr(driver, "start_session", lambda *_: session_with(conf))
        monkeypatch.setattr(driver, "IntakeStream", lambda *_, **__: stream)
        monkeypatch.setattr(spark_engine._scheduler, "start", lambda: None)
        spark_engine.only, spark_engine.failed = "intake", failures.append
        spark_engine.start()
        look(spark_engine, 1)
        monkeypatch.setattr(spark_engine, "_count_slots", lambda: 0)
        return stream, failures

    return start


def look(engine: SparkEngine, seconds: int) -> None:
    for _ in range(seconds):
        job(engine, "slots")()
        job(engine, "renew")()


@pytest.mark.parametrize(
    ("allocates", "is_failure"), [("true", False), (" TRUE", False), ("false", True)]
)
def test_a_driver_of_intake_may_give_its_idle_executors_back_if_spark_allocates_them(
    spark_engine: SparkEngine,
    start_intake: Callable[[str], tuple[IdleStream, list[Exception]]],
    allocates: str,
    is_failure: bool,
) -> None:
    _, failures = start_intake(allocates)

    look(spark_engine, NEW_NODE_S + 1)

    assert bool(failures) is is_failure


def test_a_driver_of_intake_ends_when_a_batch_gets_no_executor_for_five_minutes(
    spark_engine: SparkEngine,
    start_intake: Callable[[str], tuple[IdleStream, list[Exception]]],
) -> None:
    stream, failures = start_intake("true")
    look(spark_engine, NEW_NODE_S + 1)
    stream.is_in_batch = True
    look(spark_engine, NEW_NODE_S)
    assert failures == []

    look(spark_engine, 1)

    assert "no executor for 300 s" in str(failures[0])


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
