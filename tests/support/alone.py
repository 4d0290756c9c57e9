"""Tests that measure how late messages are run while no other test runs."""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from pathlib import Path

import pytest


class Alone:
    """Makes a test marked `alone` wait for the tests of other workers, and makes these wait for it."""

    def __init__(self, folder: Path) -> None:
        self._queue = folder / "queue"
        self._running = folder / "running"

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before the timeout of the test starts
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        is_alone = item.get_closest_marker("alone") is not None
        with self._queue.open("w") as queue, self._running.open("w") as running:
            # Without the queue, workers that start and end would starve the test that runs alone.
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(running, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
            fcntl.flock(queue, fcntl.LOCK_UN)
            return (yield)
