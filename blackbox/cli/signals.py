"""Signal handling: the first SIGINT or SIGTERM ends the process gracefully, a second one at once."""

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
# A second signal this soon is taken for the first: wrappers forward what the process group also
# gets.
SAME_S = 0.5


def interrupt() -> None:
    """Make the first signal raise KeyboardInterrupt in the main thread."""

    def unwind() -> None:
        raise KeyboardInterrupt

    react = _to_first(unwind)
    for number in NUMBERS:
        signal.signal(number, lambda number, frame: react(number))


def announce(stop: Event) -> None:
    """Make the first signal set `stop`."""
    # Python runs a handler only when the main thread runs again. That never happens if it waits for
    # `stop`, and the signal went to another thread or arrived just before the wait. The number of
    # the signal is written to this socket at once, and from any thread.
    signals, written_to = socket.socketpair()
    written_to.setblocking(False)

    def watch() -> None:
        react = _to_first(stop.set)
        while number := signals.recv(1):
            if number[0] in NUMBERS:
                react(number[0])

    Thread(target=watch, name="signals", daemon=True).start()
    signal.set_wakeup_fd(written_to.detach(), warn_on_full_buffer=False)
    # Only signals with a handler in Python are written to it.
    for number in NUMBERS:
        signal.signal(number, lambda number, frame: None)


def leave(code: int) -> NoReturn:
    """End the process with this exit code, without waiting for threads that still block."""
    # os._exit also skips the flush of buffered log lines.
    logging.shutdown()
    os._exit(code)


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
