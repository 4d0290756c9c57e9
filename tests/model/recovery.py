"""The third verb, R1 to R5: a shard is opened."""

from __future__ import annotations

from itertools import pairwise

from tests.model.journals import (
    CARRIED,
    NAMED_BY,
    REPLACES,
    WITH_CALLER_ID,
    marks_in,
    outcomes,
    union,
)
from tests.model.state import NOBODY, Index, Mark, Owner, Receipt, Record, State, Step, below
from tests.model.terms import Rule, Terms


class Recovery:
    """The steps of an owner that opens the shard. Each returns the state after it; None: the shard is not its own."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.do = {
            Step.CONFIRM: self._confirm,
            Step.FENCE: self._fence,
            Step.WITNESS: self._witness,
            Step.BARRIER: self._barrier,
            Step.BEGIN: self._begin,
            Step.REBUILD: self._rebuild,
            Step.FINISH: self._finish,
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
            owner = self._look(state, owner)
            doubtful = state.log[owner.receipts :][-1:]
        else:
            return state.in_doubt(who)
        missing = owner.missing
        for receipt in doubtful if self._terms.keeps(Rule.WITNESS) else ():
            missing |= receipt.lost
        step = Step.BARRIER if owner.is_again else self._next[Step.WITNESS]
        return state.with_owner(who, owner._replace(step=step, end=len(state.log), missing=missing))

    def _look(self, state: State, owner: Owner) -> Owner:
        """The positions of the index; or where a lost one starts."""
        index, base = state.redis, self._usable(state)
        is_behind = index is not None and base is not None and self._is_behind(state, index)
        if index is None or is_behind:
            base = base or Mark(*state.starts, 0)
            return owner._replace(
                is_connected=True, requests=base.requests, receipts=base.receipts, base=base
            )
        return owner._replace(is_connected=True, requests=index.requests, receipts=index.receipts)

    def _usable(self, state: State) -> Mark | None:
        """The newest mark that lies below neither journal's start."""
        requests, receipts = state.starts
        for mark in marks_in(state):
            is_below = mark.requests < requests or mark.receipts < receipts
            if not is_below or not self._terms.keeps(Rule.USABLE):
                return mark
        return None

    def _is_behind(self, state: State, index: Index) -> bool:
        is_behind = index.requests < state.starts.requests or index.receipts < state.starts.receipts
        return is_behind and self._terms.keeps(Rule.BELOW_START)

    def _barrier(self, state: State, who: int, owner: Owner) -> State:
        index = state.redis
        is_unfinished = index is not None and index.rebuild != NOBODY
        step = Step.BEGIN if owner.base is not None or is_unfinished else Step.APPLY
        if not self._terms.keeps(Rule.BARRIER):
            return state.with_owner(who, owner._replace(step=step))
        if self._terms.is_fenced(state, who):
            return state.in_doubt(who)
        barrier = Receipt(void=owner.missing if self._terms.keeps(Rule.VOID) else 0)
        state = state._replace(log=(*state.log, barrier))
        if len(state.log) > owner.end + 1 and self._terms.keeps(Rule.BETWEEN):
            return state.with_owner(who, owner._replace(step=Step.WITNESS, is_again=True))
        return state.with_owner(who, owner._replace(step=step, end=len(state.log), is_again=False))

    def _begin(self, state: State, who: int, owner: Owner) -> State:
        """O1 and O2: the index is started, or another owner's rebuild is continued."""
        index, base = state.redis, owner.base
        is_lost = index is None or self._is_behind(state, index)
        if not self._terms.can_reach_redis(owner) or is_lost != (base is not None):
            return state.in_doubt(who)
        if owner.receipts < state.starts.receipts and self._terms.keeps(Rule.BELOW_START):
            return state.in_doubt(who)
        read = state.log[max(owner.receipts, state.starts.receipts) : owner.end]
        gone = union(iter(outcomes(state.log)[owner.end - len(read) : owner.end])) & ~owner.missing
        if base is not None:
            begun = self._begun(base, union(one.ignored for one in read))
        elif index is not None and owner.expects(index) and index.rebuild != NOBODY:
            begun = self._adopted(index, gone)
        else:
            return state.in_doubt(who)
        if not self._terms.keeps(Rule.STAYS):
            begun = begun._replace(receipts=owner.end)
        state = state.with_index(
            begun._replace(token=self._terms.token(who), rebuild=who, in_flight=0)
        )
        owner = owner._replace(
            is_connected=True, requests=begun.requests, gone=gone, base=None, missing=0
        )
        return state.with_owner(who, self._rebuild_on(owner, state))

    def _adopted(self, index: Index, gone: int) -> Index:
        """Without requests that ended since the rebuild: Redis may have been rolled back to before its end."""
        if not self._terms.keeps(Rule.ADOPTED):
            return index
        return self._terms.settled(index, index, gone & below(index.requests), index.receipts)

    def _begun(self, base: Mark, ignored: int) -> Index:
        if not self._terms.keeps(Rule.TOLD_FIRST):
            ignored = 0
        return Index(
            base.requests,
            base.receipts,
            known_from=base.requests,
            verdicts_below=base.verdicts_below,
            ignored=ignored,
        )

    def _rebuild(self, state: State, who: int, owner: Owner) -> State:
        index, start = state.redis, owner.requests
        if not self._can_rebuild(index, who, owner) or start < state.starts.requests:
            return state.in_doubt(who)
        assert index is not None
        if index.requests == start:
            seen = index._replace(skip=index.skip | owner.gone)
            state = self._terms.stored(state, index, seen, start, start + 1)
        owner = owner._replace(is_connected=True, requests=max(start + 1, index.requests))
        return state.with_owner(who, self._rebuild_on(owner, state))

    def _rebuild_on(self, owner: Owner, state: State) -> Owner:
        is_read = owner.requests >= state.written
        return owner._replace(step=Step.FINISH if is_read else Step.REBUILD)

    def _finish(self, state: State, who: int, owner: Owner) -> State:
        index = state.redis
        if not self._can_rebuild(index, who, owner):
            return state.in_doubt(who)
        assert index is not None
        skip = owner.gone & ~below(index.requests) if self._terms.keeps(Rule.GONE_SKIP) else 0
        done = index._replace(receipts=owner.end, skip=index.skip | skip, rebuild=NOBODY)
        owner = owner._replace(
            is_connected=True, requests=index.requests, receipts=owner.end, gone=0
        )
        return state.with_index(done).with_owner(who, self._read_on(owner, state.written))

    def _can_rebuild(self, index: Index | None, who: int, owner: Owner) -> bool:
        if not self._terms.can_reach_redis(owner) or index is None:
            return False
        is_mine = index.rebuild == who or not self._terms.keeps(Rule.REBUILDER)
        return is_mine and index.rebuild != NOBODY and index.requests >= owner.requests

    def full(self, state: State, who: int) -> State | None:
        """Redis has no room for the next request: the shard opens with a backlog left in Kafka."""
        owner, index = state.owners[who], state.redis
        if owner.step not in (Step.REBUILD, Step.CATCH_UP) or not owner.is_connected:
            return None
        if owner.step is Step.REBUILD:
            state = self._finish(state, who, owner)
            owner, index = state.owners[who], state.redis
        if index is None or owner.step is not Step.CATCH_UP or not owner.expects(index):
            return None
        for at in range(index.requests, state.written):
            index = self._end_ahead(index, at)
        state = state.with_index(index)
        opened = owner._replace(step=Step.DUE, position=index.requests, end=0)
        return state.with_owner(who, opened)

    def _end_ahead(self, index: Index, at: int) -> Index:
        """The requests that a request in Kafka ends."""
        record = self._terms.records[at]
        if record in REPLACES:
            named = 1 << NAMED_BY[record]
            if not index.entries & ~index.letters & named or not self._terms.keeps(Rule.EARLY):
                return index
            early = 1 << at if self._terms.keeps(Rule.EARLY_COUNTS) else 0
            index = self._terms.settled(index, index, named, index.receipts)
            return index._replace(early=index.early | early)
        ends = record is Record.CANCEL or (record in WITH_CALLER_ID and record not in CARRIED)
        if ends and index.holder != NOBODY and index.entries >> index.holder & 1:
            return self._terms.settled(index, index, 1 << index.holder, index.receipts)
        return index

    def _apply(self, state: State, who: int, owner: Owner) -> State:
        """Up to the next receipt that ends something, as if it filled a chunk."""
        index = state.redis
        if not self._terms.can_reach_redis(owner) or index is None or not owner.expects(index):
            return state.in_doubt(who)
        start = owner.receipts
        if start < state.starts.receipts:
            if self._terms.keeps(Rule.BELOW_START):
                return state.in_doubt(who)
            start = min(state.starts.receipts, owner.end)
        ended, position = 0, owner.end
        for at, found in enumerate(outcomes(state.log[start : owner.end]), 1):
            ended = found & ~owner.missing
            if ended:
                position = start + at
                break
        settled = self._terms.settled(index, index, ended, position)
        state = state.with_index(settled._replace(token=self._terms.token(who)))
        owner = owner._replace(is_connected=True, requests=index.requests, receipts=position)
        if position == owner.end:
            owner = self._read_on(owner._replace(missing=0), state.written)
        return state.with_owner(who, owner)

    def _catch_up(self, state: State, who: int, owner: Owner) -> State:
        index, start = state.redis, owner.requests
        if not self._terms.keeps(Rule.POSITION):
            start = self._first_record(start, owner.end)
        if not self._terms.can_reach_redis(owner) or index is None or index.requests < start:
            return state.in_doubt(who)
        if index.rebuild != NOBODY and self._terms.keeps(Rule.WAITS):
            return state.in_doubt(who)
        if start < state.starts.requests:
            return self._jump(state, who, owner, index)
        if index.requests == start:
            state = self._terms.stored(state, index, index, start, start + 1)
        owner = owner._replace(is_connected=True, requests=max(start + 1, index.requests))
        return state.with_owner(who, self._read_on(owner, owner.end))

    def _jump(self, state: State, who: int, owner: Owner, index: Index) -> State:
        """Mistakes that no owner should make."""
        if self._terms.keeps(Rule.BELOW_START):
            return state.in_doubt(who)
        start = min(state.starts.requests, owner.end)
        state = state.with_index(index._replace(requests=max(index.requests, start)))
        owner = owner._replace(is_connected=True, requests=start)
        return state.with_owner(who, self._read_on(owner, owner.end))

    def _first_record(self, start: int, end: int) -> int:
        there = (at for at in range(start, end) if self._terms.records[at] is not Record.GAP)
        return next(there, start)

    def _read_on(self, owner: Owner, end: int) -> Owner:
        if owner.requests < end and self._terms.keeps(Rule.CATCH_UP):
            return owner._replace(step=Step.CATCH_UP, end=end)
        return owner._replace(step=Step.DUE, position=owner.requests, end=0)
