"""How fast targets are fed: a backlog is spread over the seconds to come, so that it floods nobody."""

from __future__ import annotations

from blackbox.plan import Second
from blackbox.rules.file import RulesFile
from blackbox.rules.rules import Counts


class Pace:
    """The rates of all targets, held by all shards together. Safe from any thread."""

    def __init__(self, file: RulesFile, counts: Counts) -> None:
        self._file = file
        self._counts = counts

    def limited(self) -> frozenset[str]:
        """The targets that have a rate now."""
        return frozenset(self._file.rules().targets)

    def times(self, target: str, count: int, now_ms: int) -> list[int]:
        """When each of so many messages may go, epoch ms, in order; `now_ms` for those that may at once.

        Raises IndexLost or IndexFull as the index does.
        """
        rule = self._file.rules().targets.get(target)
        if rule is None:
            return [now_ms] * count
        most, second = rule.messages_per_second, now_ms // 1000
        at = Second("messages", target, second)
        free = max(0, min(count, most - self._counts.count({at: count})[at]))
        late = count - free
        if not late:
            return [now_ms] * count
        first = self._counts.reserve(f"{target}:{most}", late, (second + 1) * most)
        return [now_ms] * free + [(first + number) * 1000 // most for number in range(late)]

    def give_back(self, target: str, count: int) -> None:
        """So many of the times that were taken last are not used. Raises as `times`."""
        rule = self._file.rules().targets.get(target)
        if rule is not None:
            self._counts.reserve(f"{target}:{rule.messages_per_second}", -count, 0)
