"""Waiting for a condition, and whether a process lives."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def becomes_true(condition: Callable[[], bool], deadline_s: float = 10.0) -> bool:
    give_up_at_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > give_up_at_s:
            return False
        time.sleep(0.02)
    return True


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
