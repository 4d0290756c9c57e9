"""What an owner does: the numbered steps of the three verbs, and the rules that they keep to."""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise

from tests.model.journals import Records, ended_in, outcomes, planned
from tests.model.state import (
    NOBODY,
    NOWHERE,
    Index,
    Owner,
    Receipt,
    Record,
    State,
    Step,
    below,
    mask,
    members,
)


class Rule(StrEnum):
    """What the verbs keep to. They can be told to do without."""

    POSITION = "a batch begins where it was read from, not at its first record"
    INTAKE_LABEL = "I2 stops when the label is below the batch"
    ONE_MULTI = "I3 moves the label in one MULTI with the entries"
    DUE_ONLY = "D1 takes only what is due"
    DUE_LABELS = "D1 compares the labels with those last seen"
    AHEAD = "a batch read ahead is dropped when intake has removed something since"
    COMMIT_FIRST = "D5 removes after the commit, not before"
    REMOVAL_LABELS = "D5 compares the labels with those last seen"
    WATCH = "EXEC does nothing when a watched key has changed"
    NO_RECONNECT = "a lost connection to Redis is a doubt, not connected again in silence"
    SHARD_ID = "the transactional.id is the shard's, not the process's"
    FENCE_FIRST = "R1 fences before R2 looks at receipts"
    WITNESS = "R2 looks whether the messages of the last receipt are there"
    BARRIER = "R3 commits a barrier"
    VOID = "R3 records what R2 did not find"
    BETWEEN = "R4 goes round again when a receipt came in before the barrier"
    SKIP = "R4 keeps removals of requests that are not read yet in skip"
    CATCH_UP = "R5 reads the requests to their end before anything is delivered"


