"""How long shards gather due messages for a transaction."""

from __future__ import annotations

from threading import Event, Thread

import pytest

from blackbox.engine.linger import Linger, Pace


class Process:
    """A process whose clock and processor time a test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.used_s = 5.0

    def run(self, seconds: float, share: float) -> None:
        self.now_s += seconds
        self.used_s += seconds * share


@pytest.fixture
def process() -> Process:
    return Process()


def linger(process: Process, longest_s: float) -> Linger:
    return Linger(longest_s, now=lambda: process.now_s, processor=lambda: process.used_s)


def pauses_s(process: Process, one: Linger, share: float, seconds: int = 10) -> list[float]:
    """The pauses of a process that uses this share of a core, each quarter of a second."""
    found = []
    for _ in range(4 * seconds):
        process.run(0.25, share)
        found.append(one.pause_s())
    return found


def test_a_process_that_does_nothing_hardly_waits(process: Process) -> None:
    assert set(pauses_s(process, linger(process, 0.1), 0.0)) == {0.012}


def test_the_pause_grows_with_the_processor_time_up_to_its_limit(process: Process) -> None:
    at = {share: pauses_s(process, linger(process, 0.1), share)[-1] for share in (0.03, 0.06, 1.5)}
    assert at == {
        0.03: pytest.approx(0.05, rel=0.02),
        0.06: pytest.approx(0.1, rel=0.02),
        1.5: 0.1,
    }


def test_a_process_that_was_busy_waits_less_and_less(process: Process) -> None:
    one = linger(process, 0.1)
    pauses_s(process, one, 0.1)
    found = pauses_s(process, one, 0.0, seconds=20)
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (0.1, 0.012)


def test_after_a_long_silence_only_what_was_used_since_counts(process: Process) -> None:
    one = linger(process, 0.1)
    pauses_s(process, one, 1.0)
    process.run(60, 0.001)
    assert one.pause_s() == 0.012


@pytest.mark.parametrize(("longest_s", "pause_s"), [(0.0, 0.012), (0.02, 0.02)])
def test_no_pause_is_longer_than_the_setting_or_12_ms(
    process: Process, longest_s: float, pause_s: float
) -> None:
    assert set(pauses_s(process, linger(process, longest_s), 1.0)) == {pause_s}


class Waits(Event):
    """An event that notes how long it was waited for, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.s: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.s.append(round(timeout, 3))
        return self.is_set()


def test_a_message_that_comes_alone_does_not_wait_for_a_look_that_found_nothing(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = linger(process, 0.1)
    pauses_s(process, busy, 1.0)
    monkeypatch.setattr("blackbox.engine.linger.Event", Waits)
    pace = Pace(busy, now=lambda: process.now_s)
    sent_s = process.now_s

    pace.wait(sent_s, has_sent=True)
    process.run(0.09, 1.0)
    pace.wait(process.now_s, has_sent=False)
    process.run(0.5, 1.0)
    pace.wait(process.now_s, has_sent=False)

    hurried = pace._hurried
    assert isinstance(hurried, Waits)
    # after a transaction the whole pause; after a look without one, what is left of it, or 12 ms
    assert hurried.s == [0.1, 0.012, 0.012]


def test_a_stop_or_a_recovery_ends_the_pause(process: Process) -> None:
    busy = linger(process, 1.0)
    pauses_s(process, busy, 1.0)
    pace = Pace(busy, now=lambda: process.now_s)
    waiting = Thread(target=pace.wait, args=(process.now_s,), kwargs={"has_sent": True})
    waiting.start()
    pace.hurry()
    waiting.join(0.9)
    assert not waiting.is_alive()
