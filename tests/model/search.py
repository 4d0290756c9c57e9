"""The search: every state that a model can reach, breadth first, so that the first failure is a shortest one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.model.shard import Model, State, described

LONGEST_CALM = 300


@dataclass(frozen=True, slots=True)
class Found:
    """What a search saw. `failure` is None when every promise held; `trace` leads to the failure.

    From `alone` on, only the shard's owner acts.
    """

    states: int
    depth: int
    failure: str | None = None
    trace: tuple[tuple[str, State], ...] = ()
    alone: int = 0

    def __str__(self) -> str:
        if self.failure is None:
            return f"{self.states} states, {self.depth} steps deep: nothing fails"
        lines = list(self._lines())
        return "\n".join([f"{self.failure}, after {len(self.trace)} steps:", *lines])

    def _lines(self) -> Iterator[str]:
        for number, (name, state) in enumerate(self.trace, 1):
            if number == self.alone + 1:
                yield "     from here on the owner is left alone:"
            yield f"{number:4}. {name:<70} {described(state.index)}"


class Search:
    """One walk through a model's states; with or without a look at what the labels stand for."""

    def __init__(self, model: Model, *, labels: bool = True) -> None:
        self._model = model
        self._labels = labels
        self._from: dict[State, tuple[State, str] | None] = {}
        self._ends_well: dict[State, State] = {}

    def run(self) -> Found:
        """Look at every state, until one breaks a promise or cannot be saved any more."""
        first = self._model.start()
        self._from[first] = None
        level, depth = [first], 0
        while level:
            depth += 1
            later: list[State] = []
            for state in level:
                for name, after in self._model.steps(state):
                    if after in self._from:
                        continue
                    after = self._ends_well.get(after, after)
                    self._from[after] = state, name
                    if failure := self._broken(after):
                        return self._failed(failure, depth, after, ())
                    if found := self._left_alone(after, depth):
                        return found
                    later.append(after)
            level = later
        return Found(len(self._from), depth)

    def _broken(self, state: State) -> str | None:
        return self._model.broken(state) or (self._model.untrue(state) if self._labels else None)

    def _left_alone(self, state: State, depth: int) -> Found | None:
        """Where the owner gets from here when nothing else happens, if that is no good end."""
        walked: list[tuple[str, State]] = []
        at = state
        while at not in self._ends_well:
            calm = self._model.calm(at)
            failure = self._model.unsettled(at) if calm is None else None
            if calm is not None and len(walked) == LONGEST_CALM:
                failure, walked = "the owner never comes to rest", walked[:30]
            if failure:
                return self._failed(failure, depth, state, tuple(walked))
            if calm is None:
                break
            walked.append(calm)
            at = calm[1]
            if broken := self._broken(at):
                return self._failed(broken, depth, state, tuple(walked))
        self._ends_well |= {known: known for known in (state, *(after for _, after in walked))}
        return None

    def _failed(
        self, failure: str, depth: int, state: State, walked: tuple[tuple[str, State], ...]
    ) -> Found:
        led: list[tuple[str, State]] = []
        at = state
        while (came := self._from[at]) is not None:
            led.append((came[1], at))
            at = came[0]
        return Found(len(self._from), depth, failure, (*reversed(led), *walked), len(led))
