"""Rate limits of targets: a backlog is spread over the next seconds, so that it floods no target."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

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

    def times(
        self, target: str, count: int, now_ms: int, have_waited: Callable[[], Sequence[bool]]
    ) -> list[int]:
        """When each of these messages, sorted by due time, may go, epoch ms; `now_ms` means at once.

        `have_waited` returns for each whether it was given a time before; it is called only while
        others wait. Raises IndexLost or IndexFull as the index does.
        """
        rule = self._file.rules().targets.get(target)
        if rule is None:
            return [now_ms] * count
        most, second = rule.messages_per_second, now_ms // 1000
        # another rate is another sequence: its numbers stand for other times
        sequence, next_second = f"{target}:{most}", (second + 1) * most
        may_go: Sequence[bool] = [True] * count
        # If others wait for the next second, this one is given away: only messages that have waited
        # may go in it. New ones queue up behind, also those that were due before it and are late.
        if self._counts.reserve(sequence, 0, 0) > next_second:
            may_go = have_waited()
        free = self._free(target, sum(may_go), most, second)
        going = set([place for place, may in enumerate(may_go) if may][:free])
        if len(going) == count:
            return [now_ms] * count
        numbers = itertools.count(self._counts.reserve(sequence, count - len(going), next_second))
        return [
            now_ms if place in going else next(numbers) * 1000 // most for place in range(count)
        ]

    def _free(self, target: str, wanted: int, most: int, second: int) -> int:
        """Count these messages in this second; return how many of them may go in it."""
        at = Second("messages", target, second)
        return max(0, min(wanted, most - self._counts.count({at: wanted})[at])) if wanted else 0

    def give_back(self, target: str, count: int) -> None:
        """Give back `count` of the times that were reserved last. Raises as `times`."""
        rule = self._file.rules().targets.get(target)
        if rule is not None:
            self._counts.reserve(f"{target}:{rule.messages_per_second}", -count, 0)
