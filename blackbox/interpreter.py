"""How Python itself is set up in a process that moves many small values between threads."""

from __future__ import annotations

import ctypes
import gc
import sys

YOUNG_OBJECTS = 100_000
"""A batch makes tens of thousands of tuples that all end with it; the default, 700, looks at each twice."""

SWITCH_S = 0.0005
"""A thread whose socket was answered waits this long for the interpreter, not the usual 5 ms."""


GIVEN_BACK_EVERY_S = 60.0


def tune() -> None:
    """Trade a little memory for about a tenth of the time of every verb."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 50)
    sys.setswitchinterval(SWITCH_S)


def give_memory_back() -> None:
    """Let the system have what a backlog took: freed, glibc keeps it wherever something small lies above."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
