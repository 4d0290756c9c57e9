"""The first verb, I1 to I3: requests enter the index."""

from __future__ import annotations

from tests.model.journals import NAMED_BY, REPLACES, planned
from tests.model.state import NOBODY, NOWHERE, Index, Owner, Record, State, Step, below
from tests.model.terms import Rule, Terms


class Intake:
    """The steps of an owner's intake. Each returns the state after it; None: it cannot be done now."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms

    def next(self, state: State, who: int) -> tuple[Step, State | None]:
        """The next step, and the state after it."""
        owner = state.owners[who]
        if self._terms.is_apart:
            return Step.READ, None
        if owner.taking is None:
            return Step.READ, self._read(state, who, owner)
        if owner.watched is None:
            return Step.LOOK, self._look(state, who, owner)
        return Step.STORE, self._store(state, who, owner) if owner.intake_is_watching else None

    def apart(self, state: State) -> State | None:
        """All steps at once, by a process without a state in memory."""
        index = state.redis
        if index is None or self._must_wait(index, state.written):
            return None
        start, end = index.requests, state.written
        if start < state.starts.requests or start >= end:
            return None
        asks = self._terms.conditional & below(end) & ~below(start)
        if asks and index.receipts < len(state.log) and self._terms.keeps(Rule.APART):
            return None
        return self._terms.stored(state, index, index, start, end)

    def _must_wait(self, index: Index, end: int) -> bool:
        if index.rebuild != NOBODY and self._terms.keeps(Rule.WAITS):
            return True
        asked = range(index.requests, end)
        records = self._terms.records
        replaced = [NAMED_BY[records[at]] for at in asked if records[at] in REPLACES]
        is_in_flight = any(index.in_flight >> named & 1 for named in replaced)
        return is_in_flight and self._terms.keeps(Rule.LEAVING)

    def _read(self, state: State, who: int, owner: Owner) -> State | None:
        start = owner.position
        if start == NOWHERE:
            return None
        if start < state.starts.requests:
            return state.in_doubt(who)
        there = [
            at for at in range(start, state.written) if self._terms.records[at] is not Record.GAP
        ]
        if not there:
            return None
        batch = start if self._terms.keeps(Rule.POSITION) else there[0], there[-1] + 1
        return state.with_owner(who, owner._replace(position=batch[1], taking=batch))

    def _look(self, state: State, who: int, owner: Owner) -> State | None:
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
        if self._must_wait(index, end):
            return None if index.rebuild == NOBODY and owner.is_connected else state.in_doubt(who)
        return state.with_owner(who, owner._replace(is_connected=True, watched=index))

    def _store(self, state: State, who: int, owner: Owner) -> State:
        assert owner.taking is not None
        assert owner.watched is not None
        start, end = owner.taking
        seen, index = owner.watched, state.redis
        if not self._terms.can_reach_redis(owner):
            return state.in_doubt(who)
        has_changed = index is None or _watched(index) != _watched(seen)
        if has_changed and self._terms.watches(owner):
            return state.with_owner(who, owner._replace(watched=None))
        owner = owner._replace(is_connected=True, watched=None, taking=None, requests=end)
        if owner.ahead:
            plan = planned(self._terms.records, seen, start, end)
            owner = self._without_ended(owner, plan.ended)
        state = state.with_owner(who, owner)
        return state if index is None else self._terms.stored(state, index, seen, start, end)

    def _without_ended(self, owner: Owner, ended: int) -> Owner:
        if ended and self._terms.keeps(Rule.AHEAD):
            return owner._replace(ahead=0)
        return owner._replace(ahead_ended=owner.ahead_ended | (owner.ahead & ended))


def _watched(index: Index) -> tuple[int, ...]:
    return index.requests, index.skip, index.in_flight, index.token, index.rebuild