class Verbs:
    """The steps of an owner of a shard whose request topic holds `records`.

    Each takes a state and gives the state after it; None when it cannot be done now. `limit` is
    the most that one batch delivers.
    """

    def __init__(self, records: Records, limit: int, without: frozenset[Rule]) -> None:
        self._records = records
        self._limit = limit
        self._without = without
        self._do = {
            Step.CONFIRM: self._confirm,
            Step.FENCE: self._fence,
            Step.WITNESS: self._witness,
            Step.BARRIER: self._barrier,
            Step.APPLY: self._apply,
            Step.CATCH_UP: self._catch_up,
            Step.DUE: self._read_due,
            Step.PRODUCE: self._produce,
            Step.RECEIPT: self._produce_receipt,
            Step.COMMIT: self._commit,
            Step.WATCH: self._watch,
            Step.REMOVE: self._remove,
        }
        order = [Step.CONFIRM, Step.FENCE, Step.WITNESS, Step.BARRIER]
        if Rule.FENCE_FIRST in without:
            order[1:3] = [Step.WITNESS, Step.FENCE]
        self._next = dict(pairwise(order))

    def main(self, state: State, who: int) -> tuple[Step, State | None]:
        """The next step of recovery or dispatch."""
        owner = state.owners[who]
        return owner.step, self._do[owner.step](state, who, owner)

    def intake(self, state: State, who: int) -> tuple[Step, State | None]:
        """The next step of intake."""
        owner = state.owners[who]
        if owner.taking is None:
            return Step.READ, self._read(state, who, owner)
        if owner.watched is None:
            return Step.LOOK, self._look(state, who, owner)
        return Step.STORE, self._store(state, who, owner) if owner.intake_is_watching else None

    def is_fenced(self, state: State, who: int) -> bool:
        return state.fence != who and self._keeps(Rule.SHARD_ID)

    def _keeps(self, rule: Rule) -> bool:
        return rule not in self._without

    def _can_reach_redis(self, owner: Owner) -> bool:
        return owner.is_connected or not self._keeps(Rule.NO_RECONNECT)

    def _watches(self, owner: Owner) -> bool:
        """A WATCH ends with the connection it was sent over."""
        return owner.is_connected and self._keeps(Rule.WATCH)

    # intake

    def _read(self, state: State, who: int, owner: Owner) -> State | None:
        start = owner.position
        if start == NOWHERE:
            return None
        there = [at for at in range(start, state.written) if self._records[at] is not Record.GAP]
        if not there:
            return None
        batch = start if self._keeps(Rule.POSITION) else there[0], there[-1] + 1
        return state.with_owner(who, owner._replace(position=batch[1], taking=batch))

    def _look(self, state: State, who: int, owner: Owner) -> State:
        assert owner.taking is not None
        start, end = owner.taking
        index = state.redis
        if not self._can_reach_redis(owner) or index is None:
            return state.in_doubt(who)
        if index.requests < start and self._keeps(Rule.INTAKE_LABEL):
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
        if not self._can_reach_redis(owner):
            return state.in_doubt(who)
        has_changed = index is None or (index.requests, index.skip) != (seen.requests, seen.skip)
        if has_changed and self._watches(owner):
            return state.with_owner(who, owner._replace(watched=None))
        owner = owner._replace(is_connected=True, watched=None, taking=None, requests=end)
        if owner.ahead:
            _, ended, _ = planned(self._records, seen, start, end)
            owner = self._without_ended(owner, ended)
        state = state.with_owner(who, owner)
        return state if index is None else self._stored(state, index, seen, start, end)

    def _without_ended(self, owner: Owner, ended: int) -> Owner:
        if ended and self._keeps(Rule.AHEAD):
            return owner._replace(ahead=0)
        return owner._replace(ahead_ended=owner.ahead_ended | (owner.ahead & ended))

    def _stored(self, state: State, index: Index, seen: Index, start: int, end: int) -> State:
        puts, ended, holder = planned(self._records, seen, start, end)
        if not self._keeps(Rule.ONE_MULTI):
            state = state.with_index(index._replace(requests=end))
        return state.with_index(
            Index(
                requests=end,
                receipts=index.receipts,
                entries=(index.entries | puts) & ~ended,
                holder=holder if holder != seen.holder else index.holder,
                skip=index.skip & ~below(end),
            )
        )

    # dispatch

    def _read_due(self, state: State, who: int, owner: Owner) -> State | None:
        index = state.redis
        if owner.ahead:
            return state.with_owner(who, _begin_with_ahead(owner))
        if owner.intake_is_watching:
            return None
        if not self._can_reach_redis(owner):
            return state.in_doubt(who)
        if not owner.expects(index) and self._keeps(Rule.DUE_LABELS):
            return state.in_doubt(who)
        if index is None:
            return state.with_owner(who, owner._replace(is_connected=True))
        due = index.entries & (state.due if self._keeps(Rule.DUE_ONLY) else ~0)
        batch = self._first(due)
        began = owner._replace(
            step=Step.PRODUCE if batch else Step.DUE,
            is_connected=True,
            requests=index.requests,
            batch=batch,
            ended=batch & ended_in(self._records[: state.taken]),
        )
        return state.with_owner(who, began)

    def _first(self, due: int, passing_over: int = 0) -> int:
        """A batch of it; the later a request was written, the earlier it was due."""
        after = passing_over.bit_count()
        return mask(members(due)[::-1][after : after + self._limit]) & ~passing_over

    def _produce(self, state: State, who: int, owner: Owner) -> State | None:
        if self.is_fenced(state, who):
            return state.in_doubt(who)
        if owner.batch.bit_count() == self._limit:
            return self._read_ahead(state, who, owner)
        return state.with_owner(who, owner._replace(step=Step.RECEIPT))

    def _read_ahead(self, state: State, who: int, owner: Owner) -> State | None:
        index = state.redis
        if owner.intake_is_watching:
            return None
        if not self._can_reach_redis(owner) or index is None or not owner.expects(index):
            return state.in_doubt(who)
        ahead = self._first(index.entries & state.due, passing_over=owner.batch)
        return state.with_owner(
            who,
            owner._replace(
                step=Step.RECEIPT, is_connected=True, requests=index.requests, ahead=ahead
            ),
        )

    def _produce_receipt(self, state: State, who: int, owner: Owner) -> State:
        if self.is_fenced(state, who):
            return state.in_doubt(who)
        step = Step.COMMIT if self._keeps(Rule.COMMIT_FIRST) else Step.WATCH
        return state.with_owner(who, owner._replace(step=step, end=len(state.log) + 1))

    def _commit(self, state: State, who: int, owner: Owner) -> State:
        if self.is_fenced(state, who):
            return state.in_doubt(who)
        state = state._replace(log=(*state.log, Receipt(owner.batch, ended=owner.ended)))
        if self._keeps(Rule.COMMIT_FIRST):
            return state.with_owner(who, owner._replace(step=Step.WATCH, end=len(state.log)))
        return state.with_owner(who, _idle(owner))

    def _watch(self, state: State, who: int, owner: Owner) -> State | None:
        index = state.redis
        if owner.intake_is_watching:
            return None
        if not self._can_reach_redis(owner) or index is None:
            return state.in_doubt(who)
        if not owner.expects(index) and self._keeps(Rule.REMOVAL_LABELS):
            return state.in_doubt(who)
        if index.requests > owner.requests and self._keeps(Rule.AHEAD):
            owner = owner._replace(ahead=0)
        watching = owner._replace(step=Step.REMOVE, is_connected=True, watched=index)
        return state.with_owner(who, watching)

    def _remove(self, state: State, who: int, owner: Owner) -> State:
        assert owner.watched is not None
        seen, index = owner.watched, state.redis
        if not self._can_reach_redis(owner):
            return state.in_doubt(who)
        has_changed = index is None or (index.receipts, index.holder) != (
            seen.receipts,
            seen.holder,
        )
        if has_changed and self._watches(owner):
            return state.with_owner(who, owner._replace(step=Step.WATCH, watched=None))
        if index is not None:
            state = state.with_index(self._settled(index, seen, owner.batch, owner.end))
        owner = owner._replace(
            is_connected=True, watched=None, requests=seen.requests, receipts=owner.end
        )
        if self._keeps(Rule.COMMIT_FIRST):
            return state.with_owner(who, _idle(owner))
        return state.with_owner(who, owner._replace(step=Step.COMMIT))

    def _settled(self, index: Index, seen: Index, ended: int, label: int) -> Index:
        """What R4 and D5 make of an index, given what they saw of it at their WATCH."""
        early = ended & ~below(seen.requests)
        is_freed = seen.holder != NOBODY and ended >> seen.holder & 1
        return Index(
            requests=index.requests,
            receipts=label,
            entries=index.entries & ~(ended & ~early),
            holder=NOBODY if is_freed else index.holder,
            skip=index.skip | (early if self._keeps(Rule.SKIP) else 0),
        )

    # recovery

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
        elif self._can_reach_redis(owner):
            index = state.redis or Index()
            state = state.with_index(index)
            owner = owner._replace(
                is_connected=True, requests=index.requests, receipts=index.receipts
            )
            doubtful = state.log[index.receipts :][-1:]
        else:
            return state.in_doubt(who)
        missing = owner.missing
        for receipt in doubtful if self._keeps(Rule.WITNESS) else ():
            missing |= receipt.lost
        step = Step.BARRIER if owner.is_again else self._next[Step.WITNESS]
        return state.with_owner(who, owner._replace(step=step, end=len(state.log), missing=missing))

    def _barrier(self, state: State, who: int, owner: Owner) -> State:
        if not self._keeps(Rule.BARRIER):
            return state.with_owner(who, owner._replace(step=Step.APPLY))
        if self.is_fenced(state, who):
            return state.in_doubt(who)
        barrier = Receipt(void=owner.missing if self._keeps(Rule.VOID) else 0)
        state = state._replace(log=(*state.log, barrier))
        if len(state.log) > owner.end + 1 and self._keeps(Rule.BETWEEN):
            return state.with_owner(who, owner._replace(step=Step.WITNESS, is_again=True))
        return state.with_owner(
            who, owner._replace(step=Step.APPLY, end=len(state.log), is_again=False)
        )

    def _apply(self, state: State, who: int, owner: Owner) -> State:
        """Up to the next receipt that ends something, as if it filled a chunk."""
        index = state.redis
        if not self._can_reach_redis(owner) or index is None or not owner.expects(index):
            return state.in_doubt(who)
        ended, label = 0, owner.end
        for at, found in enumerate(outcomes(state.log[owner.receipts : owner.end]), 1):
            ended = found & ~owner.missing
            if ended:
                label = owner.receipts + at
                break
        state = state.with_index(self._settled(index, index, ended, label))
        owner = owner._replace(is_connected=True, requests=index.requests, receipts=label)
        if label == owner.end:
            owner = self._read_on(owner._replace(missing=0), state.written)
        return state.with_owner(who, owner)

    def _catch_up(self, state: State, who: int, owner: Owner) -> State:
        index, start = state.redis, owner.requests
        if not self._keeps(Rule.POSITION):
            start = self._first_record(start, owner.end)
        if not self._can_reach_redis(owner) or index is None or index.requests < start:
            return state.in_doubt(who)
        if index.requests == start:
            state = self._stored(state, index, index, start, start + 1)
        owner = owner._replace(is_connected=True, requests=max(start + 1, index.requests))
        return state.with_owner(who, self._read_on(owner, owner.end))

    def _first_record(self, start: int, end: int) -> int:
        there = (at for at in range(start, end) if self._records[at] is not Record.GAP)
        return next(there, start)

    def _read_on(self, owner: Owner, end: int) -> Owner:
        if owner.requests < end and self._keeps(Rule.CATCH_UP):
            return owner._replace(step=Step.CATCH_UP, end=end)
        return owner._replace(step=Step.DUE, position=owner.requests, end=0)


def _begin_with_ahead(owner: Owner) -> Owner:
    return owner._replace(
        step=Step.PRODUCE, batch=owner.ahead, ended=owner.ahead_ended, ahead=0, ahead_ended=0
    )


def _idle(owner: Owner) -> Owner:
    return owner._replace(step=Step.DUE, batch=0, ended=0, end=0)
