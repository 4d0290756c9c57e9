"""One shard as a machine of small steps: two owners, and around them callers, the clock and faults.

Between any two steps of an owner everybody else may act. What is left out, and why:

- An owner in doubt gives up all it holds and opens the shard anew. A crash leaves it there too, and
  so does a lost reply: a crash after a step is that step without its reply. A command that is still
  under way when its owner gave up is what a zombie does.
- An entry and its payload come and go in one MULTI: here they are one.
- A receipt enters the log when it is committed. Until then its transaction is open, from D2 to D4 of
  its owner; a fence or a crash is what aborts it. The gap it would leave in the offsets is left out.
- One caller id is enough to cancel and to replace. There is no cold tier, no retention, no target
  that cannot take messages, and no delivery at least once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.model.dispatch import Dispatch
from tests.model.intake import Intake
from tests.model.journals import Records, defined, delivered_in, ended_in, requests_of
from tests.model.recovery import Recovery
from tests.model.state import (
    CLOSED,
    NOBODY,
    NOWHERE,
    Owner,
    Receipt,
    State,
    Step,
    below,
    described,
    members,
)
from tests.model.terms import Rule, Terms

NAMES = "AB"


class Story(NamedTuple):
    """What callers write, in this order; the most that one batch delivers."""

    records: Records
    limit: int = 100


class Model:
    """The states of a shard, from one to the next, and what is promised of each.

    `faults` is how many there may be of: a crash, another owner, a Redis that goes back or is
    emptied, a torn transaction. `without` are the rules that owners do not keep to.
    """

    def __init__(self, story: Story, faults: int, without: frozenset[Rule] = frozenset()) -> None:
        self._records = story.records
        self._faults = faults
        self._terms = Terms(story.records, story.limit, without)
        self._intake = Intake(self._terms)
        self._main = Dispatch(self._terms).do | Recovery(self._terms).do
        self._requests = requests_of(story.records)
        self._names = {(who, step): f"{NAMES[who]}: {step}" for who in (0, 1) for step in Step}

    def start(self) -> State:
        """Nothing was ever asked; the shard is A's, who has not opened it."""
        return State(0, 0, 0, (), NOBODY, None, (), 0, (CLOSED, CLOSED), self._faults)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """All that may happen next: what it is called, and the state after it."""
        for who in (0, 1):
            yield from self._owner(state, who)
        if state.written < len(self._records):
            yield (
                f"a caller writes {self._records[state.written]}",
                state._replace(written=state.written + 1),
            )
        for request in members(self._asked(state) & ~state.due):
            yield f"request {request} becomes due", state._replace(due=state.due | 1 << request)
        if state.faults:
            yield from _failing_owners(state)
            yield from _failing_redis(state)
            yield from self._torn(state)

    def calm(self, state: State) -> tuple[str, State] | None:
        """What the shard's owner does next when all else stands still; None: it is at rest."""
        return next(self._owner(state, state.group), None)

    def broken(self, state: State) -> str | None:
        """What was promised to callers and consumers, and is broken."""
        seen = 0
        for receipt in state.log:
            arrived = receipt.delivered & ~receipt.lost
            if arrived & seen:
                return f"{members(arrived & seen)} delivered twice"
            if arrived & receipt.ended:
                return f"{members(arrived & receipt.ended)} delivered though ended before"
            seen |= arrived
        return f"{members(seen & ~state.due)} delivered early" if seen & ~state.due else None

    def untrue(self, state: State) -> str | None:
        """What the labels stand for, if the index holds something else."""
        index = state.redis
        if index is None:
            return None
        expected = defined(self._records, state.log, index.requests, index.receipts)
        return None if index == expected else f"the labels stand for {described(expected)}"

    def unsettled(self, state: State) -> str | None:
        """What is lost, once the shard's owner is at rest."""
        waiting = self._asked(state) & ~ended_in(self._records[: state.written])
        if lost := waiting & state.due & ~delivered_in(state.log):
            return f"{members(lost)} never delivered"
        entries = 0 if state.redis is None else state.redis.entries
        if lost := waiting & ~state.due & ~entries:
            return f"{members(lost)} not pending"
        is_open = state.owners[state.group].position != NOWHERE
        return None if is_open else "the shard does not open"

    def _owner(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        owner = state.owners[who]
        main = owner.step, self._main[owner.step](state, who, owner)
        for step, after in (self._intake.next(state, who), main):
            if after is not None and after != state:
                yield self._names[who, step], after

    def _asked(self, state: State) -> int:
        return self._requests & below(state.written)

    def _torn(self, state: State) -> Iterator[tuple[str, State]]:
        for who, owner in enumerate(state.owners):
            if owner.step is Step.COMMIT and not self._terms.is_fenced(state, who):
                for lost in _parts(owner.batch):
                    torn = Receipt(owner.batch, lost=lost, ended=owner.ended)
                    yield (
                        f"{NAMES[who]}: D4 tears, the receipt is there and {members(lost)} not",
                        state._replace(log=(*state.log, torn)).in_doubt(who).after_a_fault(),
                    )


def _failing_owners(state: State) -> Iterator[tuple[str, State]]:
    """A zombie that crashes is one that does nothing more: only the shard's owner does."""
    who, other = state.group, 1 - state.group
    after = state.after_a_fault()
    if state.owners[who] != CLOSED:
        yield f"{NAMES[who]} crashes", after.in_doubt(who)
    yield f"the group gives the shard to {NAMES[other]}", after._replace(group=other)


def _failing_redis(state: State) -> Iterator[tuple[str, State]]:
    after = state.after_a_fault()
    a, b = state.owners
    cut_off = a._replace(is_connected=False), b._replace(is_connected=False)
    for at, index in enumerate(state.past):
        if index != state.redis:
            yield (
                f"Redis restarts as it was, {described(index)}",
                after._replace(redis=index, past=after.past[:at], owners=cut_off),
            )
    if state.redis is not None:
        past = (*after.past, state.redis) if after.faults else ()
        noticing = _touched(a), _touched(b)
        yield "Redis is emptied (FLUSHALL)", after._replace(redis=None, past=past, owners=noticing)


def _touched(owner: Owner) -> Owner:
    """Every key that it watches has changed: at its EXEC it has to look again."""
    step = Step.WATCH if owner.step is Step.REMOVE else owner.step
    return owner._replace(step=step, watched=None)


def _parts(offsets: int) -> Iterator[int]:
    """Every part of a set but the empty one."""
    part = offsets
    while part:
        yield part
        part = (part - 1) & offsets
