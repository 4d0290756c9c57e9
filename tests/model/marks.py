"""The low-water mark: determined by a walk, W1 to W3, recorded in a receipt, used for trimming."""

from __future__ import annotations

from collections.abc import Iterator

from blackbox.core.plan import Positions
from tests.model.journals import marks_in, of_kind
from tests.model.state import (
    NOWHERE,
    Index,
    Mark,
    Owner,
    Receipt,
    Record,
    State,
    Step,
    Walk,
    below,
    members,
)
from tests.model.terms import Rule, Terms


class Marks:
    """The steps of an owner's walk, beside its dispatch, and of trimming.

    A walk reads an index in parts, in any order: of the entries those at even offsets and those at
    odd ones, and the cold tier.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        even, odd = mask_of(terms, 0), mask_of(terms, 1)
        has_cold = of_kind(terms.records, (Record.COLD,))
        self._parts = [(even, 0), (odd, 0), *([(0, ~0)] if has_cold else [])]

    def walk(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        """The possible next steps of a walk."""
        owner = state.owners[who]
        walk = owner.walk
        if walk is None:
            if state.walks and self._may_begin(state, owner):
                yield "W1 begins a walk", self._begin(state, who, owner)
        elif walk.todo:
            for part in members(walk.todo):
                yield f"W2 reads part {part}", self._read(state, who, owner, walk, part)
        elif walk.verdicts_below == NOWHERE:
            yield "W3 reads V and what did not count", self._finish(state, who, owner, walk)
        elif owner.step is Step.DUE and not owner.ahead:
            yield "W3 commits what it found", self._commit(state, who, owner, walk)

    def trim(self, state: State) -> Iterator[tuple[str, State]]:
        """Any mark is a fact about the journals, regardless of its writer."""
        starts = state.starts
        found = set(marks_in(state))
        if not self._terms.keeps(Rule.COMMITTED):
            walks = [owner.walk for owner in state.owners if owner.walk is not None]
            found |= {self._mark(state, walk) for walk in walks if walk.verdicts_below != NOWHERE}
        for mark in sorted(found):
            if mark.requests > starts.requests:
                trimmed = Positions(mark.requests, starts.receipts)
                yield f"requests are trimmed below {mark.requests}", state._replace(starts=trimmed)
            if mark.receipts > starts.receipts:
                trimmed = Positions(starts.requests, mark.receipts)
                yield f"receipts are trimmed below {mark.receipts}", state._replace(starts=trimmed)

    def _may_begin(self, state: State, owner: Owner) -> bool:
        index = state.redis
        if owner.position == NOWHERE or not owner.is_connected or index is None:
            return False
        if not owner.expects(index):
            return False
        if index.early and self._terms.keeps(Rule.EARLY_READ):
            return False
        is_read = not index.skip and index.requests >= index.verdicts_below
        return is_read or not self._terms.keeps(Rule.CAUGHT_UP)

    def _begin(self, state: State, who: int, owner: Owner) -> State:
        index = state.redis
        assert index is not None
        walk = Walk(index.requests, index.receipts, below(len(self._parts)), index.requests)
        if not self._terms.keeps(Rule.VERDICTS_LAST):
            walk = walk._replace(verdicts_below=index.requests, ignored=index.ignored)
        if not self._terms.keeps(Rule.POSITIONS_FIRST):
            walk = walk._replace(low=len(self._terms.records))
        state = state._replace(walks=state.walks - 1)
        return state.with_owner(who, owner._replace(walk=walk))

    def _read(self, state: State, who: int, owner: Owner, walk: Walk, part: int) -> State:
        index = state.redis
        if index is None or not self._is_sound(who, walk, index):
            return state.with_owner(who, owner._replace(walk=None))
        hot, cold = self._parts[part]
        seen = members(index.entries & hot | index.cold & cold)
        low = min([walk.low, *seen]) if self._terms.keeps(Rule.PENDING) else walk.low
        walk = walk._replace(todo=walk.todo & ~(1 << part), low=low, is_connected=True)
        return state.with_owner(who, owner._replace(walk=walk))

    def _is_sound(self, who: int, walk: Walk, index: Index) -> bool:
        keeps = self._terms.keeps
        return (
            (walk.is_connected or not keeps(Rule.CONNECTION))
            and (index.token == who or not keeps(Rule.TOKEN))
            and (
                (index.requests >= walk.requests and index.receipts >= walk.receipts)
                or not keeps(Rule.POSITIONS)
            )
        )

    def _finish(self, state: State, who: int, owner: Owner, walk: Walk) -> State:
        index = state.redis
        if index is None or not self._is_sound(who, walk, index):
            return state.with_owner(who, owner._replace(walk=None))
        walk = walk._replace(verdicts_below=index.requests, ignored=index.ignored)
        if not self._terms.keeps(Rule.POSITIONS_FIRST):
            low = min(walk.low, index.requests)
            walk = walk._replace(requests=index.requests, receipts=index.receipts, low=low)
        return state.with_owner(who, owner._replace(walk=walk))

    def _commit(self, state: State, who: int, owner: Owner, walk: Walk) -> State:
        """First a receipt with the ignored records; then another one with the mark."""
        if self._terms.is_fenced(state, who):
            return state.in_doubt(who)
        if walk.ignored and self._terms.keeps(Rule.TELLING):
            receipt = Receipt(ignored=walk.ignored)
            owner = owner._replace(walk=walk._replace(ignored=0), telling=walk.ignored)
        else:
            receipt = Receipt(mark=self._mark(state, walk))
            owner = owner._replace(walk=None)
        log = (*state.log, receipt)
        owner = owner._replace(step=Step.WATCH, end=len(log))
        return state._replace(log=log).with_owner(who, owner)

    def _mark(self, state: State, walk: Walk) -> Mark:
        last = next(marks_in(state), Mark(0, 0, 0))
        pairs = (*last.pairs, (walk.requests, walk.receipts))
        usable = [r for q, r in pairs if q <= walk.low or not self._terms.keeps(Rule.PAIRS)]
        verdicts_below = walk.verdicts_below if self._terms.keeps(Rule.VERDICTS) else walk.low
        return Mark(walk.low, max([last.receipts, *usable]), verdicts_below, pairs)


def mask_of(terms: Terms, remainder: int) -> int:
    """The offsets that are even, or odd."""
    return sum(1 << at for at in range(remainder, len(terms.records), 2))
