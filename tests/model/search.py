"""Every state that a model can reach, breadth first: the first failure found is the nearest one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.model.shard import Model
from tests.model.state import State, described

LONGEST_REST = 200
"""After this many steps, an owner without faults will never be idle."""

SHOWN = 40
"""How much of those steps a trace shows."""

Trace = tuple[tuple[str, State], ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search. Without a `failure`, every guarantee held in every state.

    `trace` leads to the failure; from its step `alone` on only the shard's owner acts.
    """

    states: int
    failure: str | None = None
    trace: Trace = ()
    alone: int = 0

    def __str__(self) -> str:
        if self.failure is None:
            return f"{self.states} states: nothing fails"
        return "\n".join([f"{self.failure}, after {len(self.trace)} steps:", *self._lines()])

    def _lines(self) -> Iterator[str]:
        for number, (name, state) in enumerate(self.trace):
            if number == self.alone:
                yield "      the owner is left alone:"
            yield f"{number + 1:4}  {name:<62} {described(state.redis)}"


class Search:
    """One search through a model. `positions`: whether the index must equal what they define."""

    def __init__(self, model: Model, *, positions: bool) -> None:
        self._model = model
        self._positions = positions
        self._before: dict[State, tuple[State, str] | None] = {}
        self._ends_well: dict[State, State] = {}

    def run(self) -> Found:
        """Check every state, until one violates a guarantee, or will if its owner continues without faults."""
        level = [self._model.start()]
        self._before[level[0]] = None
        while level:
            reached: list[State] = []
            for state in level:
                for name, after in self._model.steps(state):
                    if after in self._before:
                        continue
                    after = self._ends_well.get(after, after)
                    self._before[after] = state, name
                    failure = self._broken(after)
                    if failure is not None:
                        return self._failed(failure, after, ())
                    if found := self._left_alone(after):
                        return found
                    reached.append(after)
            level = reached
        return Found(len(self._before))

    def _left_alone(self, state: State) -> Found | None:
        """The failure that this owner reaches even without further faults."""
        walked: list[tuple[str, State]] = []
        at = state
        while at not in self._ends_well:
            coming = self._model.calm(at)
            if coming is None:
                failure = self._model.unsettled(at)
            else:
                walked.append(coming)
                at = coming[1]
                failure = self._broken(at)
                if len(walked) == LONGEST_REST:
                    failure, walked = "the owner is never at rest", walked[:SHOWN]
            if failure is not None:
                return self._failed(failure, state, tuple(walked))
            if coming is None:
                break
        self._ends_well |= {known: known for known in (state, *(after for _, after in walked))}
        return None

    def _broken(self, state: State) -> str | None:
        failure = self._model.broken(state)
        return self._model.untrue(state) if failure is None and self._positions else failure

    def _failed(self, failure: str, state: State, walked: Trace) -> Found:
        came: list[tuple[str, State]] = []
        at = state
        while (before := self._before[at]) is not None:
            came.append((before[1], at))
            at = before[0]
        return Found(len(self._before), failure, (*reversed(came), *walked), len(came))
