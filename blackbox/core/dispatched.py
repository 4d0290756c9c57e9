"""The result of one tick of dispatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from blackbox.core.parking import time_at
from blackbox.core.plan import Postponed


@dataclass(slots=True)
class Dispatched:
    """The result of one tick.

    `due_ms` are the due times of what it delivered, `targets` the number of messages by target.
    `next_due_ms` is the next due or retry time, None if there is none.
    """

    due_ms: list[int] = field(default_factory=list)
    targets: Counter[str] = field(default_factory=Counter)
    dead: Counter[str] = field(default_factory=Counter)
    postponed: int = 0
    is_full: bool = False
    next_due_ms: int | None = None
    oldest_ms: int | None = None
    pending: int = 0
    in_doubt: int = 0

    def count_postponed(self, changes: Mapping[int, Postponed]) -> None:
        if changes:
            self.postponed += len(changes)
            times = [ms for at_ms, _ in changes.values() if (ms := time_at(at_ms)) is not None]
            first_ms = min(times, default=self.next_due_ms)
            self.next_due_ms = min(first_ms, self.next_due_ms or first_ms) if first_ms else None
