"""Rates of targets, and how much of them is used in each second."""

from __future__ import annotations

import math
from collections.abc import Mapping
from threading import Lock

from blackbox.records.request import Second
from blackbox.rules.file import RulesFile
from blackbox.rules.rules import CallerCounts

MOST_KNOWN = 10_000


class TargetRates:
    """The rates of all targets, shared by all shards. Safe from any thread."""

    def __init__(self, file: RulesFile, counts: CallerCounts) -> None:
        self._file = file
        self._counts = counts
        self._known: dict[Second, int] = {}
        self._lock = Lock()

    def limited(self) -> Mapping[str, int]:
        """The messages per second of the targets that have a rate now."""
        rules = self._file.rules().targets
        return {target: rule.messages_per_second for target, rule in rules.items()}

    def count(self, cluster: str, more: Mapping[str, int], now_ms: int) -> dict[str, int]:
        """Count more messages to these targets in this second; return how many there were before.

        Raises IndexLost or IndexFull as the index does.
        """
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
        counted = self._counts.count(asked) if asked else {}
        with self._lock:
            return {to: self._note(at, counted.get(at), more[to]) for to, at in seconds.items()}

    def _note(self, at: Second, before: int | None, more: int) -> int:
        known = self._known.get(at, 0)
        before = known if before is None else before
        self._known[at] = max(known, before + more)
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return before
