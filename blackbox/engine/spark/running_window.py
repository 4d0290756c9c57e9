"""A dispatch window as its driver sees it: what its task last reported, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from blackbox.engine.metrics import Metrics, Report
from blackbox.engine.shard_pool import STOP_S
from blackbox.records.request import Shard


@dataclass(slots=True)
class RunningWindow:
    """A window, from the launch of its Spark job to its end. `last` is the report its task returned.

    `owned` has what its task reported last, and what it may have since: a report can be older than the
    lease with which a shard was granted. `leased` has the shards of the last lease, `named` those of
    `granted` that a report named since.
    """

    number: int
    group: int
    began_s: float = field(default_factory=time.monotonic)
    heard_s: float = float("-inf")
    owned: frozenset[Shard] = frozenset()
    leased: frozenset[Shard] = frozenset()
    granted: frozenset[Shard] = frozenset()
    named: frozenset[Shard] = frozenset()
    is_open: frozenset[Shard] = frozenset()
    stuck: frozenset[Shard] = frozenset()
    why_not_open: Mapping[Shard, str] = field(default_factory=dict)
    opened_ms: int | None = None
    withdrawn_s: dict[Shard, float] = field(default_factory=dict)
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
        reported = _shards(report["owned"])
        self.granted -= self.named - reported  # given up
        self.named = reported & self.granted
        self.owned = reported | self.granted
        self.is_open = _shards(report["open"])
        self.stuck = _shards(report["stuck"])
        self.why_not_open = {Shard(*shard): why for shard, why in report["why_not_open"]}
        self.opened_ms = report["opened_ms"]

    def grant(self, shards: frozenset[Shard]) -> None:
        """Count these shards as owned: the task may have them before it reports so."""
        self.named -= shards - self.leased
        self.leased = shards
        self.granted |= shards
        self.owned |= shards
        for shard in shards:
            self.withdrawn_s.pop(shard, None)

    def may_deliver(self, shard: Shard) -> bool:
        """Whether the task may have a batch of a shard in flight that was given to another window."""
        if shard not in self.owned:
            return False
        # No longer than a pool waits for its ticks: the shard of a task that hangs must not wait.
        began_s = self.withdrawn_s.setdefault(shard, time.monotonic())
        if time.monotonic() - began_s < STOP_S:
            return True
        self.granted -= {shard}
        return False

    def count(self, report: Mapping[str, Any], metrics: Metrics) -> None:
        """Add what the task counted since its last report."""
        # Reports have totals, not differences: a lost one loses no counts.
        counted = Report(*report["metrics"])
        metrics.absorb(counted, self.counted)
        self.counted = counted


def lease_for(
    wanted: Mapping[int, tuple[int, frozenset[Shard]]],
    running: Collection[RunningWindow],
    *,
    is_fenced: bool,
) -> dict[str, Any]:
    """The lease of each group: the number of its window, and the shards that this one owns now.

    `wanted` has the number and the shards of each group. With `is_fenced`, a window gets its shards at
    once, as opening them ends what others have in flight. Otherwise each shard waits until no other
    window has it, for 3 s at most: it would deliver the batch in flight again.
    """
    lease: dict[str, Any] = {}
    for group, (number, shards) in wanted.items():
        if not is_fenced:
            others = [window for window in running if window.number != number]
            shards -= {shard for other in others for shard in shards if other.may_deliver(shard)}
            for window in running:
                if window.number == number:
                    window.grant(shards)
        lease[str(group)] = [number, [list(shard) for shard in sorted(shards)]]
    return lease


def unheard(windows: Iterable[RunningWindow]) -> set[int]:
    """Those that have not been heard of since their launch, unless another window of their group has."""
    each = list(windows)
    served = {window.group for window in each if window.heard_s > window.began_s}
    return {window.number for window in each if window.group not in served}


def _shards(lists: Iterable[Iterable[Any]]) -> frozenset[Shard]:
    return frozenset(Shard(*parts) for parts in lists)
