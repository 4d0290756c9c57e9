"""Periodic work, whatever happens to the clock of the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta, tzinfo

import apscheduler.schedulers.base
import apscheduler.triggers.interval
import pytest

from blackbox.engine import steady_scheduler
from blackbox.engine.steady_scheduler import SteadyScheduler
from tests.support.world import until

STEP_S = 60.0
EVERY_S = 0.05


class Wall(datetime):
    """The host's clock, which a test sets."""

    ahead_s = 0.0

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(seconds=cls.ahead_s)


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> type[Wall]:
    Wall.ahead_s = 0.0
    for module in (apscheduler.schedulers.base, apscheduler.triggers.interval, steady_scheduler):
        monkeypatch.setattr(module, "datetime", Wall)
    monkeypatch.setattr(steady_scheduler, "_wall_ahead_s", lambda: Wall.ahead_s)
    monkeypatch.setattr(steady_scheduler, "LOOK_S", 0.02)
    return Wall


@pytest.fixture
def runs(wall: type[Wall]) -> Iterator[list[float]]:
    """When a job ran that is due every 50 ms (monotonic, s)."""
    found: list[float] = []
    scheduler = SteadyScheduler()
    scheduler.add_job(lambda: found.append(time.monotonic()), "interval", seconds=EVERY_S)
    scheduler.start()
    yield found
    scheduler.shutdown()


@pytest.mark.parametrize("step_s", [-STEP_S, STEP_S])
def test_a_step_of_the_clock_neither_stops_nor_repeats_periodic_work(
    wall: type[Wall], runs: list[float], step_s: float
) -> None:
    until("it runs", lambda: len(runs) >= 3)
    wall.ahead_s = step_s
    before = len(runs)
    until("it goes on", lambda: len(runs) >= before + 5, 10)
    # one for each interval; a busy machine may delay some, and so bring two together
    assert len(runs) <= (runs[-1] - runs[0]) / EVERY_S + 2


def test_a_job_that_runs_between_the_step_and_the_look_goes_on(
    wall: type[Wall], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[float] = []
    scheduler = SteadyScheduler()
    scheduler.add_job(lambda: runs.append(time.monotonic()), "interval", seconds=EVERY_S)
    # The clock is set after the first look, and seen at the second one.
    looks = iter([0.0])
    follow = SteadyScheduler._follow_the_clock

    def set_clock(one: SteadyScheduler) -> None:
        follow(one)
        wall.ahead_s = STEP_S if next(looks, None) is not None else wall.ahead_s

    monkeypatch.setattr(SteadyScheduler, "_follow_the_clock", set_clock)
    scheduler.start()
    try:
        until("it goes on", lambda: len(runs) >= 5, 10)
    finally:
        scheduler.shutdown()


def test_a_clock_that_is_set_and_corrected_at_once_does_not_stop_periodic_work(
    wall: type[Wall], runs: list[float]
) -> None:
    until("it runs", lambda: len(runs) >= 3)
    wall.ahead_s = STEP_S
    before = len(runs)
    until("it goes on", lambda: len(runs) >= before + 2, 10)
    wall.ahead_s = 0.0
    before = len(runs)
    until("it goes on", lambda: len(runs) >= before + 5, 10)
