"""Lateness: figures for an otherwise idle machine of two cores."""

from __future__ import annotations

import os
import threading

import pytest

from tests.support.world import ServiceProcess, World, both_engines, both_engines_at_length, until

pytestmark = pytest.mark.service

PER_SECOND = 1000
AT_ONCE = 20_000
WARM_UP = 4000
REQUESTS = int(os.environ.get("BLACKBOX_TEST_REQUESTS", "6000"))
PENDING = int(os.environ.get("BLACKBOX_TEST_PENDING", "100000"))
IDLE_S = float(os.environ.get("BLACKBOX_TEST_IDLE_S", "5"))

SHORTEST_S = {"process": 0.0, "spark": 2.0}
"""Countdowns shorter than intake are late by its duration: on Spark, by about half a second."""

P99_MS = {"process": 400, "spark": 750}
"""Well below the 1000 ms of a poll; measured: 80 to 250 ms, depending on other load."""
POLLED_P99_MS = 1300
TRIES = 3
"""Retries, because a busy machine is not a delay of the product."""

IDLE_PERCENT = {"process": 5, "spark": 20}


@pytest.mark.proof
@both_engines
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_with_wake_up_messages_are_milliseconds_late(world: World, engine: str) -> None:
    world.start_service().wait_ready()
    world.ask(WARM_UP, within_s=SHORTEST_S[engine] + 2, from_s=SHORTEST_S[engine], size=200)
    world.wait_delivered()
    assert least_p99_ms(world, REQUESTS, P99_MS[engine]) <= P99_MS[engine]


@pytest.mark.proof
@both_engines_at_length
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_without_wake_up_messages_are_about_a_poll_interval_late(world: World, engine: str) -> None:
    world.start_service(wake_up="false", poll_interval_ms=1000).wait_ready()
    assert least_p99_ms(world, min(REQUESTS, 20_000), POLLED_P99_MS) <= POLLED_P99_MS


def least_p99_ms(world: World, count: int, enough_ms: int) -> int:
    """The 99th percentile of the lateness of `count` requests, the best of some tries."""
    from_s = SHORTEST_S[world.engine]
    p99_ms: list[int] = []
    while len(p99_ms) < TRIES and min(p99_ms, default=enough_ms + 1) > enough_ms:
        before = len(world.asked)
        for first in range(0, count, AT_ONCE):
            some = min(count - first, AT_ONCE)
            world.ask(some, within_s=from_s + some / PER_SECOND, from_s=from_s, size=200)
            world.wait_delivered()
        verdict = world.verdict(late_from=before)
        assert verdict.is_exact, verdict
        p99_ms.append(verdict.late_at(0.99))
        print(f"lateness p50 {verdict.late_at(0.5)} ms, p99 {p99_ms[-1]} ms, max {verdict.late_ms[-1]} ms")  # fmt: skip
    return min(p99_ms)


@pytest.mark.proof
@both_engines_at_length
@pytest.mark.timeout(900)
def test_many_pending_requests_cost_hardly_any_cpu_while_none_is_due(
    fragile_world: World, engine: str
) -> None:
    service = fragile_world.start_service().wait_ready()
    for _ in range(0, PENDING, 50_000):
        count = min(PENDING, 50_000)
        for number in range(count):
            fragile_world.send_raw(
                f'{{"topic":"{fragile_world.targets[0]}","message":"{number}","countdown":86400}}'
            )
        fragile_world.flush()
    until("all are pending", lambda: service.metric("blackbox_pending") >= PENDING, 300)
    before_s = cpu_s(service)
    threading.Event().wait(IDLE_S)
    share = (cpu_s(service) - before_s) / IDLE_S * 100
    print(f"{share:.2f} % of a core with {PENDING} pending")
    assert share < IDLE_PERCENT[engine]


def cpu_s(service: ServiceProcess) -> float:
    """Processor time of the service and everything it started, including ended processes."""
    return sum(
        times.user + times.system + times.children_user + times.children_system
        for times in (process.cpu_times() for process in service.family())
    )
