"""One shard as a machine of small steps: its two journals, its index, two owners, and what can fail.

What an owner does next is a `Step`, one for each numbered step of the three verbs. Between any two
steps the other owner, a caller, the clock or a fault may act. What the model leaves out:

- an owner that is in doubt gives up all it holds and opens the shard anew. A crash leaves it
  there too, and so does a reply that is lost: `crashes` after a step is the step without its reply;
- an entry and its payload come and go in one MULTI: here they are one;
- a receipt enters the log when it is committed. Until then its transaction is where its owner is
  (open from D2 to D4), or nowhere, which is aborted. The gap it leaves is left out;
- one caller id, which is enough to cancel and to replace;
- a time is not a number: a request is due, or it is not yet.

Which requests a batch puts and ends, and which receipts are void, is asked of the product itself
(`blackbox.plan.resolve`, `blackbox.receipt.settled`). Sets of requests are bit masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from blackbox import receipt as product
from blackbox.plan import Change, Labels, View, resolve
from blackbox.request import Cancel, Request

NOWHERE = -1
NOBODY = -1


class Record(StrEnum):
    """A record of the request topic. The named ones share the caller id."""

    REQUEST = "a request"
    NAMED = "a named request"
    CANCEL = "a cancel"
    GAP = "a gap"


class Rule(StrEnum):
    """What the verbs keep to; the model can do without any of them."""

    DUE_ONLY = "D1 takes only what is due"
    DUE_LABELS = "D1 compares the labels with those last seen"
    COMMIT_FIRST = "D5 removes after the commit, not before"
    REMOVAL_LABELS = "D5 compares the labels with those last seen"
    POSITION = "a batch begins at the position it was read from, not at its first record"
    INTAKE_LABEL = "I2 stops when the label is below the batch"
    NO_RECONNECT = "a lost connection to Redis is a doubt, not connected again in silence"
    WATCH = "EXEC does nothing when a watched key has changed"
    SHARD_ID = "the transactional.id is the shard's, not the process's"
    FENCE_FIRST = "R1 fences before R2 looks at receipts"
    BETWEEN = "R3 looks for receipts that came before its barrier"
    WITNESS = "R2 looks whether the messages of the last receipt are there"
    VOID = "R3 records what R2 did not find"
    BARRIER = "R3 commits a barrier"
    SKIP = "removals of requests that are not read yet are kept in skip"
    CATCH_UP = "R5 reads the requests to their end before anything is delivered"
    AHEAD = "a batch that was read ahead is dropped when intake has removed something since"


class Step(StrEnum):
    """What an owner does next, and what of the code does it."""

    CONFIRM = "R1 asks the group (confirm)"
    FENCE = "R1 fences earlier owners (Writer.open)"
    WITNESS = "R2 reads the labels and looks at the last receipt (journal.missing)"
    BARRIER = "R3 commits a barrier (commit_barrier)"
    APPLY = "R4 applies receipts up to the next that ends something (settle)"
    CATCH_UP = "R5 takes in the next request below the journal's end (apply)"
    DUE = "D1 reads the labels and what is due (ShardIndex.due)"
    PRODUCE = "D2 begins a transaction, produces and flushes (begin, send, flush)"
    RECEIPT = "D3 produces the receipt (Writer.commit)"
    COMMIT = "D4 commits (Transactions.commit)"
    WATCH = "D5 watches and compares the labels (settle)"
    REMOVE = "D5 removes, and moves the label receipts (EXEC)"


READ = "I1 reads a batch (RequestReader.read)"
LOOK = "I2 watches and compares the label (ShardIndex.store)"
STORE = "I3 stores the batch, and moves the label requests (EXEC)"


class Index(NamedTuple):
    """A shard in Redis: the two labels, and what they define."""

    requests: int = 0
    receipts: int = 0
    entries: int = 0
    holder: int = NOBODY
    skip: int = 0


class Receipt(NamedTuple):
    """A committed receipt. `lost` are messages that it names and that were aborted.

    `ended` are messages whose request was cancelled or replaced before its dispatch began.
    """

    delivered: int = 0
    void: int = 0
    lost: int = 0
    ended: int = 0


class Owner(NamedTuple):
    """What an owner has in memory.

    requests, receipts -- the labels it last saw
    position, taking   -- where its reader is, if the shard is open; the batch that was read
    watched            -- the index as intake or D5 saw it at its WATCH
    batch, ended       -- what it delivers; what of that was ended before it began
    ahead, ahead_ended -- the batch after that, read at D2; what intake has ended of it since
    end                -- how far it has looked: at receipts until R4, at requests in R5; in
                          dispatch, the label that its receipt reaches
    missing, is_again  -- what R2 did not find; whether R2 comes round again
    """

    step: Step = Step.CONFIRM
    is_connected: bool = False
    requests: int = 0
    receipts: int = 0
    position: int = NOWHERE
    taking: tuple[int, int] | None = None
    watched: Index | None = None
    batch: int = 0
    ended: int = 0
    ahead: int = 0
    ahead_ended: int = 0
    end: int = 0
    missing: int = 0
    is_again: bool = False

    @property
    def intake_is_watching(self) -> bool:
        """Intake and dispatch share a connection, one at a time."""
        return self.watched is not None and self.step is not Step.REMOVE


CLOSED = Owner()


class State(NamedTuple):
    """Everything: what is in Kafka, in Redis, with the group, and in the owners' memories.

    written -- how many request records there are
    due     -- requests whose time has come
    taken   -- how far requests were ever taken in
    log     -- the receipts; what consumers of the targets see follows from it
    fence   -- whose producer has the transactional.id
    index   -- None: Redis is empty
    past    -- what Redis may go back to, oldest first
    group   -- whose shard it is
    faults  -- how many there may still be
    """

    written: int
    due: int
    taken: int
    log: tuple[Receipt, ...]
    fence: int
    index: Index | None
    past: tuple[Index | None, ...]
    group: int
    owners: tuple[Owner, Owner]
    faults: int


class Model:
    """The steps of a shard whose callers write `records`, without one of the rules if so asked."""

    def __init__(
        self,
        records: tuple[Record, ...],
        faults: int,
        *,
        limit: int | None = None,
        without: tuple[Rule, ...] = (),
    ) -> None:
        self.records = records
        self.faults = faults
        self._limit = len(records) + 1 if limit is None else limit
        self._without = frozenset(without)
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
        order = [Step.CONFIRM, Step.FENCE, Step.WITNESS, Step.BARRIER, Step.APPLY, Step.CATCH_UP]
        if Rule.FENCE_FIRST in self._without:
            order[1:3] = [Step.WITNESS, Step.FENCE]
        self._after = dict(zip(order, order[1:], strict=False))
        self._are_requests = _mask(
            at for at, r in enumerate(records) if r in (Record.REQUEST, Record.NAMED)
        )
        self._names = {
            (who, what): f"{'AB'[who]}: {what}" for who in (0, 1) for what in (*Step, READ, LOOK, STORE)
        }

    def start(self) -> State:
        """Nothing was ever asked; the shard is A's, who has not opened it."""
        return State(0, 0, 0, (), NOBODY, None, (), 0, (CLOSED, CLOSED), self.faults)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """What may happen next: what it is called, and the state after it."""
        for who in (0, 1):
            owner = state.owners[who]
            for what, after in (self._intake(state, who), self._main(state, who)):
                if after is not None and after != state:
                    yield self._names[who, what], after
            if state.faults and owner.step is Step.COMMIT and state.fence == who:
                yield from self._tear(state, who, owner)
        yield from self._world(state)

    def calm(self, state: State) -> tuple[str, State] | None:
        """What the shard's owner does next when all else stands still; None: it has come to rest."""
        who = state.group
        for what, after in (self._intake(state, who), self._main(state, who)):
            if after is not None and after != state:
                return self._names[who, what], after
        return None

    def _main(self, state: State, who: int) -> tuple[str, State | None]:
        owner = state.owners[who]
        return owner.step, self._do[owner.step](state, who, owner)

    # the world

    def _world(self, state: State) -> Iterator[tuple[str, State]]:
        if state.written < len(self.records):
            record = self.records[state.written]
            yield f"a caller writes {record}", state._replace(written=state.written + 1)
        coming = self._are_requests & _below(state.written) & ~state.due
        for request in members(coming):
            yield f"request {request} becomes due", state._replace(due=state.due | 1 << request)
        if state.faults:
            yield from self._faults(state)

    def _faults(self, state: State) -> Iterator[tuple[str, State]]:
        left = state.faults - 1
        known = state.past if left else ()
        now = state._replace(faults=left, past=known)
        if state.owners[state.group].step is not Step.CONFIRM:
            who = state.group
            yield f"{'AB'[who]} crashes", now._replace(owners=_with(state, who, CLOSED))
        yield f"the group gives the shard to {'BA'[state.group]}", now._replace(group=1 - state.group)
        for at, index in enumerate(state.past):
            if index != state.index:
                a, b = (_disconnected(owner) for owner in state.owners)
                yield (
                    f"Redis fails and comes back as it was, at {described(index)}",
                    now._replace(index=index, past=known[:at], owners=(a, b)),
                )
        if state.index is not None:
            a, b = (_unwatching(owner) for owner in state.owners)
            past = (*known, state.index) if left else ()
            yield "Redis is emptied (FLUSHALL)", now._replace(index=None, past=past, owners=(a, b))

    def _tear(self, state: State, who: int, owner: Owner) -> Iterator[tuple[str, State]]:
        left = state.faults - 1
        for lost in _parts(owner.batch):
            torn = Receipt(owner.batch, lost=lost, ended=owner.ended & ~lost)
            yield (
                f"{'AB'[who]}: D4 tears: the receipt is there, {members(lost)} are not",
                state._replace(
                    log=(*state.log, torn),
                    owners=_with(state, who, CLOSED),
                    faults=left,
                    past=state.past if left else (),
                ),
            )

    # intake

    def _intake(self, state: State, who: int) -> tuple[str, State | None]:
        owner = state.owners[who]
        if owner.position == NOWHERE:
            return READ, None
        if owner.taking is None:
            return READ, self._read(state, who, owner)
        if owner.watched is None:
            return LOOK, self._look(state, who, owner)
        return STORE, self._store(state, who, owner) if owner.intake_is_watching else None

    def _read(self, state: State, who: int, owner: Owner) -> State | None:
        there = [
            at for at in range(owner.position, state.written) if self.records[at] is not Record.GAP
        ]
        if not there:
            return None
        start = owner.position if self._keeps(Rule.POSITION) else there[0]
        end = there[-1] + 1
        return _now(state, who, owner._replace(position=end, taking=(start, end)))

    def _look(self, state: State, who: int, owner: Owner) -> State:
        assert owner.taking is not None
        start, end = owner.taking
        if not self._can_reach_redis(owner) or state.index is None:
            return _doubt(state, who)
        label = state.index.requests
        if label < start and self._keeps(Rule.INTAKE_LABEL):
            return _doubt(state, who)
        if label >= end:
            seen = max(owner.requests, label)
            return _now(state, who, owner._replace(taking=None, requests=seen))
        return _now(state, who, owner._replace(is_connected=True, watched=state.index))

    def _store(self, state: State, who: int, owner: Owner) -> State:
        assert owner.taking is not None
        assert owner.watched is not None
        if not self._can_reach_redis(owner):
            return _doubt(state, who)
        seen, index = owner.watched, state.index
        if self._watches(owner) and (
            index is None or (index.requests, index.skip) != (seen.requests, seen.skip)
        ):
            return _now(state, who, owner._replace(watched=None))
        start, end = owner.taking
        done = owner._replace(is_connected=True, watched=None, taking=None, requests=end)
        if owner.ahead:
            _, ended, _ = _plan(self.records, seen.requests, seen.skip, seen.holder, start, end)
            if ended and self._keeps(Rule.AHEAD):
                done = done._replace(ahead=0)
            else:
                done = done._replace(ahead_ended=owner.ahead_ended | owner.ahead & ended)
        if index is None:
            return _now(state, who, done)  # one label alone is none
        return _put(_now(state, who, done), self._taken_in(index, seen, start, end))

    def _taken_in(self, index: Index, seen: Index, start: int, end: int) -> Index:
        puts, removals, holder = _plan(self.records, seen.requests, seen.skip, seen.holder, start, end)
        return Index(
            requests=end,
            receipts=index.receipts,
            entries=(index.entries | puts) & ~removals,
            holder=holder if holder != seen.holder else index.holder,
            skip=index.skip & ~_below(end),
        )

    # dispatch

    def _read_due(self, state: State, who: int, owner: Owner) -> State | None:
        if owner.ahead:
            began = owner._replace(
                step=Step.PRODUCE, batch=owner.ahead, ended=owner.ahead_ended, ahead=0, ahead_ended=0
            )
            return _now(state, who, began)
        if owner.intake_is_watching:
            return None
        if not self._can_reach_redis(owner):
            return _doubt(state, who)
        index = state.index
        if not _is_expected(index, owner):
            if self._keeps(Rule.DUE_LABELS):
                return _doubt(state, who)
            index = index or Index(owner.requests, owner.receipts)
        assert index is not None
        due = self._first(index.entries & (state.due if self._keeps(Rule.DUE_ONLY) else ~0))
        step = Step.PRODUCE if due else Step.DUE
        began = owner._replace(
            step=step,
            is_connected=True,
            requests=index.requests,
            batch=due,
            ended=due & self._ended_by(state.taken),
        )
        return _now(state, who, began)

    def _first(self, due: int, passing_over: int = 0) -> int:
        """What is looked at of that; the later a request was written, the earlier it is due here."""
        after = passing_over.bit_count()
        looked_at = members(due)[::-1][after : after + self._limit]
        return _mask(at for at in looked_at if not passing_over >> at & 1)

    def _produce(self, state: State, who: int, owner: Owner) -> State | None:
        if self._is_fenced(state, who):
            return _doubt(state, who)
        owner = owner._replace(step=Step.RECEIPT)
        if owner.batch.bit_count() < self._limit:
            return _now(state, who, owner)
        if owner.intake_is_watching:
            return None
        if not self._can_reach_redis(owner) or not _is_expected(state.index, owner):
            return _doubt(state, who)
        assert state.index is not None
        ahead = self._first(state.index.entries & state.due, owner.batch)
        owner = owner._replace(is_connected=True, ahead=ahead, requests=state.index.requests)
        return _now(state, who, owner)

    def _produce_receipt(self, state: State, who: int, owner: Owner) -> State:
        if self._is_fenced(state, who):
            return _doubt(state, who)
        step = Step.COMMIT if self._keeps(Rule.COMMIT_FIRST) else Step.WATCH
        return _now(state, who, owner._replace(step=step, end=len(state.log) + 1))

    def _commit(self, state: State, who: int, owner: Owner) -> State:
        if self._is_fenced(state, who):
            return _doubt(state, who)
        log = (*state.log, Receipt(owner.batch, ended=owner.ended))
        after = owner._replace(step=Step.WATCH, end=len(log))
        if not self._keeps(Rule.COMMIT_FIRST):
            after = owner._replace(step=Step.DUE, batch=0, ended=0, end=0)
        return _now(state._replace(log=log), who, after)

    def _watch(self, state: State, who: int, owner: Owner) -> State | None:
        if owner.intake_is_watching:
            return None
        if not self._can_reach_redis(owner) or state.index is None:
            return _doubt(state, who)
        if not _is_expected(state.index, owner) and self._keeps(Rule.REMOVAL_LABELS):
            return _doubt(state, who)
        watching = owner._replace(step=Step.REMOVE, is_connected=True, watched=state.index)
        if state.index.requests > owner.requests and self._keeps(Rule.AHEAD):
            watching = watching._replace(ahead=0)
        return _now(state, who, watching)

    def _remove(self, state: State, who: int, owner: Owner) -> State:
        if not self._can_reach_redis(owner):
            return _doubt(state, who)
        seen, index = owner.watched, state.index
        if seen is None or (
            self._watches(owner)
            and (
                index is None or (index.receipts, index.holder) != (seen.receipts, seen.holder)
            )
        ):
            return _now(state, who, owner._replace(step=Step.WATCH, watched=None))
        done = owner._replace(
            step=Step.DUE if self._keeps(Rule.COMMIT_FIRST) else Step.COMMIT,
            is_connected=True,
            watched=None,
            requests=seen.requests,
            receipts=owner.end,
        )
        if self._keeps(Rule.COMMIT_FIRST):
            done = done._replace(batch=0, ended=0, end=0)
        if index is None:
            return _now(state, who, done)  # one label alone is none
        return _put(_now(state, who, done), self._settled(index, seen, owner.batch, owner.end))

    def _settled(self, index: Index, seen: Index, ended: int, label: int) -> Index:
        here = ended & _below(seen.requests)
        holds = seen.holder != NOBODY and ended >> seen.holder & 1
        return Index(
            requests=index.requests,
            receipts=label,
            entries=index.entries & ~here,
            holder=NOBODY if holds else index.holder,
            skip=index.skip | (ended & ~here if self._keeps(Rule.SKIP) else 0),
        )

    # recovery

    def _confirm(self, state: State, who: int, owner: Owner) -> State | None:
        if state.group != who:
            return None
        return _now(state, who, owner._replace(step=self._after[Step.CONFIRM], is_connected=True))

    def _fence(self, state: State, who: int, owner: Owner) -> State:
        fenced = state._replace(fence=who)
        return _now(fenced, who, owner._replace(step=self._after[Step.FENCE]))

    def _witness(self, state: State, who: int, owner: Owner) -> State:
        if not owner.is_again:
            if not self._can_reach_redis(owner):
                return _doubt(state, who)
            if state.index is None:
                state = _put(state, Index())
            assert state.index is not None
            owner = owner._replace(
                is_connected=True, requests=state.index.requests, receipts=state.index.receipts
            )
        doubtful = state.log[owner.end :] if owner.is_again else state.log[owner.receipts :][-1:]
        missing = 0
        if self._keeps(Rule.WITNESS):
            for receipt in doubtful:
                missing |= receipt.lost
        looked = owner._replace(
            step=Step.BARRIER if owner.is_again else self._after[Step.WITNESS],
            end=len(state.log),
            missing=owner.missing | missing,
        )
        return _now(state, who, looked)

    def _barrier(self, state: State, who: int, owner: Owner) -> State:
        if not self._keeps(Rule.BARRIER):
            return _now(state, who, owner._replace(step=Step.APPLY))
        if self._is_fenced(state, who):
            return _doubt(state, who)
        log = (*state.log, Receipt(void=owner.missing if self._keeps(Rule.VOID) else 0))
        state = state._replace(log=log)
        if len(log) > owner.end + 1 and self._keeps(Rule.BETWEEN):
            return _now(state, who, owner._replace(step=Step.WITNESS, is_again=True))
        return _now(state, who, owner._replace(step=Step.APPLY, end=len(log), is_again=False))

    def _apply(self, state: State, who: int, owner: Owner) -> State:
        index = state.index
        if not self._can_reach_redis(owner) or not _is_expected(index, owner):
            return _doubt(state, who)
        assert index is not None
        known = owner.missing  # once the void is recorded, it says nothing new
        ended, label = 0, owner.end
        for at, outcomes in enumerate(_outcomes(state.log[owner.receipts : owner.end])):
            if outcomes & ~known:
                ended, label = outcomes & ~known, owner.receipts + at + 1
                break
        state = _put(state, self._settled(index, index, ended, label))
        owner = owner._replace(is_connected=True, requests=index.requests, receipts=label)
        if label < owner.end:
            return _now(state, who, owner)
        if not self._keeps(Rule.CATCH_UP):
            return _now(state, who, _opened(owner))
        return _now(state, who, _reading_on(owner._replace(missing=0), state.written))

    def _catch_up(self, state: State, who: int, owner: Owner) -> State:
        index = state.index
        start, end = self._next_batch(owner.requests, owner.end)
        if not self._can_reach_redis(owner) or index is None or index.requests < start:
            return _doubt(state, who)
        if index.requests < end:
            state = _put(state, self._taken_in(index, index, start, end))
        reached = max(end, index.requests)
        owner = owner._replace(is_connected=True, requests=reached)
        return _now(state, who, _reading_on(owner, owner.end))

    def _next_batch(self, start: int, end: int) -> tuple[int, int]:
        if self._keeps(Rule.POSITION):
            return start, start + 1
        first = next((at for at in range(start, end) if self.records[at] is not Record.GAP), start)
        return first, first + 1

    # what the steps share

    def _keeps(self, rule: Rule) -> bool:
        return rule not in self._without

    def _is_fenced(self, state: State, who: int) -> bool:
        return state.fence != who and self._keeps(Rule.SHARD_ID)

    def _can_reach_redis(self, owner: Owner) -> bool:
        return owner.is_connected or not self._keeps(Rule.NO_RECONNECT)

    def _watches(self, owner: Owner) -> bool:
        """A WATCH ends with the connection it was sent over."""
        return owner.is_connected and self._keeps(Rule.WATCH)

    def _ended_by(self, taken: int) -> int:
        return _ended(self.records, taken)

    # what is promised

    def broken(self, state: State) -> str | None:
        """Which promise this state breaks, if any."""
        seen = 0
        for receipt in state.log:
            arrived = receipt.delivered & ~receipt.lost
            if arrived & seen:
                return f"{members(arrived & seen)} delivered twice"
            if arrived & receipt.ended:
                return f"{members(arrived & receipt.ended)} delivered though ended before"
            seen |= arrived
        if seen & ~state.due:
            return f"{members(seen & ~state.due)} delivered before due"
        return None

    def untrue(self, state: State) -> str | None:
        """What the index should hold by its labels, if it holds something else."""
        index = state.index
        if index is None:
            return None
        defined = _defined(self.records, state.log, index.requests, index.receipts)
        return None if index == defined else f"the labels stand for {described(defined)}"

    def unsettled(self, state: State) -> str | None:
        """What is wrong, if anything, when the shard's owner has come to rest."""
        if state.owners[state.group].position == NOWHERE or state.index is None:
            return "the shard is not open"
        delivered = 0
        for receipt in state.log:
            delivered |= receipt.delivered & ~receipt.lost
        ended = self._ended_by(state.written)
        asked = self._are_requests & _below(state.written)
        if lost := asked & state.due & ~delivered & ~ended:
            return f"{members(lost)} never delivered"
        if lost := asked & ~state.due & ~ended & ~state.index.entries:
            return f"{members(lost)} not pending"
        return None


