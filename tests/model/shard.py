"""One shard as a machine of small steps: two owners, and around them callers, the clock and faults.

Between any two steps of an owner all others may act. What is not modelled, and why:

- An owner that must recover forgets everything and opens the shard again. A crash has the same effect, and
  so has a lost reply: a crash after a step is that step without its reply. A command that is still
  running when its owner starts over is an action of a frozen owner.
- An entry and its payload are written and removed in one MULTI: here they are one.
- A receipt enters the log when it is committed. Until then its transaction is open, from D2 to D4 of
  its owner. A fence or a crash aborts it. The gap in the offsets is not modelled.
- One caller id is enough to cancel and to replace. Any due request may be carried at any time, or
  not; promotion itself is not modelled, nor are retention by others and targets that refuse messages.
- At-least-once delivery must only lose nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from tests.model.dispatch import Dispatch
from tests.model.intake import Intake
from tests.model.journals import (
    CARRIED,
    REPLACES,
    UNCONDITIONAL,
    Records,
    defined,
    delivered_in,
    of_kind,
    origins,
    outcomes,
    standing,
    union,
)
from tests.model.marks import Marks
from tests.model.recovery import Recovery
from tests.model.state import (
    CLOSED,
    NOBODY,
    NOWHERE,
    Index,
    Owner,
    Receipt,
    State,
    Step,
    below,
    described,
    mask,
    members,
)
from tests.model.terms import Rule, Terms

NAMES = "AB"


_AT_ONCE = (Step.FENCE, Step.WITNESS, Step.BARRIER, Step.PRODUCE, Step.RECEIPT, Step.REMOVE)


class Fault(StrEnum):
    """Faults of owners, of Redis, and of a transaction."""

    CRASH = "an owner crashes"
    GROUP = "the group gives the shard to another owner"
    BACK = "Redis restarts as it once was"
    EMPTY = "Redis is emptied"
    FULL = "Redis has no room for the next request while a shard is opened"
    TORN = "the receipt of a transaction is there, and not all of its messages"


class Story(NamedTuple):
    """The records that callers write, in this order, and the largest batch of a delivery.

    `kinds` are the faults that there may be. With `walks` the shard is open at the start, and steps between which nothing is written are
    taken at once. Stories without have them one by one, but a rebuild at once.
    """

    records: Records
    limit: int = 100
    walks: int = 0
    is_apart: bool = False
    is_once: bool = True
    kinds: tuple[Fault, ...] = tuple(Fault)


class Model:
    """The states of a shard, the steps between them, and the guarantees in each state.

    `faults` is how many there may be of: a crash, another owner, a Redis that is rolled back, is emptied
    or is full, a torn transaction. `without` are the rules that owners do not follow.
    """

    def __init__(self, story: Story, faults: int, without: frozenset[Rule] = frozenset()) -> None:
        self._story = story
        self._records = story.records
        self._faults = faults
        self._terms = Terms(
            story.records, story.limit, without, story.is_apart, story.is_once, story.walks > 0
        )
        self._intake = Intake(self._terms)
        self._recovery = Recovery(self._terms)
        self._main = Dispatch(self._terms).do | self._recovery.do
        self._marks = Marks(self._terms)
        self._requests = of_kind(story.records, (*UNCONDITIONAL, *REPLACES))
        self._carried = of_kind(story.records, CARRIED)
        self._replaces = of_kind(story.records, REPLACES)
        self._failing = {
            Fault.CRASH: _crashed,
            Fault.GROUP: _given_away,
            Fault.BACK: _gone_back,
            Fault.EMPTY: _emptied,
            Fault.FULL: self._full,
            Fault.TORN: self._torn,
        }
        self._names = {(who, step): f"{NAMES[who]}: {step}" for who in (0, 1) for step in Step}

    def start(self) -> State:
        """No requests exist. The shard belongs to A, which has opened it only if there are walks."""
        owners = CLOSED, CLOSED
        does_go_back = Fault.BACK in self._story.kinds
        state = State(
            0, 0, 0, (), NOBODY, None, (), 0, owners, self._faults, does_go_back=does_go_back
        )
        while self._story.walks and state.owners[0].position == NOWHERE:
            _, state = next(self._owner(state, 0))
        return state._replace(past=(), walks=self._story.walks)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """All possible next steps: the name of each, and the state after it."""
        for who in (0, 1):
            yield from self._owner(state, who)
            for name, after in self._marks.walk(state, who):
                yield f"{NAMES[who]}: {name}", after
        yield from self._marks.trim(state)
        if state.written < len(self._records):
            yield (
                f"a caller writes {self._records[state.written]}",
                state._replace(written=state.written + 1),
            )
        for request in members(self._requests & below(state.written) & ~state.due):
            alike = self._alike(request)
            yield f"request {request} becomes due", state._replace(due=state.due | alike)
        if state.faults:
            for kind in self._story.kinds:
                yield from self._failing[kind](state)

    def calm(self, state: State) -> tuple[str, State] | None:
        """The next step of the shard's owner if nothing else happens; None: it is idle."""
        return next(self._owner(state, state.group), None)

    def broken(self, state: State) -> str | None:
        """A violated guarantee to callers or consumers."""
        if not self._story.is_once:
            return None
        seen = 0
        for receipt in state.log:
            arrived = receipt.delivered & ~receipt.lost
            asked = origins(self._records, arrived)
            if asked & seen or asked.bit_count() < arrived.bit_count():
                return f"{members(arrived)} delivered twice"
            if arrived & receipt.ended:
                return f"{members(arrived & receipt.ended)} delivered though ended before"
            if early := arrived & ~state.due & ~receipt.dead:
                return f"{members(early)} delivered early"
            if wrong := arrived & self._replaces & (receipt.dead ^ ~state.counted):
                return f"{members(wrong)} was in time, and is dead, or the other way round"
            seen |= asked
        return None

    def untrue(self, state: State) -> str | None:
        """The index that the positions define, if the actual one differs."""
        index = state.redis
        if index is None or not self._story.is_once:
            return None
        is_rebuilt = index.rebuild != NOBODY
        known = ~below(index.known_from) if index.requests < index.verdicts_below else ~0
        if is_rebuilt:
            known &= ~union(iter(outcomes(state.log)[index.receipts :]))
        expected = defined(self._records, state.log, state.counted, index.requests, index.receipts)
        if Fault.FULL in self._story.kinds:
            known &= ~self._ended_ahead(state, index, expected.entries & ~index.entries)
        if index.ended != NOWHERE:  # cold ones stay until they are written again
            known &= ~mask(at for at in members(index.cold) if origins(self._records, 1 << at) == 1)
        compared = known, not is_rebuilt
        if _compared(index, *compared) == _compared(expected, *compared):
            return None
        return f"the positions stand for {described(expected)}"

    def _ended_ahead(self, state: State, index: Index, offsets: int) -> int:
        """Requests ended by a record that Redis has no room for."""
        left = standing(self._records[: state.written], state.counted | index.early)
        return offsets & ~left.hot

    def unsettled(self, state: State) -> str | None:
        """The lost requests, after the shard's owner has become idle."""
        hot, cold, letters, _ = standing(self._records[: state.written], state.counted)
        delivered = delivered_in(state.log)
        if lost := hot & (state.due | letters) & ~delivered:
            return f"{members(lost)} never delivered"
        index = state.redis or Index()
        if lost := (hot | cold) & ~delivered & ~(index.entries | index.cold):
            return f"{members(lost)} not pending"
        is_open = state.owners[state.group].position != NOWHERE
        return None if is_open else "the shard does not open"

    def _owner(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        owner = state.owners[who]
        if self._terms.is_apart and (apart := self._intake.apart(state)) is not None:
            yield f"{Step.APART}", apart
        intake, after = self._intake.next(state, who)
        while self._story.walks and after is not None and after.owners[who].taking is not None:
            _, more = self._intake.next(after, who)
            if more is None:
                break
            after = more
        main = self._main[owner.step](state, who, owner)
        at_once = _AT_ONCE if self._story.walks else (Step.REBUILD, Step.FINISH)
        while main is not None and main.owners[who].step in at_once:
            more = self._main[main.owners[who].step](main, who, main.owners[who])
            if more is None:
                break
            main = more
        for step, found in ((intake, after), (owner.step, main)):
            if found is not None and found != state:
                yield self._names[who, step], found

    def _alike(self, request: int) -> int:
        """The request with the records that carry it."""
        carried = (at for at in members(self._carried))
        return 1 << request | sum(
            1 << at for at in carried if origins(self._records, 1 << at) == 1 << request
        )

    def _torn(self, state: State) -> Iterator[tuple[str, State]]:
        for who, owner in enumerate(state.owners):
            if owner.step is Step.COMMIT and not self._terms.is_fenced(state, who):
                for lost in _parts(owner.batch):
                    torn = Receipt(owner.batch, lost=lost, ended=owner.ended, dead=owner.dead)
                    yield (
                        f"{NAMES[who]}: D4 tears, the receipt is there and {members(lost)} not",
                        state._replace(log=(*state.log, torn)).in_doubt(who).after_a_fault(),
                    )

    def _full(self, state: State) -> Iterator[tuple[str, State]]:
        for who in (0, 1) if self._story.walks else ():
            opened = self._recovery.full(state, who)
            if opened is not None:
                yield f"{NAMES[who]}: Redis is full, opens", opened.after_a_fault()


def _compared(index: Index, known: int, has_skip: bool) -> tuple[int, ...]:
    held = (index.entries | index.cold) & known
    holder = index.holder if index.holder != NOBODY and held >> index.holder & 1 else NOBODY
    skip = index.skip if has_skip else 0
    return index.entries & known, index.cold & known, index.letters & known, holder, skip


def _crashed(state: State) -> Iterator[tuple[str, State]]:
    """A frozen former owner never crashes: that equals doing nothing. Only the shard's owner crashes."""
    if state.owners[state.group] != CLOSED:
        yield f"{NAMES[state.group]} crashes", state.after_a_fault().in_doubt(state.group)


def _given_away(state: State) -> Iterator[tuple[str, State]]:
    other = 1 - state.group
    yield (
        f"the group gives the shard to {NAMES[other]}",
        state.after_a_fault()._replace(group=other),
    )


def _gone_back(state: State) -> Iterator[tuple[str, State]]:
    after = state.after_a_fault()
    a, b = state.owners
    for at, index in enumerate(state.past):
        if index != state.redis:
            yield (
                f"Redis restarts as it was, {described(index)}",
                after._replace(
                    redis=index, past=after.past[:at], owners=(_cut_off(a), _cut_off(b))
                ),
            )


def _emptied(state: State) -> Iterator[tuple[str, State]]:
    after = state.after_a_fault()
    a, b = state.owners
    if state.redis is not None:
        past = (*after.past, state.redis) if after.faults else ()
        noticing = _touched(a), _touched(b)
        yield "Redis is emptied (FLUSHALL)", after._replace(redis=None, past=past, owners=noticing)


def _touched(owner: Owner) -> Owner:
    """Every key that it watches has changed: its EXEC fails and it reads again."""
    step = Step.WATCH if owner.step is Step.REMOVE else owner.step
    return owner._replace(step=step, watched=None)


def _cut_off(owner: Owner) -> Owner:
    walk = None if owner.walk is None else owner.walk._replace(is_connected=False)
    return owner._replace(is_connected=False, walk=walk)


def _parts(offsets: int) -> Iterator[int]:
    """Every non-empty subset."""
    part = offsets
    while part:
        yield part
        part = (part - 1) & offsets
