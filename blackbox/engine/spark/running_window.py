"""A dispatch window as its driver sees it: what its task last reported, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from blackbox.engine.metrics import Metrics, Report
from blackbox.records.request import Shard


@dataclass(slots=True)
class RunningWindow:
    """A window, from the launch of its Spark job to its end. `last` is the report its task returned."""

    number: int
    group: int
    began_s: float = field(default_factory=time.monotonic)
    heard_s: float = float("-inf")
    owned: frozenset[Shard] = frozenset()
    is_open: frozenset[Shard] = frozenset()
    stuck: frozenset[Shard] = frozenset()
    why_not_open: Mapping[Shard, str] = field(default_factory=dict)
    opened_ms: int | None = None
    counted: Report = field(default_factory=Report)
    last: Mapping[str, Any] | None = None
    failure: Exception | None = None
    has_ended: bool = False

    @property
    def job_group(self) -> str:
        """The name of its jobs in Spark."""
        return f"blackbox-window-{self.number}"

    def hear(self, report: Mapping[str, Any]) -> None:
        """Store the state of the shards that a report shows."""
        self.heard_s = time.monotonic()
        self.owned = _shards(report["owned"])
        self.is_open = _shards(report["open"])
        self.stuck = _shards(report["stuck"])
        self.why_not_open = {Shard(*shard): why for shard, why in report["why_not_open"]}
        self.opened_ms = report["opened_ms"]

    def count(self, report: Mapping[str, Any], metrics: Metrics) -> None:
        """Add what the task counted since its last report."""
        # Reports have totals, not differences: a lost one loses no counts.
        counted = Report(*report["metrics"])
        metrics.absorb(counted, self.counted)
        self.counted = counted


def unheard(windows: Iterable[RunningWindow]) -> set[int]:
    """Those that have not been heard of since their launch, unless another window of their group has."""
    each = list(windows)
    served = {window.group for window in each if window.heard_s > window.began_s}
    return {window.number for window in each if window.group not in served}


def _shards(lists: Iterable[Iterable[Any]]) -> frozenset[Shard]:
    return frozenset(Shard(*parts) for parts in lists)
