"""The second verb, D1 to D5: due requests are delivered and removed from the index."""

from __future__ import annotations

from tests.model.journals import standing
from tests.model.state import NOWHERE, Index, Mark, Owner, Receipt, State, Step, mask, members
from tests.model.terms import Rule, Terms


class Dispatch:
    """The steps of an owner's dispatch. Each returns the state after it; None: it cannot be done now."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.do = {
            Step.DUE: self._read_due,
            Step.PRODUCE: self._produce,
            Step.RECEIPT: self._produce_receipt,
            Step.COMMIT: self._commit,
            Step.WATCH: self._watch,
            Step.REMOVE: self._remove,
        }

    def _read_due(self, state: State, who: int, owner: Owner) -> State | None:
        index = state.redis
        if owner.ahead:
            return state.with_owner(who, _begin_with_ahead(owner))
        if owner.intake_is_watching:
            return None
        if not self._terms.can_reach_redis(owner):
            return state.in_doubt(who)
        if not owner.expects(index) and self._terms.keeps(Rule.DUE_POSITIONS):
            return state.in_doubt(who)
        if index is None:
            return state.with_owner(who, owner._replace(is_connected=True))
        due = state.due | index.letters if self._terms.keeps(Rule.DUE_ONLY) else ~0
        batch = self._first(index.entries & due)
        if self._terms.conditional and index.in_flight != batch:
            state = state.with_index(index._replace(in_flight=batch))
        began = owner._replace(
            step=Step.PRODUCE if batch else Step.DUE,
            is_connected=True,
            requests=index.requests,
            batch=batch,
            dead=batch & index.letters,
            ended=batch & ~self._standing(state),
        )
        return state.with_owner(who, began)

    def _standing(self, state: State) -> int:
        """Requests that were stored and have not ended."""
        left = standing(self._terms.records[: state.taken], state.counted)
        return left.hot | left.cold

    def _first(self, due: int, passing_over: int = 0) -> int:
        """A batch of it; a request that was written later was due earlier."""
        after = passing_over.bit_count()
        return mask(members(due)[::-1][after : after + self._terms.limit]) & ~passing_over

    def _produce(self, state: State, who: int, owner: Owner) -> State | None:
        if self._terms.is_fenced(state, who):
            return state.in_doubt(who)
        if owner.batch.bit_count() == self._terms.limit:
            return self._read_ahead(state, who, owner)
        return state.with_owner(who, owner._replace(step=Step.RECEIPT))

    def _read_ahead(self, state: State, who: int, owner: Owner) -> State | None:
        index = state.redis
        if owner.intake_is_watching:
            return None
        if not self._terms.can_reach_redis(owner) or index is None or not owner.expects(index):
            return state.in_doubt(who)
        ahead = self._first(index.entries & state.due, passing_over=owner.batch)
        return state.with_owner(
            who,
            owner._replace(
                step=Step.RECEIPT, is_connected=True, requests=index.requests, ahead=ahead
            ),
        )

    def _produce_receipt(self, state: State, who: int, owner: Owner) -> State:
        if self._terms.is_fenced(state, who):
            return state.in_doubt(who)
        step = Step.COMMIT if self._terms.keeps(Rule.COMMIT_FIRST) else Step.WATCH
        return state.with_owner(who, owner._replace(step=step, end=len(state.log) + 1))

    def _commit(self, state: State, who: int, owner: Owner) -> State:
        if self._terms.is_fenced(state, who):
            return state.in_doubt(who)
        receipt = Receipt(owner.batch, ended=owner.ended, dead=owner.dead)
        state = state._replace(log=(*state.log, receipt))
        if self._terms.keeps(Rule.COMMIT_FIRST):
            return state.with_owner(who, owner._replace(step=Step.WATCH, end=len(state.log)))
        return state.with_owner(who, _idle(owner))

    def _watch(self, state: State, who: int, owner: Owner) -> State | None:
        index = state.redis
        if owner.intake_is_watching:
            return None
        if not self._terms.can_reach_redis(owner) or index is None:
            return state.in_doubt(who)
        if not owner.expects(index) and self._terms.keeps(Rule.REMOVAL_POSITIONS):
            return state.in_doubt(who)
        if index.requests > owner.requests and self._terms.keeps(Rule.AHEAD):
            owner = owner._replace(ahead=0)
        watching = owner._replace(step=Step.REMOVE, is_connected=True, watched=index)
        return state.with_owner(who, watching)

    def _remove(self, state: State, who: int, owner: Owner) -> State:
        assert owner.watched is not None
        seen, index = owner.watched, state.redis
        if not self._terms.can_reach_redis(owner):
            return state.in_doubt(who)
        has_changed = index is None or (index.receipts, index.holder) != (
            seen.receipts,
            seen.holder,
        )
        if has_changed and self._terms.watches(owner):
            return state.with_owner(who, owner._replace(step=Step.WATCH, watched=None))
        if index is not None:
            index = self._terms.settled(index, seen, owner.batch, owner.end)
            index = index._replace(ignored=index.ignored & ~owner.telling)
            mark = state.log[owner.end - 1].mark if owner.end <= len(state.log) else None
            state = state.with_index(index if mark is None else _without_old(index, mark))
        owner = owner._replace(
            is_connected=True, watched=None, requests=seen.requests, receipts=owner.end, telling=0
        )
        if self._terms.keeps(Rule.COMMIT_FIRST):
            return state.with_owner(who, _idle(owner))
        return state.with_owner(who, owner._replace(step=Step.COMMIT))


def _without_old(index: Index, mark: Mark) -> Index:
    """A request below a mark has ended, or was carried to a later record."""
    moved, ended = (at if at >= mark.requests else NOWHERE for at in (index.moved, index.ended))
    return index._replace(moved=moved, ended=ended)


def _begin_with_ahead(owner: Owner) -> Owner:
    return owner._replace(
        step=Step.PRODUCE, batch=owner.ahead, ended=owner.ahead_ended, ahead=0, ahead_ended=0
    )


def _idle(owner: Owner) -> Owner:
    return owner._replace(step=Step.DUE, batch=0, ended=0, dead=0, end=0)