def members(mask: int) -> list[int]:
    return [at for at in range(mask.bit_length()) if mask >> at & 1]


def described(index: Index | None) -> str:
    """An index in one line."""
    if index is None:
        return "nothing"
    held = "" if index.holder == NOBODY else f" name→{index.holder}"
    skip = f" skip {members(index.skip)}" if index.skip else ""
    return f"({index.requests}, {index.receipts}) {members(index.entries)}{held}{skip}"


def _mask(offsets: Iterable[int]) -> int:
    return sum(1 << offset for offset in offsets)


def _below(offset: int) -> int:
    return (1 << offset) - 1


def _parts(mask: int) -> Iterator[int]:
    """Every part of a set but the empty one."""
    part = mask
    while part:
        yield part
        part = (part - 1) & mask


def _with(state: State, who: int, owner: Owner) -> tuple[Owner, Owner]:
    return (owner, state.owners[1]) if who == 0 else (state.owners[0], owner)


def _now(state: State, who: int, owner: Owner) -> State:
    return state._replace(owners=_with(state, who, owner))


def _doubt(state: State, who: int) -> State:
    return _now(state, who, CLOSED)


def _put(state: State, index: Index) -> State:
    past = (*state.past, state.index) if state.faults and index != state.index else state.past
    return state._replace(index=index, past=past, taken=max(state.taken, index.requests))


