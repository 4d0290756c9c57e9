"""Interpreter settings for a process that moves many small values between threads."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable

# A batch makes tens of thousands of tuples that end with it. With the default, 700, the collector
# scans each of them twice.
YOUNG_OBJECTS = 100_000

# A thread whose socket was answered waits this long for the interpreter, not the usual 5 ms.
SWITCH_S = 0.0005

GIVEN_BACK_EVERY_S = 10.0

M_ARENA_MAX = -8
# By default nearly every thread has an arena with gaps of its own: 96 MB grew to 106 over 30
# rebalances.
ARENAS = 2


def tune() -> None:
    """Trade a little memory for about a tenth of the time of every verb. Call it before threads start."""
    # What was imported lives as long as the process: frozen objects are not examined any more.
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 50)
    sys.setswitchinterval(SWITCH_S)
    if mallopt := _of_libc("mallopt"):
        mallopt(M_ARENA_MAX, ARENAS)


def give_memory_back() -> None:
    """Return a backlog's memory to the system."""
    # glibc itself returns only memory above the last allocation that is in use.
    if trim := _of_libc("malloc_trim"):
        trim(0)


def _of_libc(name: str) -> Callable[..., int] | None:
    """A function of libc; None where libc is not glibc."""
    return getattr(ctypes.CDLL(None), name, None)
