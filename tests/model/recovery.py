"""The third verb, R1 to R5: a shard is opened."""

from __future__ import annotations

from itertools import pairwise

from tests.model.journals import outcomes
from tests.model.state import Index, Owner, Receipt, Record, State, Step
from tests.model.terms import Rule, Terms


class Recovery:
    """The steps of an owner that opens the shard. One gives the state after it; None: not its own."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.do = {
            Step.CONFIRM: self._confirm,
            Step.FENCE: self._fence,
            Step.WITNESS: self._witness,
            Step.BARRIER: self._barrier,
            Step.APPLY: self._apply,
            Step.CATCH_UP: self._catch_up,
        }
        order = [Step.CONFIRM, Step.FENCE, Step.WITNESS, Step.BARRIER]
        if not terms.keeps(Rule.FENCE_FIRST):
            order[1:3] = [Step.WITNESS, Step.FENCE]
        self._next = dict(pairwise(order))

    def _confirm(self, state: State, who: int, owner: Owner) -> State | None:
        if state.group != who:
            return None
        return state.with_owner(
            who, owner._replace(step=self._next[Step.CONFIRM], is_connected=True)
        )

    def _fence(self, state: State, who: int, owner: Owner) -> State:
        state = state._replace(fence=who)
        return state.with_owner(who, owner._replace(step=self._next[Step.FENCE]))

    def _witness(self, state: State, who: int, owner: Owner) -> State:
        if owner.is_again:
            doubtful = state.log[owner.end :]
        elif self._terms.can_reach_redis(owner):
            index = state.redis or Index()
            state = state.with_index(index)
            owner = owner._replace(
                is_connected=True, requests=index.requests, receipts=index.receipts
            )
            doubtful = state.log[index.receipts :][-1:]
        else:
            return state.in_doubt(who)
        missing = owner.missing
        for receipt in doubtful if self._terms.keeps(Rule.WITNESS) else ():
            missing |= receipt.lost
        step = Step.BARRIER if owner.is_again else self._next[Step.WITNESS]
        return state.with_owner(who, owner._replace(step=step, end=len(state.log), missing=missing))

    def _barrier(self, state: State, who: int, owner: Owner) -> State:
        if not self._terms.keeps(Rule.BARRIER):
            return state.with_owner(who, owner._replace(step=Step.APPLY))
        if self._terms.is_fenced(state, who):
            return state.in_doubt(who)
        barrier = Receipt(void=owner.missing if self._terms.keeps(Rule.VOID) else 0)
        state = state._replace(log=(*state.log, barrier))
        if len(state.log) > owner.end + 1 and self._terms.keeps(Rule.BETWEEN):
            return state.with_owner(who, owner._replace(step=Step.WITNESS, is_again=True))
        return state.with_owner(
            who, owner._replace(step=Step.APPLY, end=len(state.log), is_again=False)
        )

    def _apply(self, state: State, who: int, owner: Owner) -> State:
        """Up to the next receipt that ends something, as if it filled a chunk."""
        index = state.redis
        if not self._terms.can_reach_redis(owner) or index is None or not owner.expects(index):
            return state.in_doubt(who)
        ended, label = 0, owner.end
        for at, found in enumerate(outcomes(state.log[owner.receipts : owner.end]), 1):
            ended = found & ~owner.missing
            if ended:
                label = owner.receipts + at
                break
        state = state.with_index(self._terms.settled(index, index, ended, label))
        owner = owner._replace(is_connected=True, requests=index.requests, receipts=label)
        if label == owner.end:
            owner = self._read_on(owner._replace(missing=0), state.written)
        return state.with_owner(who, owner)

    def _catch_up(self, state: State, who: int, owner: Owner) -> State:
        index, start = state.redis, owner.requests
        if not self._terms.keeps(Rule.POSITION):
            start = self._first_record(start, owner.end)
        if not self._terms.can_reach_redis(owner) or index is None or index.requests < start:
            return state.in_doubt(who)
        if index.requests == start:
            state = self._terms.stored(state, index, index, start, start + 1)
        owner = owner._replace(is_connected=True, requests=max(start + 1, index.requests))
        return state.with_owner(who, self._read_on(owner, owner.end))

    def _first_record(self, start: int, end: int) -> int:
        there = (at for at in range(start, end) if self._terms.records[at] is not Record.GAP)
        return next(there, start)

    def _read_on(self, owner: Owner, end: int) -> Owner:
        if owner.requests < end and self._terms.keeps(Rule.CATCH_UP):
            return owner._replace(step=Step.CATCH_UP, end=end)
        return owner._replace(step=Step.DUE, position=owner.requests, end=0)
