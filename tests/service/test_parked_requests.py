"""Requests for a paused target: they cost nothing, delay no others, and are delivered in order."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil
import pytest
from confluent_kafka import Message
from confluent_kafka.admin import NewTopic

from blackbox.admin.admin import Admin
from tests.support.world import (
    APPENDED,
    AT_LENGTH,
    ServiceProcess,
    World,
    both_engines_at_length,
    read_all,
    until,
)

pytestmark = [pytest.mark.service, pytest.mark.timeout(2400)]

WAITING = 1_000_000 if AT_LENGTH else 3_000
QUIET_S = 600.0 if AT_LENGTH else 3.0
"""Longer than a request that is postponed by a second would stay postponed."""

NEIGHBOURS, FROM_S, FOR_S = (1000, 2.0, 3.0) if AT_LENGTH else (400, 1.0, 1.0)
MOST_OF_A_CORE = 0.05
MOST, MOST_MS = 1.5, 250 if AT_LENGTH else 2000
"""Limits of the others' lateness (p99): as a multiple of their lateness alone, or in ms; larger beside other tests."""


def p99_ms(world: World) -> int:
    """p99 of the others. Raises unless each is delivered once, and none early."""
    before = len(world.asked)
    world.ask(NEIGHBOURS, from_s=FROM_S, within_s=FROM_S + FOR_S)
    world.wait_delivered()
    verdict = world.verdict(late_from=before)
    assert verdict.is_exact, verdict
    return verdict.late_at(0.99)


class ProcessorTime:
    """The processor time of a service, in s, also of processes that it started and that have ended."""

    def __init__(self, service: ServiceProcess) -> None:
        self._service = service
        self._seen: dict[psutil.Process, float] = {}

    def total_s(self) -> float:
        """The total so far; of a process that has ended, as of the last call."""
        # not the children's times: Spark's daemon does not wait for its workers
        for process in self._service.family():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._seen[process] = times.user + times.system
        return sum(self._seen.values())


def dues(messages: Sequence[Message]) -> list[int]:
    """The due times of these messages, epoch ms, in the order of delivery."""
    return [int(dict(one.headers() or [])["blackbox-due-ms"] or 0) for one in messages]


@both_engines_at_length
def test_parked_requests_cost_no_cpu_and_are_delivered_in_order(world: World) -> None:
    paused = f"{world.name}.paused"
    world.create(NewTopic(paused, 1, config=APPENDED))
    service = world.start_service().wait_ready()
    p99_ms(world)  # warm-up
    calm_ms = p99_ms(world)
    admin = Admin(world.settings())
    admin.pause(paused)
    time_s = time.time()
    for number in range(WAITING):
        countdown_s = 2 + (number * 7919 % WAITING) / WAITING
        request = {"topic": paused, "message": str(number), "countdown": countdown_s}
        world.send_raw(json.dumps(request), partition=0)
    world.flush()
    until("all are parked", lambda: service.metric("blackbox_postponed_total") >= WAITING, 600)
    waited_s = time.time() - time_s

    used = ProcessorTime(service)
    began, before_s = time.monotonic(), used.total_s()
    until(
        "some time has passed",
        lambda: used.total_s() and time.monotonic() - began > QUIET_S,
        QUIET_S + 5,
        every_s=0.5,
    )
    share = (used.total_s() - before_s) / (time.monotonic() - began)
    assert share > 0
    assert service.metric("blackbox_postponed_total") == WAITING, "each was parked once"
    beside_ms = min(p99_ms(world) for _ in range(2))

    admin.resume(paused)
    admin.close()
    resumed = time.monotonic()
    until("they are delivered", lambda: service.metric("blackbox_pending") == 0, 600)
    drained_s = time.monotonic() - resumed
    came = read_all(world.kafka.bootstrap_servers, paused)
    print(
        f"{world.engine}: {WAITING:,} waited, all aside {waited_s:.0f} s after the first was asked for; {share:.2%} of a "
        f"core for {QUIET_S:g} s; p99 of others {calm_ms} ms before, {beside_ms} ms beside; out in {drained_s:.1f} s"
    )
    assert sorted(int(one.value() or b"") for one in came) == list(range(WAITING))
    assert dues(came) == sorted(dues(came))
    assert share <= MOST_OF_A_CORE or not AT_LENGTH
    assert beside_ms <= max(MOST * calm_ms, MOST_MS)