def _disconnected(owner: Owner) -> Owner:
    return owner._replace(is_connected=False)


def _unwatching(owner: Owner) -> Owner:
    """Every key changed."""
    step = Step.WATCH if owner.step is Step.REMOVE else owner.step
    return owner._replace(step=step, watched=None)


def _is_expected(index: Index | None, owner: Owner) -> bool:
    return (
        index is not None
        and index.receipts == owner.receipts
        and index.requests >= owner.requests
    )


def _reading_on(owner: Owner, end: int) -> Owner:
    if owner.requests < end:
        return owner._replace(step=Step.CATCH_UP, end=end)
    return _opened(owner)


def _opened(owner: Owner) -> Owner:
    return owner._replace(step=Step.DUE, position=owner.requests, end=0, missing=0)


@lru_cache(maxsize=None)
def _plan(
    records: tuple[Record, ...], label: int, skip: int, holder: int, start: int, end: int
) -> tuple[int, int, int]:
    """What a batch puts, what it ends, and who holds the caller id then."""
    changes = [
        (at, asked) for at in range(start, end) if (asked := _asked(records[at])) is not None
    ]
    holders = {} if holder == NOBODY else {"name": holder}
    plan = resolve(changes, View(Labels(label, 0), members(skip), holders))
    held = plan.holders.get("name")
    return (
        _mask(iter(plan.puts)),
        _mask(iter(set(plan.removals))),
        NOBODY if held is None else held,
    )


