from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blackbox.config.settings import load
from blackbox.engine import oscillator as module
from blackbox.engine.metrics import Metrics
from blackbox.engine.oscillator import BATCH, Oscillator, seconds_to_write
from blackbox.journal.oscillator_topic import WrittenSecond, last_second
from blackbox.records.request import Record, Shard
from tests.support.world import until

seconds = st.integers(0, 1 << 33)
clocks_ms = st.lists(st.integers(0, 100_000_000), min_size=1, max_size=50)


def test_a_second_is_due_as_soon_as_it_starts() -> None:
    assert list(seconds_to_write(17, 17_999)) == []
    assert list(seconds_to_write(17, 18_000)) == [18]


def test_a_gap_is_filled_in_batches() -> None:
    assert seconds_to_write(0, 25_000_000) == range(1, BATCH + 1)
    assert seconds_to_write(2 * BATCH, 25_000_000) == range(2 * BATCH + 1, 25_001)


@given(seconds, seconds)
def test_only_seconds_between_the_last_one_and_now_are_due(last: int, now: int) -> None:
    due = seconds_to_write(last, now * 1000)
    assert all(last < second <= now for second in due)
    assert bool(due) == (now > last)


@given(clocks_ms)
def test_seconds_are_written_once_and_in_order_whatever_the_clock_does(clock_ms: list[int]) -> None:
    first = clock_ms[0] // 1000
    written = [first]
    for now_ms in clock_ms:
        while due := seconds_to_write(written[-1], now_ms):
            written += due
    assert written == list(range(first, max(clock_ms) // 1000 + 1))


NOW = 1_767_225_690


class Seconds:
    """An oscillator topic, by its last second."""

    def __init__(self, last: int, lowest: int = 0) -> None:
        self.last = last
        self.lowest = lowest
        self.opened = 0

    def open(self, now_ms: int) -> WrittenSecond:
        self.opened += 1
        return WrittenSecond(self.last, 7, self.lowest)

    def write(self, seconds: Iterable[int]) -> None:
        for second in seconds:
            assert second == self.last + 1
            self.last = second

    def close(self) -> None: ...


class SetClock:
    now = NOW

    def earliest_ms(self) -> int:
        return self.now * 1000

    latest_ms = earliest_ms


Run = Callable[[Seconds], tuple[Oscillator, SetClock]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    started: list[Oscillator] = []

    def run(topic: Seconds) -> tuple[Oscillator, SetClock]:
        settings = load(kafka_bootstrap_servers="127.0.0.1:1", oscillator_topic="seconds")
        monkeypatch.setattr(module, "OscillatorTopic", lambda *_: topic)
        monkeypatch.setattr(module, "RETRIED_AFTER_S", 0.01)
        clock = SetClock()
        access = SimpleNamespace()
        one = Oscillator(settings, access, Metrics(), clock, shards=lambda: {Shard("TB", 0)})  # type: ignore[arg-type]
        started.append(one)
        one.start()
        return one, clock

    yield run
    for one in started:
        one.stop()
        one.join()


def test_a_last_second_that_is_ahead_is_logged_once_a_minute(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    topic = Seconds(NOW + 86_400)
    one, clock = run(topic)
    until("it is logged", lambda: caplog.records)
    clock.now += 20

    assert one._lag_s() == 21
    assert topic.last == NOW + 86_400
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "seconds: no second is written before 2026-01-02T00:01:30+00:00: the record at partition 0, "
        "offset 7 has the second 1767312090, which is 86400 s ahead"
    )


def test_seconds_continue_behind_a_correct_record_after_one_that_was_ahead(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_AGAIN_AFTER_S", 0.0)
    topic = Seconds(NOW + 86_400)
    one, _ = run(topic)
    until("it is read again", lambda: topic.opened > 1)

    topic.last = NOW - 100

    until("the gap is filled", lambda: topic.last == NOW)
    until("it is shown", lambda: one._lag_s() == 0)


def test_a_clock_that_was_set_back_is_logged(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    topic = Seconds(NOW)
    _, clock = run(topic)
    clock.now += 5
    until("it writes", lambda: topic.last == NOW + 5)

    clock.now -= 3600

    until("it is logged", lambda: "which is 3600 s ahead" in caplog.text)


def test_clocks_that_are_seconds_apart_are_no_error(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    topic = Seconds(NOW + 5)
    _, clock = run(topic)
    until("it is open", lambda: topic.opened)
    clock.now += 6

    until("it writes", lambda: topic.last == NOW + 6)
    assert caplog.records == []


def seconds_of(*records: tuple[int, int]) -> WrittenSecond | None:
    """The last second of records with these seconds and timestamps (in seconds)."""
    keys = [(at, b"%d" % second) for second, at in records]
    read = [Record(n, 1000 * at, key, b"1", []) for n, (at, key) in enumerate(keys)]
    return last_second(read, 1000 * NOW)


@pytest.mark.parametrize(
    "records",
    [
        [(1, NOW)],
        [(1, NOW), (2, NOW)],
        [(NOW - 100, NOW - 100), (NOW // 10, NOW)],
        [(NOW - 100, NOW - 100), (NOW + 86_400, NOW), (NOW - 3 * 86_400, NOW)],
    ],
    ids=["weeks-before-its-record", "rising", "a-digit-is-missing", "back-by-three-days"],
)
def test_a_last_second_that_is_much_too_low_is_wrong(records: list[tuple[int, int]]) -> None:
    last = seconds_of(*records)

    assert last is not None
    assert last.second < last.lowest


@pytest.mark.parametrize(
    "records",
    [
        [(NOW - 99 * 86_400, NOW - 99 * 86_400)],
        [(NOW - 20 * 86_400, NOW - 1), (NOW - 20 * 86_400 + 1, NOW - 1)],
        [(NOW - 5 * 86_400, NOW - 5 * 86_400), (NOW + 86_400, NOW - 9), (NOW - 5 * 86_400, NOW)],
        [(NOW - 100, NOW - 100), (1, NOW - 50), (NOW - 100, NOW)],
    ],
    ids=["long-outage", "filling-a-gap-with-broker-times", "after-one-ahead", "after-one-too-low"],
)
def test_a_last_second_that_is_old_is_continued(records: list[tuple[int, int]]) -> None:
    last = seconds_of(*records)

    assert last is not None
    assert last == (records[-1][0], len(records) - 1, last.lowest)
    assert last.second >= last.lowest


def test_nothing_is_written_behind_a_last_second_that_is_too_low(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_AGAIN_AFTER_S", 0.5)
    topic = Seconds(NOW // 10, lowest=NOW - 86_400)
    one, clock = run(topic)
    until("it is logged", lambda: caplog.records)
    clock.now += 20

    assert topic.last == NOW // 10
    assert one._lag_s() == 21
    line = caplog.records[0].getMessage()
    assert line.startswith(
        "seconds: no second is written: the record at partition 0, offset 7 has the second 176722569, "
        "which is much too low; append one with the last correct second"
    )

    topic.last = NOW - 100

    until("the gap is filled", lambda: topic.last == NOW + 20)
