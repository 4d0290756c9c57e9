from __future__ import annotations

from dataclasses import dataclass

import pytest

from blackbox.records.clock import OUTDATED_S, Clock, ShardClock

SOME_MS = 3
"""The error of whole milliseconds."""


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
    monkeypatch.setattr("blackbox.records.clock.time.time_ns", lambda: host.wall_ms * 1_000_000)
    monkeypatch.setattr("blackbox.records.clock.time.monotonic", lambda: host.monotonic_s)
    return host


def test_before_the_first_answer_of_redis_the_host_clock_applies(host: HostTime) -> None:
    clock = Clock()

    assert (clock.earliest_ms(), clock.latest_ms(), clock.skew_ms()) == (1_000_000, 1_000_000, 0)


@pytest.mark.parametrize("ahead_ms", [-90_000, -1, 0, 1, 90_000])
def test_the_earlier_clock_decides_what_is_due(host: HostTime, ahead_ms: int) -> None:
    clock = Clock()
    clock.observe(1_000_000 + ahead_ms)

    assert clock.earliest_ms() == 1_000_000 + min(0, ahead_ms)
    assert clock.latest_ms() == 1_000_000 + max(0, ahead_ms)
    assert clock.skew_ms() == ahead_ms


def test_a_reading_of_the_redis_clock_advances_with_time(host: HostTime) -> None:
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


def test_the_latest_reading_of_the_redis_clock_applies(host: HostTime) -> None:
    clock = Clock()
    clock.observe(1)
    clock.observe(1_000_000)

    assert clock.skew_ms() == 0


@pytest.fixture
def clock(host: HostTime) -> ShardClock:
    """The clock of a shard; Redis agrees with the host."""
    clock = Clock()
    clock.observe(host.wall_ms)
    return ShardClock(clock)


def stamp(clock: ShardClock, host: HostTime, ahead_ms: int, sent_ms: int, back_ms: int) -> None:
    """A broker that is this much ahead stamps a receipt; the receipt and the answer take these times."""
    sent_s = host.monotonic_s
    host.pass_ms(sent_ms)
    stamped_ms = host.wall_ms + ahead_ms
    host.pass_ms(back_ms)
    clock.observe_kafka(stamped_ms, sent_s)


def test_before_the_first_receipt_the_kafka_clock_does_not_apply(clock: ShardClock) -> None:
    assert (clock.earliest_ms(), clock.behind_ms(), clock.is_outdated()) == (1_000_000, 0, False)


@pytest.mark.parametrize("behind_ms", [1, 90_000])
def test_a_slow_kafka_clock_alone_delays_delivery(
    host: HostTime, clock: ShardClock, behind_ms: int
) -> None:
    stamp(clock, host, -behind_ms, 0, 0)
    host.pass_ms(250)

    assert clock.earliest_ms() == pytest.approx(host.wall_ms - behind_ms, abs=SOME_MS)
    assert clock.behind_ms() == pytest.approx(behind_ms, abs=SOME_MS)


def test_a_clock_of_kafka_that_is_ahead_makes_nothing_early(
    host: HostTime, clock: ShardClock
) -> None:
    stamp(clock, host, 3_600_000, 5, 5)

    assert clock.earliest_ms() == host.wall_ms
    assert clock.behind_ms() < 0


def test_a_slow_receipt_makes_no_message_late(host: HostTime, clock: ShardClock) -> None:
    for sent_ms, back_ms in [(900, 20), (4, 1000), (2, 2), (500, 0)]:
        stamp(clock, host, 0, sent_ms, back_ms)
        assert clock.earliest_ms() == pytest.approx(host.wall_ms, abs=SOME_MS)


def test_the_quickest_receipt_gives_the_best_bound_of_the_kafka_clock(
    host: HostTime, clock: ShardClock
) -> None:
    for sent_ms in (50, 3, 700):
        stamp(clock, host, -90_000, sent_ms, 10)

    assert clock.behind_ms() == pytest.approx(90_000 - 3, abs=SOME_MS)


@pytest.mark.parametrize(
    ("before_ms", "after_ms"), [(0, -60_000), (-60_000, 0), (-60_000, -10_000)]
)
def test_the_next_receipt_shows_that_the_kafka_clock_was_set(
    host: HostTime, clock: ShardClock, before_ms: int, after_ms: int
) -> None:
    stamp(clock, host, before_ms, 2, 2)
    stamp(clock, host, after_ms, 2, 2)

    assert clock.behind_ms() == pytest.approx(-after_ms - 2, abs=SOME_MS)


def test_after_a_suspend_the_kafka_clock_is_read_again(host: HostTime, clock: ShardClock) -> None:
    stamp(clock, host, 0, 2, 2)
    host.wall_ms += 3_600_000
    clock._clock.observe(host.wall_ms)
    assert clock.behind_ms() == pytest.approx(3_600_000, abs=SOME_MS)
    assert not clock.is_outdated()
    host.pass_ms(int(OUTDATED_S * 1000) + 1)
    clock._clock.observe(host.wall_ms)
    assert clock.is_outdated()

    stamp(clock, host, 0, 2, 2)

    assert clock.earliest_ms() == pytest.approx(host.wall_ms, abs=SOME_MS)
    assert not clock.is_outdated()


def test_receipts_without_broker_time_remove_the_bound(host: HostTime, clock: ShardClock) -> None:
    stamp(clock, host, -90_000, 2, 2)

    clock.observe_kafka(None, host.monotonic_s)

    assert (clock.behind_ms(), clock.is_outdated()) == (0, False)
