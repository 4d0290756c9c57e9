"""A cache that computes an answer once for all callers."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

from blackbox.records.errors import RecoveryRequired

K = TypeVar("K")
V = TypeVar("V")


class Cache(Generic[K, V]):
    """Caches results of `make` for `kept_s`; callers wait while one is made. For any thread."""

    def __init__(self, make: Callable[[K], V], kept_s: float) -> None:
        self._make = make
        self._kept_s = kept_s
        self._entries: dict[K, tuple[float, V | RecoveryRequired]] = {}
        self._lock = Lock()

    def get(self, key: K) -> V:
        with self._lock:
            now_s = time.monotonic()
            self._entries = {
                old_key: entry
                for old_key, entry in self._entries.items()
                if now_s - entry[0] < self._kept_s
            }
            if key not in self._entries:
                self._entries[key] = self._make_entry(key)
            _, found = self._entries[key]
        if isinstance(found, RecoveryRequired):
            # A copy: each raise of one exception adds to its traceback, and threads would share it.
            raise type(found)(str(found))
        return found

    def _make_entry(self, key: K) -> tuple[float, V | RecoveryRequired]:
        # From its start: an answer is as old as the first thing it was computed from.
        began_s = time.monotonic()
        try:
            return began_s, self._make(key)
        except RecoveryRequired as failure:
            # Kept as well, or callers would wait one by one for a server that is down. From its
            # end: this wait may take longer than `kept_s`.
            return time.monotonic(), failure
