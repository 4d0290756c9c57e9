"""Rate limits of targets: a backlog is spread over the next seconds, so that it floods no target."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from blackbox.records.request import Second
from blackbox.rules.file import RulesFile
from blackbox.rules.rules import CallerCounts


class TargetRates:
    """The rates of all targets, shared by all shards. Safe from any thread."""

    def __init__(self, file: RulesFile, counts: CallerCounts) -> None:
        self._file = file
        self._counts = counts

    def limited(self) -> frozenset[str]:
        """The targets that have a rate now."""
        return frozenset(self._file.rules().targets)

    def times(self, target: str, due_ms: Sequence[int], now_ms: int) -> list[int]:
        """When each of these messages, sorted by due time, may go, epoch ms; `now_ms` means at once.

        Raises IndexLost or IndexFull as the index does.
        """
        count = len(due_ms)
        rule = self._file.rules().targets.get(target)
        if rule is None:
            return [now_ms] * count
        most, second = rule.messages_per_second, now_ms // 1000
        # another rate is another sequence: its numbers stand for other times
        sequence, next_second = f"{target}:{most}", (second + 1) * most
        # A message with a reserved time got it before this second, so it was due before it too.
        # Messages that came due in this second go after these.
        old = bisect_left(due_ms, second * 1000)
        if old < count and self._counts.reserve(sequence, 0, 0) > next_second:
            free = self._free(target, old, most, second)
        else:
            free = self._free(target, count, most, second)
        late = count - free
        if not late:
            return [now_ms] * count
        first = self._counts.reserve(sequence, late, next_second)
        return [now_ms] * free + [(first + number) * 1000 // most for number in range(late)]

    def _free(self, target: str, wanted: int, most: int, second: int) -> int:
        """Count these messages in this second; return how many of them may go in it."""
        at = Second("messages", target, second)
        return max(0, min(wanted, most - self._counts.count({at: wanted})[at])) if wanted else 0

    def give_back(self, target: str, count: int) -> None:
        """Give back `count` of the times that were reserved last. Raises as `times`."""
        rule = self._file.rules().targets.get(target)
        if rule is not None:
            self._counts.reserve(f"{target}:{rule.messages_per_second}", -count, 0)
