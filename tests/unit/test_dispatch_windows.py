"""The windows of Spark's dispatch, without Spark."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blackbox.config.settings import load
from blackbox.engine.metrics import Metrics
from blackbox.engine.spark import dispatch_windows
from blackbox.engine.spark.dispatch_task import Window
from blackbox.engine.spark.dispatch_windows import DispatchWindows
from blackbox.engine.spark.running_window import RunningWindow
from blackbox.journal.kafka_access import KafkaAccess


class FakeBus:
    """In place of the bus in Redis and of its listener: nothing is heard."""

    def __init__(self, *_: object) -> None: ...
    def send(self, *_: object) -> None: ...
    def close(self) -> None: ...

    def next(self, timeout_s: float) -> None:
        Event().wait(timeout_s)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[DispatchWindows]:
    for name in ("Bus", "Listener"):
        monkeypatch.setattr(dispatch_windows, name, FakeBus)
    for name in ("FIRST_PAUSE_S", "SLOW_LOOK_S"):
        monkeypatch.setattr(dispatch_windows, name, 0.01)
    session = cast(Any, SimpleNamespace(conf={}))
    access = KafkaAccess("127.0.0.1:1", "unit", {"log_level": "0"})
    settings = load(kafka_bootstrap_servers="127.0.0.1:1", redis_url="redis://127.0.0.1:1/0")
    windows = DispatchWindows(session, settings, access, Metrics(), "run")
    yield windows
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
