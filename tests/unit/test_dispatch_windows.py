"""The windows of Spark's dispatch, without Spark."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blackbox.config.settings import load
from blackbox.engine.metrics import Metrics
from blackbox.engine.spark import dispatch_windows, running_window
from blackbox.engine.spark.dispatch_task import Window
from blackbox.engine.spark.dispatch_windows import DispatchWindows
from blackbox.engine.spark.running_window import RunningWindow
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.records.request import Shard
from tests.support.world import until


class FakeBus:
    """In place of the bus in Redis and of its listener: keeps what was sent; nothing is heard."""

    def __init__(self, *_: object) -> None:
        self.sent: list[Any] = []

    def send(self, kind: str, note: Any) -> None:
        self.sent.append(note)

    def close(self) -> None: ...

    def next(self, timeout_s: float) -> None:
        Event().wait(timeout_s)


SHARDS = [Shard("TB", partition) for partition in range(4)]
EVEN, ODD = SHARDS[::2], SHARDS[1::2]


@pytest.fixture
def delivery() -> str:
    return "exactly-once"


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch, delivery: str) -> Iterator[DispatchWindows]:
    for name in ("Bus", "Listener"):
        monkeypatch.setattr(dispatch_windows, name, FakeBus)
    for name in ("FIRST_PAUSE_S", "SLOW_LOOK_S"):
        monkeypatch.setattr(dispatch_windows, name, 0.01)
    session = cast(Any, SimpleNamespace(conf={}))
    access = KafkaAccess("127.0.0.1:1", "unit", {"log_level": "0"})
    servers = {"kafka_bootstrap_servers": "127.0.0.1:1", "redis_url": "redis://127.0.0.1:1/0"}
    settings = load(**servers, request_topics="TB:countdown", delivery=delivery)
    windows = DispatchWindows(session, settings, access, Metrics(), "run")
    yield windows
    windows._running.clear()  # those without a task
    if not windows._listening.is_alive():
        windows._listening.start()
    windows.stop(5)


def test_a_window_is_tried_again_when_its_thread_cannot_start(
    windows: DispatchWindows, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched, start = Event(), Thread.start

    def end_at_once(_: Window, running: RunningWindow) -> None:
        windows._end(running)
        launched.set()

    monkeypatch.setattr(windows, "_run_job", end_at_once)
    failures = iter(["can't start new thread"])

    def start_unless_exhausted(thread: Thread) -> None:
        if "end_at_once" in thread.name:  # the window's, by its target
            for failure in failures:
                raise RuntimeError(failure)
        start(thread)

    monkeypatch.setattr(Thread, "start", start_unless_exhausted)
    with caplog.at_level(logging.WARNING):
        windows.start(1)
        assert launched.wait(5)

    assert "dispatch group 0 failed: RuntimeError: can't start new thread; retrying" in caplog.text


def run_windows(windows: DispatchWindows, *groups: int) -> None:
    """A running and current window for each of these groups, numbered from 1 on, as a driver that has spread SHARDS."""
    for number, group in enumerate(groups, 1):
        windows._running[number] = RunningWindow(number, group)
        windows._current[group] = number
    windows._shards, windows._count = frozenset(SHARDS), len(groups)
    windows.renew()
    for window in windows._running.values():
        report(windows, window.number, windows._shards_of(window.group))


def report(windows: DispatchWindows, number: int, owned: Iterable[Shard]) -> None:
    """A report by the window's task that it owns these shards."""
    lists = [list(shard) for shard in sorted(owned)]
    nothing = {"open": lists, "stuck": [], "why_not_open": [], "opened_ms": None}
    metrics = list(Metrics().report())
    windows._take_report({"number": number, "owned": lists, "metrics": metrics} | nothing)


def replace_window(windows: DispatchWindows, number: int, group: int) -> None:
    """A successor of the group's window has a slot, and becomes current."""
    successor = windows._running[number] = RunningWindow(number, group)
    report(windows, number, ())
    windows._make_current(successor)


def leased(windows: DispatchWindows) -> dict[str, Any]:
    """The shards of each group in the next lease."""
    windows.renew()
    lease: dict[str, Any] = windows._bus.sent[-1]  # type: ignore[attr-defined]
    return {group: [Shard(*shard) for shard in shards] for group, (_, shards) in lease.items()}


