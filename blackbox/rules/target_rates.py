"""Rates of targets, and how much of them is used in each second."""

from __future__ import annotations

from collections.abc import Mapping

from blackbox.records.request import Second
from blackbox.rules.file import RulesFile
from blackbox.rules.rules import CallerCounts


class TargetRates:
    """The rates of all targets, shared by all shards. Safe from any thread."""

    def __init__(self, file: RulesFile, counts: CallerCounts) -> None:
        self._file = file
        self._counts = counts

    def limited(self) -> Mapping[str, int]:
        """The messages per second of the targets that have a rate now."""
        rules = self._file.rules().targets
        return {target: rule.messages_per_second for target, rule in rules.items()}

    def count(self, cluster: str, target: str, more: int, now_ms: int) -> int:
        """Count more messages in this second; return how many there were before.

        Raises IndexLost or IndexFull as the index does.
        """
        # deployments on other clusters have other topics of this name
        at = Second("messages", f"{cluster}/{target}", now_ms // 1000)
        return self._counts.count({at: more})[at]
