"""How fast targets are fed: a backlog is spread over the seconds to come, so that it floods nobody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from blackbox.plan import Second
from blackbox.rules.file import RulesFile


class Counts(Protocol):
    """What all shards know together."""

    def count(self, more: Mapping[Second, int]) -> dict[Second, int]: ...
    def reserve(self, name: str, count: int, at_least: int) -> int: ...
    def restart(self, name: str, at: int) -> None: ...


class Pace:
    """The rates of all targets, held by all shards together. Safe from any thread."""

    def __init__(self, file: RulesFile, counts: Counts) -> None:
        self._file = file
        self._counts = counts

    def limited(self) -> frozenset[str]:
        """The targets that have a rate now."""
        return frozenset(self._file.rules().targets)

    def times(self, target: str, count: int, now_ms: int, *, waited: bool = False) -> list[int]:
        """When each of so many messages may go, epoch ms, in order; `now_ms` for those that may at once.

        Those that already `waited` for a slot that they got here go first; the others queue behind all that wait.
        Raises IndexLost or IndexFull as the index does.
        """
        rule = self._file.rules().targets.get(target)
        if rule is None:
            return [now_ms] * count
        most, second = rule.messages_per_second, now_ms // 1000
        queue = f"{target}:{most}"
        room = count if waited else min(count, self._room(target, queue, most, second))
        sent, used = Second("messages", target, second), Second("waited", target, second)
        before = self._counts.count({sent: room} | ({used: count} if waited else {}))
        free = max(0, min(room, most - before[sent]))
        late = count - free
        if not late:
            return [now_ms] * count
        next_second = (second + 1) * most
        first = self._counts.reserve(queue, late, next_second)
        if first == next_second:  # nobody waited before: this queue is used from the next second on
            self._counts.count({used: most})
        return [now_ms] * free + [(first + number) * 1000 // most for number in range(late)]

    def _room(self, target: str, queue: str, most: int, second: int) -> int:
        """How many messages those that wait leave to the others in this second.

        While others wait, 0, or the fewest slots that were left unused (by cancels, say) in any of the last three
        seconds. If none was used, nobody waits: the queue begins anew.
        """
        if self._counts.reserve(queue, 0, 0) <= (second + 1) * most:
            return most
        used = self._counts.count({Second("waited", target, second - ago): 0 for ago in (0, 1, 2)})
        if not any(used.values()):
            self._counts.restart(queue, (second + 1) * most)
        return max(0, most - max(used.values()))

    def give_back(self, target: str, count: int) -> None:
        """So many of the times that were taken last are not used. Raises as `times`."""
        rule = self._file.rules().targets.get(target)
        if rule is not None:
            self._counts.reserve(f"{target}:{rule.messages_per_second}", -count, 0)
