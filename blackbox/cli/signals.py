"""What SIGINT and SIGTERM do: the first one ends gracefully, a second one at once."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from types import FrameType
from typing import NoReturn

NUMBERS = (signal.SIGINT, signal.SIGTERM)
SAME_S = 0.5
"""Wrappers pass a signal on that the process group got as well: so soon, it is the same one."""


def interrupt() -> None:
    """Let the first signal unwind the main thread as a KeyboardInterrupt."""

    def unwind() -> None:
        raise KeyboardInterrupt

    _on_first(unwind)


def announce(stop: Event) -> None:
    """Let the first signal set `stop`.

    From a thread of its own: a handler that sets it interrupts a thread which may just hold the
    event's lock, to wait for it, and would then wait for that for ever.
    """
    came: SimpleQueue[None] = SimpleQueue()

    def tell() -> None:
        came.get()
        stop.set()

    Thread(target=tell, name="signals", daemon=True).start()
    _on_first(partial(came.put, None))


def leave() -> NoReturn:
    """End the process with exit code 0, without the threads that still wait for something."""
    logging.shutdown()
    os._exit(0)


def _on_first(react: Callable[[], None]) -> None:
    first_s: float | None = None

    def received(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        if first_s is None:
            first_s = time.monotonic()
            react()
        elif time.monotonic() - first_s > SAME_S:
            os._exit(128 + number)

    for number in NUMBERS:
        signal.signal(number, received)
