"""The first verb, I1 to I3: requests enter the index."""

from __future__ import annotations

from tests.model.journals import planned
from tests.model.state import NOWHERE, Owner, Record, State, Step
from tests.model.terms import Rule, Terms


class Intake:
    """The steps of an owner's intake. One gives the state after it; None: it cannot be done now."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms

    def next(self, state: State, who: int) -> tuple[Step, State | None]:
        """The next step, and the state after it."""
        owner = state.owners[who]
        if owner.taking is None:
            return Step.READ, self._read(state, who, owner)
        if owner.watched is None:
            return Step.LOOK, self._look(state, who, owner)
        return Step.STORE, self._store(state, who, owner) if owner.intake_is_watching else None

    def _read(self, state: State, who: int, owner: Owner) -> State | None:
        start = owner.position
        if start == NOWHERE:
            return None
        there = [
            at for at in range(start, state.written) if self._terms.records[at] is not Record.GAP
        ]
        if not there:
            return None
        batch = start if self._terms.keeps(Rule.POSITION) else there[0], there[-1] + 1
        return state.with_owner(who, owner._replace(position=batch[1], taking=batch))

    def _look(self, state: State, who: int, owner: Owner) -> State:
        assert owner.taking is not None
        start, end = owner.taking
        index = state.redis
        if not self._terms.can_reach_redis(owner) or index is None:
            return state.in_doubt(who)
        if index.requests < start and self._terms.keeps(Rule.INTAKE_LABEL):
            return state.in_doubt(who)
        if index.requests >= end:
            known = owner._replace(taking=None, requests=max(owner.requests, index.requests))
            return state.with_owner(who, known)
        return state.with_owner(who, owner._replace(is_connected=True, watched=index))

    def _store(self, state: State, who: int, owner: Owner) -> State:
        assert owner.taking is not None
        assert owner.watched is not None
        start, end = owner.taking
        seen, index = owner.watched, state.redis
        if not self._terms.can_reach_redis(owner):
            return state.in_doubt(who)
        has_changed = index is None or (index.requests, index.skip) != (seen.requests, seen.skip)
        if has_changed and self._terms.watches(owner):
            return state.with_owner(who, owner._replace(watched=None))
        owner = owner._replace(is_connected=True, watched=None, taking=None, requests=end)
        if owner.ahead:
            _, ended, _ = planned(self._terms.records, seen, start, end)
            owner = self._without_ended(owner, ended)
        state = state.with_owner(who, owner)
        return state if index is None else self._terms.stored(state, index, seen, start, end)

    def _without_ended(self, owner: Owner, ended: int) -> Owner:
        if ended and self._terms.keeps(Rule.AHEAD):
            return owner._replace(ahead=0)
        return owner._replace(ahead_ended=owner.ahead_ended | (owner.ahead & ended))
