"""What SIGINT and SIGTERM do: the first one ends gracefully, a second one at once."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from threading import Event, Thread
from typing import NoReturn

NUMBERS = (signal.SIGINT, signal.SIGTERM)
SAME_S = 0.5
"""Wrappers pass a signal on that the process group got as well: so soon, it is the same one."""


def interrupt() -> None:
    """Let the first signal unwind the main thread as a KeyboardInterrupt."""

    def unwind() -> None:
        raise KeyboardInterrupt

    react = _to_first(unwind)
    for number in NUMBERS:
        signal.signal(number, lambda number, frame: react(number))


def announce(stop: Event) -> None:
    """Let the first signal set `stop`.

    Python runs a handler in the main thread, once that runs again; if it waits for `stop`, and the
    system gave the signal to another thread, or in the moment before, that is never. The number of a
    signal is also written to a socket, at once and in whichever thread, and read here by one.
    """
    signals, written_to = socket.socketpair()
    written_to.setblocking(False)

    def watch() -> None:
        react = _to_first(stop.set)
        while number := signals.recv(1):
            if number[0] in NUMBERS:
                react(number[0])

    Thread(target=watch, name="signals", daemon=True).start()
    signal.set_wakeup_fd(written_to.detach(), warn_on_full_buffer=False)
    for number in NUMBERS:
        signal.signal(number, lambda number, frame: None)


def leave() -> NoReturn:
    """End the process with exit code 0, without the threads that still wait for something."""
    logging.shutdown()
    os._exit(0)


def _to_first(react: Callable[[], None]) -> Callable[[int], None]:
    first_s: float | None = None

    def received(number: int) -> None:
        nonlocal first_s
        if first_s is None:
            first_s = time.monotonic()
            react()
        elif time.monotonic() - first_s > SAME_S:
            os._exit(128 + number)

    return received
