"""Receipts that a shard writes while it has nothing to deliver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from blackbox.core.ports import SettlingIndex, Writer
from blackbox.core.settlement import Settlement
from blackbox.records.receipt import Receipt

# How late receipts record which requests callers' rules have judged, in case Redis is lost.
RECEIPT_AFTER_MS = 5_000


@dataclass(slots=True)
class IdleReceipts:
    """Receipts without outcomes: they record how far rules have judged, or read Kafka's clock again.

    `has_rules`: callers' rules judge requests. `is_clock_outdated` returns whether Kafka's clock
    must be read again.
    """

    index: SettlingIndex
    writer: Writer
    has_rules: bool
    is_clock_outdated: Callable[[], bool]
    _recorded: int = 0
    _recorded_ms: int = 0

    def note(self, known: int, now_ms: int) -> None:
        """Note that a receipt records now that the requests below `known` were read."""
        self._recorded, self._recorded_ms = known, now_ms

    def write_if_needed(self, known: int, now_ms: int) -> None:
        is_late = now_ms - self._recorded_ms >= RECEIPT_AFTER_MS
        has_judged_more = self.has_rules and known > self._recorded and is_late
        if has_judged_more or self.is_clock_outdated():
            self.writer.begin()
            position = self.writer.commit(Receipt(at_ms=now_ms, read=known))
            self.index.settle(Settlement({}, position))
            self.note(known, now_ms)
