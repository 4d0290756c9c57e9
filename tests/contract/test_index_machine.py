"""Whatever happens to Redis, an index equals what the journals define.

The model is the definition: the requests below one position without the removals below the other,
with replacements and cancels by caller id, and cancels by id, in journal order. Redis may be emptied or rolled back to an
earlier state at any moment, and both journals may be replayed in any order and in any parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from blackbox.core.bits import SEGMENT
from blackbox.core.interpret import refused_entry
from blackbox.core.plan import Change, Positions
from blackbox.core.settlement import Settlement
from blackbox.index.shard_index import ShardIndex
from blackbox.records.entry import Entry
from blackbox.records.errors import PositionsMoved
from blackbox.records.request import Cancel, Invalid, Reason, offset_in, request_id
from tests.contract.conftest import Backend, histories
from tests.contract.held import GRACE_S, SHARD, Held, held, segments, store, stored
from tests.support.fakes import record

NOW_MS = 100
FIRST_OFFSETS = [0, 3, SEGMENT - 4, SEGMENT - 1, SEGMENT]

due_times = st.integers(-2, 12).map(lambda steps: NOW_MS + 10 * (steps - 5))
caller_ids = st.sampled_from(["a", "b"])
messages = st.binary(max_size=3)
plain = st.builds(lambda message, due_ms: Entry("orders", message, due_ms), messages, due_times)
named = st.builds(lambda entry, name: entry._replace(caller_id=name), plain, caller_ids)
cancels = st.builds(Cancel, caller_ids, id=st.none())
offsets = st.builds(
    lambda first, more: first + more, st.sampled_from(FIRST_OFFSETS), st.integers(0, 12)
)
by_id = st.builds(lambda offset: Cancel(None, request_id(SHARD, offset)), offsets)
invalid = st.just(refused_entry(record(0), Invalid(Reason.NOT_JSON, "not JSON"), NOW_MS))
changes = st.one_of(named, named, cancels, by_id, by_id, plain, invalid, st.none())
batches = st.lists(changes, min_size=3, max_size=9)


@dataclass(frozen=True)
class Content:
    """The content of an index by its definition."""

    entries: dict[int, Entry]
    holders: dict[str, int]
    ahead: set[int]


def content(
    first: int, requests: list[Change | None], positions: Positions, ended: set[int]
) -> Content:
    """The definition of an index, as plain code."""
    entries: dict[int, Entry] = {}
    holders: dict[str, int] = {}
    for offset, change in enumerate(requests[: positions.requests - first], first):
        if change is None:
            continue
        if isinstance(change, Cancel) and change.id is not None:
            asked = offset_in(SHARD, change.id) or 0
            if asked in entries and entries[asked].reason is None:
                caller_id = entries.pop(asked).caller_id
                if holders.get(caller_id or "") == asked:
                    del holders[caller_id or ""]
            continue
        if change.caller_id is not None:
            entries.pop(holders.pop(change.caller_id, -1), None)
        if isinstance(change, Entry) and offset not in ended:
            entries[offset] = change
            if change.caller_id is not None:
                holders[change.caller_id] = offset
    return Content(entries, holders, {offset for offset in ended if offset >= positions.requests})


@dataclass(frozen=True)
class Snapshot:
    """All keys of the shard at one moment, and what was postponed by then."""

    keys: dict[bytes, bytes]
    postpone: dict[int, tuple[int, Entry]]


class IndexMachine(RuleBasedStateMachine):
    """One owner after another changes an index as intake, dispatch and recovery do."""

    backend: Backend

    def __init__(self) -> None:
        super().__init__()
        self.client: Any = self.backend.client
        self.client.flushall()
        self.connections = self.backend.connections()
        self.requests: list[Change | None] = []
        self.receipts: list[list[int]] = []
        self.postpone: dict[int, tuple[int, Entry]] = {}
        self.snapshots: list[Snapshot] = []
        self.zombies: list[ShardIndex] = []
        self.index = self.next_owner()

    def next_owner(self) -> ShardIndex:
        index = ShardIndex(SHARD, self.connections, grace_s=GRACE_S)
        index.load()
        return index

    def teardown(self) -> None:
        for index in (self.index, *self.zombies):
            index.close()
        self.connections.disconnect()

    @initialize(first=st.sampled_from(FIRST_OFFSETS), asked=batches)
    def begin(self, first: int, asked: list[Change | None]) -> None:
        self.first = first
        self.index.begin(Positions(first, 0))
        self.callers_write(asked, are_stored=True)

    @property
    def end(self) -> int:
        return self.first + len(self.requests)

    def has_unread_receipts(self) -> bool:
        return self.index.positions.receipts < len(self.receipts)

    def has_unread_requests(self) -> bool:
        return self.index.positions.requests < self.end

    def can_deliver(self) -> bool:
        return not self.has_unread_receipts() and bool(self.content().entries)

    def content(self) -> Content:
        positions = self.index.positions
        ended = {offset for removed in self.receipts[: positions.receipts] for offset in removed}
        found = content(self.first, self.requests, positions, ended)
        entries = {o: self.postpone.get(o, (0, entry))[1] for o, entry in found.entries.items()}
        return Content(entries, found.holders, found.ahead)

    def due_order(self, entries: dict[int, Entry]) -> list[tuple[int, int]]:
        scores = {o: self.postpone.get(o, (entry.due_ms, entry))[0] for o, entry in entries.items()}
        return sorted((score, offset) for offset, score in scores.items())

    # requests

    @rule(asked=batches, are_stored=st.booleans())
    def callers_write(self, asked: list[Change | None], are_stored: bool) -> None:
        self.requests += asked
        if are_stored:
            self.store(self.index.positions.requests, self.end)

    @precondition(lambda self: self.has_unread_requests())
    @rule(count=st.integers(1, 6), again=st.integers(0, 3))
    def intake_stores_a_batch(self, count: int, again: int) -> None:
        reached = self.index.positions.requests
        start, end = max(self.first, reached - again), min(reached + count, self.end)
        self.store(start, end)

    @precondition(lambda self: self.index.positions.requests > self.first)
    @rule(count=st.integers(1, 4))
    def intake_stores_a_batch_again(self, count: int) -> None:
        end = self.index.positions.requests
        self.store(max(self.first, end - count), end)

    def store(self, start: int, end: int) -> None:
        batch = self.requests[start - self.first : end - self.first]
        offsets = enumerate(batch, start)
        kept = {offset: change for offset, change in offsets if change is not None}
        store(self.index, start, end, kept, NOW_MS)

    # outcomes

    @precondition(lambda self: self.can_deliver())
    @rule(data=st.data(), settles=st.booleans())
    def deliver(self, data: st.DataObject, settles: bool) -> None:
        entries = self.content().entries
        removed = self.some_of(data, entries)
        self.receipts.append(removed)
        if settles:
            self.index.settle(
                Settlement({o: entries[o].caller_id for o in removed}, len(self.receipts))
            )

    @precondition(lambda self: self.can_deliver())
    @rule(data=st.data(), asked=batches)
    def deliver_during_intake(self, data: st.DataObject, asked: list[Change | None]) -> None:
        entries = self.content().entries
        removed = self.some_of(data, entries)
        self.requests += asked
        self.store(self.index.positions.requests, self.end)
        self.receipts.append(removed)
        self.index.settle(
            Settlement({o: entries[o].caller_id for o in removed}, len(self.receipts))
        )

    @precondition(lambda self: self.has_unread_receipts())
    @rule(count=st.integers(1, 5))
    def read_receipts(self, count: int) -> None:
        start = self.index.positions.receipts
        end = min(start + count, len(self.receipts))
        removed = [offset for receipt in self.receipts[start:end] for offset in receipt]
        known = self.index.caller_ids(removed)
        self.index.settle(Settlement({offset: known.get(offset) for offset in removed}, end))

    @precondition(lambda self: self.content().entries)
    @rule(data=st.data(), wait_ms=st.integers(0, 60), asked=batches)
    def postpone_some(self, data: st.DataObject, wait_ms: int, asked: list[Change | None]) -> None:
        entries = self.content().entries
        later = {
            offset: (NOW_MS + wait_ms, entries[offset]._replace(attempts=1))
            for offset in self.some_of(data, entries)
        }
        self.callers_write(asked, are_stored=True)
        self.index.postpone(later, NOW_MS)
        self.postpone |= {o: later[o] for o in later.keys() & self.content().entries.keys()}

    def some_of(self, data: st.DataObject, entries: dict[int, Entry]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(entries)), min_size=1, unique=True))

    @precondition(lambda self: self.content().entries)
    @rule(now_ms=due_times, limit=st.integers(1, 6))
    def read_due(self, now_ms: int, limit: int) -> None:
        entries = self.content().entries
        order = self.due_order(entries)
        ready = [offset for due_ms, offset in order if due_ms <= now_ms]
        later = [due_ms for due_ms, _ in order if due_ms > now_ms]

        due = self.index.due(now_ms, limit)

        assert due.entries == list(stored({o: entries[o] for o in ready[:limit]}).items())
        assert due.is_full == (len(ready) >= limit)
        assert due.next_due_ms == (later[0] if later else None)
        assert due.oldest_ms == (order[0][0] if order else None)
        assert due.pending == len(entries)

    # faults

    @precondition(lambda self: self.can_deliver() and len(self.zombies) < 3)
    @rule()
    def another_owner(self) -> None:
        self.zombies.append(self.index)
        self.index = self.next_owner()

    @precondition(lambda self: self.zombies)
    @rule(data=st.data(), removed=st.lists(st.integers(0, 9), max_size=3))
    def a_fenced_owner_wakes_up(self, data: st.DataObject, removed: list[int]) -> None:
        zombie = data.draw(st.sampled_from(self.zombies))
        here, there = self.index.positions, zombie.positions
        if here.receipts == there.receipts and here.requests >= there.requests:
            return
        for act in (
            lambda: zombie.settle(
                Settlement({self.first + o: None for o in removed}, there.receipts + 1)
            ),
            lambda: zombie.postpone({self.first: (NOW_MS, Entry("t", b"", NOW_MS))}, NOW_MS),
            lambda: zombie.due(NOW_MS, 5),
        ):
            with pytest.raises(PositionsMoved):
                act()

    @precondition(lambda self: len(self.snapshots) < 4)
    @rule()
    def remember(self) -> None:
        keys = {key: self.client.dump(key) for key in self.client.keys("*")}
        self.snapshots.append(Snapshot(keys, dict(self.postpone)))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def redis_is_rolled_back(self, data: st.DataObject) -> None:
        then = data.draw(st.sampled_from(self.snapshots))
        self.client.flushall()
        for key, value in then.keys.items():
            self.client.restore(key, 0, value)
        self.postpone = dict(then.postpone)
        self.another_owner()

    @precondition(lambda self: self.receipts)
    @rule()
    def redis_is_emptied(self) -> None:
        self.client.flushall()
        self.postpone = {}
        self.another_owner()
        assert self.index.load() is None
        self.index.begin(Positions(self.first, 0))

    @precondition(lambda self: self.has_unread_requests())
    @rule()
    def everything_is_replayed(self) -> None:
        if self.has_unread_receipts():
            self.read_receipts(len(self.receipts))
        self.store(self.index.positions.requests, self.end)

    # the proof

    @invariant()
    def the_index_is_what_the_journals_say(self) -> None:
        found, expected = held(self.client), self.content()
        ahead = {offset for offset in found.skip if offset >= self.index.positions.requests}

        assert found.positions == self.index.positions
        assert found == Held(
            found.positions,
            self.due_order(expected.entries),
            stored(expected.entries),
            expected.holders,
            found.skip,
        )
        assert ahead == expected.ahead

    @invariant()
    def no_used_segment_is_left(self) -> None:
        current = self.index.positions.requests // SEGMENT
        assert all(segment >= current for segment in segments(self.client))


def prove(backend: Backend, examples: int) -> None:
    class OnThisRedis(IndexMachine):
        pass

    OnThisRedis.backend = backend
    run_state_machine_as_test(
        OnThisRedis,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )


@histories(20, 200)
def test_an_index_equals_its_journals_after_any_history(
    fake_backend: Backend, examples: int
) -> None:
    prove(fake_backend, examples)


@histories(10, 50)
def test_an_index_in_a_real_redis_equals_its_journals_after_any_history(
    real_backend: Backend, examples: int
) -> None:
    prove(real_backend, examples)
