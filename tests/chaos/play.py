"""Plays schedules in parallel lanes. Schedules that share a broken server are played in groups."""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Barrier

from blackbox.embedded import EmbeddedKafka, EmbeddedRedis
from tests.chaos.books import Account
from tests.chaos.faults import FAULTS
from tests.chaos.faults.fault import Fault
from tests.chaos.scene import Scene
from tests.chaos.schedule import Delivery, Schedule, Setup
from tests.chaos.servers import FrailKafka, FrailRedis, Servers, WrongClock
from tests.servers.redis_cluster import ClusterServers
from tests.servers.sentinel import SentinelServers

COMPANY = 8
SPARK_LANES = 2
SINGLE = ("shared", "own redis", "own kafka and redis", "sentinels", "redis cluster")
"""Servers that a schedule does not break for others."""


@dataclass(frozen=True, slots=True)
class Played:
    """The result of a schedule. No complaints means that every guarantee held.

    `torn` counts receipts that could be read although some of their messages could not.
    """

    schedule: Schedule
    delivery: Delivery
    books: Account
    torn: int
    complaints: list[str]
    took_s: float
    folder: Path


def play_all(
    schedules: Iterable[Schedule],
    servers: Servers,
    lanes: int,
    folder: Path,
    done: Callable[[Played], None],
) -> None:
    """Play the schedules on shared servers in parallel lanes, then the schedules that break a broker in groups."""
    waiting = list(schedules)
    singles = [s for s in waiting if FAULTS[s.fault].servers in SINGLE]
    on_spark = [s for s in waiting if FAULTS[s.fault].servers == "spark"]
    _in_lanes(singles, servers, lanes, folder, done)
    for fault in FAULTS.values():
        if fault.servers in ("frail kafka", "three brokers"):
            same = iter([s for s in waiting if s.fault == fault.name])
            while company := list(islice(same, min(COMPANY, lanes))):
                _kafka_of(fault, servers)  # one thread starts it, before the others start
                _in_lanes(company, servers, len(company), folder, done, Barrier(len(company)))
    _in_lanes(on_spark, servers, min(SPARK_LANES, lanes), folder, done)


def _in_lanes(
    schedules: Sequence[Schedule],
    servers: Servers,
    lanes: int,
    folder: Path,
    done: Callable[[Played], None],
    company: Barrier | None = None,
) -> None:
    free: SimpleQueue[int] = SimpleQueue()
    for lane in range(lanes):
        free.put(lane)

    def in_a_lane(schedule: Schedule) -> None:
        lane = free.get()
        try:
            done(play(schedule, servers, lane, folder, company))
        finally:
            free.put(lane)

    with ThreadPoolExecutor(lanes) as pool:
        list(pool.map(in_a_lane, schedules))


def play(
    schedule: Schedule,
    servers: Servers,
    lane: int,
    folder: Path,
    company: Barrier | None = None,
) -> Played:
    """Play one schedule. Its folder and its topics are kept if a guarantee was violated."""
    began = time.monotonic()
    own = folder / f"{schedule.seed}-{schedule.number}"
    own.mkdir(parents=True)
    books, torn, complaints = Account(0), 0, ["it was not played"]
    try:
        books, torn, complaints = _played(schedule, servers, lane, own, company)
    except Exception as error:
        (own / "error.txt").write_text(traceback.format_exc())
        complaints = [f"{type(error).__name__}: {error}"]
    if not complaints:
        shutil.rmtree(own, ignore_errors=True)
    else:
        (own / "complaints.txt").write_text("\n".join([schedule.name, *complaints]))
    took_s = time.monotonic() - began
    return Played(schedule, setup_of(schedule).delivery, books, torn, complaints, took_s, own)


def _kafka_of(fault: Fault, servers: Servers) -> EmbeddedKafka:
    match fault.servers:
        case "frail kafka":
            return servers.frail_kafka
        case "three brokers":
            return servers.cluster.brokers[0]
        case _:
            return servers.kafka


def setup_of(schedule: Schedule) -> Setup:
    if FAULTS[schedule.fault].exactly_once:
        return replace(schedule.setup, delivery="exactly-once")
    return schedule.setup


def _played(
    schedule: Schedule, servers: Servers, lane: int, folder: Path, company: Barrier | None
) -> tuple[Account, int, list[str]]:
    fault = FAULTS[schedule.fault]
    with ExitStack() as ending:
        kafka = _kafka_of(fault, servers)
        redis: EmbeddedRedis = servers.redis
        redis_servers: SentinelServers | ClusterServers | None = None
        match fault.servers:
            case "own redis":
                clock = WrongClock(folder / "clock") if fault.needs_faketime else None
                redis = FrailRedis(folder / "redis", clock)
                redis.start()
                ending.callback(redis.stop)
            case "own kafka and redis":
                clock = WrongClock(folder / "clock")
                kafka = FrailKafka(folder / "kafka", clock)
                redis = FrailRedis(folder / "redis", clock)
                for server in (kafka, redis):
                    server.start()
                    ending.callback(server.stop)
            case "sentinels":
                redis_servers = ending.enter_context(SentinelServers(folder / "redis", sentinels=3))
            case "redis cluster":
                redis_servers = ending.enter_context(ClusterServers(folder / "redis"))
        scene = Scene(
            schedule,
            setup_of(schedule),
            servers,
            lane,
            folder,
            kafka=kafka,
            redis=redis,
            redis_servers=redis_servers,
            engine="spark" if fault.servers == "spark" else "process",
            company=company,
        )
        with scene:
            fault.story(scene)
            is_settled = scene.settle()
            books, torn = scene.account(), scene.torn()
            if not is_settled:
                pending, books.lost = books.lost, []
            complaints = scene.complaints(books, may_revive=fault.may_revive)
            if not is_settled:
                complaints.insert(0, f"hung: {len(pending)} requests are not delivered")
        if not complaints:
            scene.delete_topics()
    return books, torn, complaints
