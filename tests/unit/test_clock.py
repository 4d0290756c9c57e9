from __future__ import annotations

from dataclasses import dataclass

import pytest

from blackbox.clock import Clock


@dataclass
class HostTime:
    wall_ms: int = 1_000_000
    monotonic_s: float = 50.0

    def pass_ms(self, ms: int) -> None:
        self.wall_ms += ms
        self.monotonic_s += ms / 1000


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostTime:
    host = HostTime()
    monkeypatch.setattr("blackbox.clock.time.time_ns", lambda: host.wall_ms * 1_000_000)
    monkeypatch.setattr("blackbox.clock.time.monotonic", lambda: host.monotonic_s)
    return host


def test_before_redis_answered_the_host_is_right(host: HostTime) -> None:
    clock = Clock()

    assert (clock.earliest_ms(), clock.latest_ms(), clock.skew_ms()) == (1_000_000, 1_000_000, 0)


@pytest.mark.parametrize("ahead_ms", [-90_000, -1, 0, 1, 90_000])
def test_the_earlier_clock_decides_what_is_due(host: HostTime, ahead_ms: int) -> None:
    clock = Clock()
    clock.observe(1_000_000 + ahead_ms)

    assert clock.earliest_ms() == 1_000_000 + min(0, ahead_ms)
    assert clock.latest_ms() == 1_000_000 + max(0, ahead_ms)
    assert clock.skew_ms() == ahead_ms


def test_a_reading_of_redis_ages(host: HostTime) -> None:
    clock = Clock()
    clock.observe(1_000_500)
    host.pass_ms(2500)

    assert (clock.earliest_ms(), clock.latest_ms()) == (1_002_500, 1_003_000)


@pytest.mark.parametrize("step_ms", [-3_600_000, 3_600_000])
def test_a_step_of_the_host_clock_makes_nothing_early(host: HostTime, step_ms: int) -> None:
    clock = Clock()
    clock.observe(1_000_000)
    host.wall_ms += step_ms
    host.pass_ms(250)

    assert clock.earliest_ms() == min(1_000_250, 1_000_250 + step_ms)
    assert clock.skew_ms() == -step_ms


def test_the_latest_reading_counts(host: HostTime) -> None:
    clock = Clock()
    clock.observe(1)
    clock.observe(1_000_000)

    assert clock.skew_ms() == 0
