"""Rates of targets, and how much of them is used in each second."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from threading import Lock

from blackbox.records.errors import IndexFull, IndexLost
from blackbox.records.request import Second
from blackbox.rules.file import RulesFile
from blackbox.rules.rules import CallerCounts

logger = logging.getLogger("blackbox.rules")

# In this time, a Redis that hangs delays one shard of the process, once.
SILENT_FOR_S = 20.0
MOST_KNOWN = 10_000


class TargetRates:
    """The rates of all targets, shared by all shards. Safe from any thread.

    While Redis cannot count, each process counts what it sends itself.
    """

    def __init__(self, file: RulesFile, counts: CallerCounts) -> None:
        self._file = file
        self._counts = counts
        self._known: dict[Second, int] = {}
        self._is_silent = False
        self._ask_at_s = -math.inf
        self._lock = Lock()

    def limited(self) -> Mapping[str, int]:
        """The messages per second of the targets that have a rate now."""
        rules = self._file.rules().targets
        return {target: rule.messages_per_second for target, rule in rules.items()}

    def count(self, cluster: str, more: Mapping[str, int], now_ms: int) -> dict[str, int]:
        """Count more messages to these targets in this second; return how many there were before."""
        # deployments on other clusters have other topics of this name
        seconds = {to: Second("messages", f"{cluster}/{to}", now_ms // 1000) for to in more}
        limited = self.limited()
        with self._lock:
            known = {at: self._known.get(at, 0) for at in seconds.values()}
        asked = {
            at: more[to]
            for to, at in seconds.items()
            if known[at] < limited.get(to, math.inf)  # else there is nothing left to ask about
        }
        # Redis does not know what was counted here while it could not count
        counted = {at: max(count, known[at]) for at, count in self._ask(asked).items()}
        with self._lock:
            return {to: self._note(at, counted.get(at), more[to]) for to, at in seconds.items()}

    def _ask(self, more: Mapping[Second, int]) -> Mapping[Second, int]:
        """Count in Redis; empty if it cannot count, or could not a few seconds ago."""
        with self._lock:
            now_s = time.monotonic()
            if not more or now_s < self._ask_at_s:
                return {}
            if self._is_silent:  # one thread asks again, and the others do not wait for it
                self._ask_at_s = now_s + SILENT_FOR_S
        try:
            counted = self._counts.count(more)
        except (IndexFull, IndexLost) as why:
            with self._lock:
                if not self._is_silent:
                    logger.warning("each process counts rates of targets for itself now: %s", why)
                self._is_silent, self._ask_at_s = True, time.monotonic() + SILENT_FOR_S
            return {}
        with self._lock:
            self._is_silent, self._ask_at_s = False, -math.inf
        return counted

    def _note(self, at: Second, before: int | None, more: int) -> int:
        known = self._known.get(at, 0)
        before = known if before is None else before
        self._known[at] = max(known, before + more)
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return before