@pytest.mark.parametrize("delivery", ["at-least-once"])
def test_without_transactions_a_successor_gets_a_shard_when_its_predecessor_has_ended(
    windows: DispatchWindows,
) -> None:
    run_windows(windows, 0)
    replace_window(windows, 2, group=0)
    assert leased(windows) == {"0": []}
    report(windows, 1, SHARDS)  # it still waits for a broker
    assert leased(windows) == {"0": []}

    windows._end(windows._running[1])

    assert leased(windows) == {"0": SHARDS}


@pytest.mark.parametrize("delivery", ["at-least-once"])
def test_without_transactions_a_successor_waits_no_longer_than_3_s(
    windows: DispatchWindows, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_windows(windows, 0)
    replace_window(windows, 2, group=0)
    monkeypatch.setattr(running_window, "STOP_S", 0)
    assert leased(windows) == {"0": SHARDS}

    monkeypatch.undo()
    replace_window(windows, 3, group=0)
    assert leased(windows) == {"0": []}, "the patience with one window is not that with the next"


@pytest.mark.parametrize("delivery", ["at-least-once"])
def test_without_transactions_a_shard_changes_groups_when_the_other_window_has_given_it_up(
    windows: DispatchWindows,
) -> None:
    run_windows(windows, 0)
    windows._running[2] = RunningWindow(2, 1)
    windows._current[1], windows._count = 2, 2  # Spark has one more slot
    assert leased(windows) == {"0": EVEN, "1": []}

    report(windows, 1, EVEN)
    assert leased(windows) == {"0": EVEN, "1": ODD}

    windows._count = 1
    assert leased(windows) == {"0": EVEN}, "window 2 may own them, although it has not reported so"


@pytest.mark.parametrize("delivery", ["at-least-once"])
def test_without_transactions_a_report_from_before_a_lease_gives_up_no_shard(
    windows: DispatchWindows,
) -> None:
    run_windows(windows, 0, 1)
    windows._count = 1
    report(windows, 2, ())
    assert leased(windows) == {"0": SHARDS}
    report(windows, 1, SHARDS)
    windows._count = 2
    report(windows, 1, EVEN)
    assert leased(windows) == {"0": EVEN, "1": ODD}

    report(windows, 2, ())  # sent before that lease arrived
    windows._count = 1
    assert leased(windows) == {"0": EVEN}
    report(windows, 2, ODD)
    assert leased(windows) == {"0": EVEN}
    report(windows, 2, ())
    assert leased(windows) == {"0": SHARDS}


@pytest.mark.parametrize("delivery", ["at-least-once"])
def test_without_transactions_a_shard_that_no_report_names_is_withheld_for_3_s(
    windows: DispatchWindows, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_windows(windows, 0, 1)
    windows._running[2] = RunningWindow(2, 1)  # that lease was lost
    windows.renew()
    report(windows, 2, ())
    windows._count = 1
    assert leased(windows) == {"0": EVEN}

    monkeypatch.setattr(running_window, "STOP_S", 0)
    assert leased(windows) == {"0": SHARDS}
    report(windows, 2, ())
    assert not windows._running[2].owned


@pytest.mark.parametrize("delivery", ["at-least-once"])
def test_without_transactions_a_window_gets_its_shards_from_a_lease_only(
    windows: DispatchWindows, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Window] = []
    monkeypatch.setattr(windows, "_run_job", lambda window, running: launched.append(window))
    windows._shards, windows._count = frozenset(SHARDS), 1
    windows._launch(0)
    until("it runs", lambda: launched)
    assert not launched[0].shards


def test_with_transactions_a_successor_gets_its_shards_at_once(windows: DispatchWindows) -> None:
    run_windows(windows, 0)
    replace_window(windows, 2, group=0)
    assert leased(windows) == {"0": SHARDS}


def test_a_window_that_was_never_heard_counts_unless_another_has_its_shards(
    windows: DispatchWindows,
) -> None:
    windows.start(0)
    windows._count = 2
    before, following, alone, of_fewer = (
        RunningWindow(number, group) for number, group in enumerate((0, 0, 1, 2))
    )
    windows._running = {one.number: one for one in (before, following, alone, of_fewer)}
    before.heard_s = before.began_s + 1

    assert windows.unheard() == {alone.number}
    del windows._running[before.number]  # its successor waits for Spark now
    assert windows.unheard() == {following.number, alone.number}
    windows._running.clear()