def _asked(record: Record) -> Change | None:
    if record is Record.GAP:
        return None
    if record is Record.CANCEL:
        return Cancel("name")
    caller_id = "name" if record is Record.NAMED else None
    return Request("orders", b"", 0, None, [], None, caller_id, None)


@lru_cache(maxsize=None)
def _outcomes(log: tuple[Receipt, ...]) -> tuple[int, ...]:
    """What each receipt ends, as a reader of all of them judges."""
    receipts = [
        product.Receipt(0, dead=members(receipt.delivered), void=members(receipt.void))
        for receipt in log
    ]
    return tuple(_mask(r.removals()) for _, r in product.settled(enumerate(receipts)))


@lru_cache(maxsize=None)
def _ended(records: tuple[Record, ...], label: int) -> int:
    """The requests below a label that a later record below it cancels or replaces."""
    named = [
        at for at, r in enumerate(records[:label]) if r in (Record.NAMED, Record.CANCEL)
    ]
    return _mask(iter(named[:-1]))


@lru_cache(maxsize=None)
def _defined(
    records: tuple[Record, ...], log: tuple[Receipt, ...], requests: int, receipts: int
) -> Index:
    removed = 0
    for outcomes in _outcomes(log)[:receipts]:
        removed |= outcomes
    asked = _mask(
        at for at, r in enumerate(records[:requests]) if r in (Record.REQUEST, Record.NAMED)
    )
    entries = asked & ~_ended(records, requests) & ~removed
    holder = max(
        (at for at in members(entries) if records[at] is Record.NAMED), default=NOBODY
    )
    return Index(requests, receipts, entries, holder, removed & ~_below(requests))
