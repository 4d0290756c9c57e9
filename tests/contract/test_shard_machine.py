"""Every request has one outcome, whatever fails between Kafka, Redis and the owners of a shard.

The three verbs and the index are the real ones. Kafka is simulated: transactions that abort,
whose outcome stays unknown, or that tear (the receipt is there, its messages are not), and owners
that stop anywhere and wake up later. Redis is lost, completely or in part, or is rolled back; journals are
trimmed below the low-water mark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
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

from blackbox.core.batch_limit import BatchLimit
from blackbox.core.dispatch import Dispatch
from blackbox.core.due_batch import LONGEST_RETRY_MS
from blackbox.core.follow_ups import FollowUps
from blackbox.core.intake import Intake, Taken
from blackbox.core.lost_payload import reread
from blackbox.core.low_water import LowWater
from blackbox.core.plan import Batch
from blackbox.core.rebuild import Rebuild
from blackbox.core.recovery import Recovery
from blackbox.core.triage import Triage
from blackbox.index.shard_index import ShardIndex
from blackbox.records.cancel import REPLACES
from blackbox.records.errors import Fenced, JournalLost, RecoveryRequired
from blackbox.records.outgoing import Outgoing
from blackbox.records.receipt import Mark, Receipt, decode, without_void
from blackbox.records.request import Cancel, Invalid, Reason, Request, request_id
from tests.contract.conftest import Backend, histories
from tests.contract.held import GRACE_S, PREFIX, SHARD
from tests.support.fakes import FakeJournal, FakeTargets, FakeWriter, record

START_MS = 1_000_000
LETTERS = "dead-letters"
Asked = Request | Cancel | Invalid | None

COMMITTED, ABORTED, UNKNOWN, TORN = "committed", "aborted", "unknown", "torn"
STEPS = ("open", "begin", "flush", "commit")


@dataclass
class Kafka:
    """What consumers of the target topics see, and which owner may still write."""

    journal: FakeJournal = field(default_factory=FakeJournal)
    visible: list[tuple[Outgoing, int]] = field(default_factory=list)
    epoch: int = 0
    next_commits: list[str] = field(default_factory=list)
    next_failure: str | None = None

    def outcomes(self) -> Counter[int]:
        return Counter(outgoing.offset for outgoing, _ in self.visible)


@dataclass
class Producer(FakeWriter):
    """One owner's producer: fenced by the next one that opens."""

    kafka: Kafka = field(default_factory=Kafka)
    now_ms: Callable[[], int] = lambda: 0
    epoch: int = -1

    def open(self) -> None:
        self._fail_at("open")
        self.kafka.epoch += 1
        self.epoch = self.kafka.epoch

    def begin(self) -> None:
        self._fail_at("begin")
        super().begin()

    def flush(self, hopeless: Any = dict) -> Any:
        self._fail_at("flush")
        return super().flush(hopeless)

    def commit(self, receipt: Receipt, not_before_ms: int = 0) -> int:
        self._fail_at("commit")
        if self.epoch != self.kafka.epoch:
            raise Fenced("a later owner opened the shard")
        fate = self.kafka.next_commits.pop(0) if self.kafka.next_commits else COMMITTED
        if fate == ABORTED:
            raise JournalLost("the commit timed out")
        messages = [outgoing for outgoing, _ in self._queued]
        position = super().commit(receipt)
        sent = {outgoing.offset for outgoing in messages}
        if fate == TORN and not receipt.barrier:
            self.journal.absent |= sent
        else:
            self.journal.absent -= sent
            self.kafka.visible += [(outgoing, self.now_ms()) for outgoing in messages]
        if fate in (UNKNOWN, TORN):
            raise JournalLost("the commit timed out")
        return position

    def _fail_at(self, step: str) -> None:
        if self.kafka.next_failure == step:
            self.kafka.next_failure = None
            raise JournalLost(f"no answer to {step}")


@dataclass(frozen=True)
class Owner:
    """All objects of one owner, wired as in the engine."""

    index: ShardIndex
    intake: Intake
    dispatch: Dispatch
    recovery: Recovery
    low_water: LowWater


def is_too_late(outgoing: Outgoing) -> bool:
    """Whether it is the dead letter of a replacement by id whose request was no longer pending."""
    return dict(outgoing.headers).get("blackbox-reason") == Reason.TOO_LATE


due_in_ms = st.sampled_from([0, 0, 10, 20, 1000])
caller_ids = st.sampled_from([None, "a", "b"])
targets = st.sampled_from(["orders", "orders", "orders", "huge", "strict", "gone"])
requests = st.tuples(targets, due_in_ms, caller_ids)
replacements = st.tuples(due_in_ms, st.integers(1, 12))
"""When it is due, and how far back the request is that it replaces."""
asks = st.lists(
    st.one_of(requests, requests, replacements, st.sampled_from(["a", "b"]), st.none()),
    min_size=3,
    max_size=9,
)
passing = st.sampled_from([0, 10, 10, 100, 4000])
commit_results: st.SearchStrategy[list[str]] = st.just([]) | st.lists(
    st.sampled_from([COMMITTED, ABORTED, UNKNOWN, TORN]), min_size=1, max_size=4
)
silences = st.none() | st.none() | st.sampled_from(STEPS)


class ShardMachine(RuleBasedStateMachine):
    """Owners start and end, Kafka and Redis fail, and time passes."""

    backend: Backend

    def __init__(self) -> None:
        super().__init__()
        self.client: Any = self.backend.client
        self.client.flushall()
        self.connections = self.backend.connections()
        self.kafka = Kafka()
        self.journal = self.kafka.journal
        self.asked: list[Asked] = []
        self.replaces: dict[int, int] = {}
        self.ended_in_time: set[int] = set()
        self.snapshots: list[dict[bytes, bytes]] = []
        self.zombies: list[Owner] = []
        self.unavailable = FakeTargets({"gone": (Reason.UNKNOWN_TOPIC, "create it")})
        self.now_ms = START_MS

    @initialize(batch_limit=st.sampled_from([2, 3, 100]), asks=asks)
    def the_shard_is_opened(self, batch_limit: int, asks: list[Any]) -> None:
        self.batch_limit = batch_limit
        self.owner = self.wire()
        self.take_over()
        self.callers_write(asks, count=9)

    def wire(self) -> Owner:
        index = ShardIndex(SHARD, self.connections, grace_s=GRACE_S)
        writer = Producer(self.journal, kafka=self.kafka, now_ms=lambda: self.now_ms)
        too_large = (Reason.TOO_LARGE, "too large")
        writer.refused["huge"] = writer.failing["strict"] = too_large
        intake = Intake(self.journal.format, index, None)
        triage = Triage(
            shard=SHARD,
            targets=self.unavailable,
            journal=self.journal,
            reread=partial(reread, self.journal.format),
            dead_letter_topic=LETTERS,
            follow_ups=FollowUps(SHARD, self.journal.format, self.journal),
            retries=2,
        )
        dispatch = Dispatch(index, writer, triage, BatchLimit(self.batch_limit))
        recovery = Recovery(
            shard=SHARD,
            group="blackbox",
            index=index,
            journal=self.journal,
            writer=writer,
            confirm=lambda: None,
            apply=lambda batch, opening: intake.parse_and_store(batch, self.now_ms, opening),
            upcoming=lambda batch: intake.upcoming(batch, self.now_ms),
            now_ms=lambda: self.now_ms,
        )
        low_water = LowWater(SHARD, index, writer, lambda: self.now_ms)
        return Owner(index, intake, dispatch, recovery, low_water)

    def take_over(self) -> None:
        """A new owner, started again until it has opened."""
        for _ in range(20):
            self.zombies.append(self.owner)
            self.owner = self.wire()
            try:
                self.owner.low_water.last = self.owner.recovery.open().mark
            except RecoveryRequired:
                continue
            break
        else:
            raise AssertionError("the shard does not open")
        for forgotten in self.zombies[:-2]:
            forgotten.index.close()
        del self.zombies[:-2]

    def teardown(self) -> None:
        if hasattr(self, "owner"):
            self.every_request_gets_its_outcome()
            for owner in (self.owner, *self.zombies):
                owner.index.close()
        self.connections.disconnect()

    # what callers and engines do

    @rule(asks=asks, count=st.integers(0, 9))
    def callers_write(self, asks: list[Any], count: int) -> None:
        for asked in asks:
            offset = len(self.asked)
            change = self.change(asked)
            self.asked.append(change)
            written = record(offset, b"{}", self.now_ms)
            if isinstance(asked, tuple) and len(asked) == 2:
                self.replaces[offset] = max(0, offset - asked[1])
                named = request_id(SHARD, self.replaces[offset]).encode()
                written = written._replace(headers=[*written.headers, (REPLACES, named)])
            self.journal.request_records.append(written)
            self.journal.format.parsed[offset] = change
        if count:
            self.intake_stores(count)

    def change(self, asked: Any) -> Request | Cancel | Invalid:
        if asked is None:
            return Invalid(Reason.NOT_JSON, "no JSON")
        if isinstance(asked, str):
            return Cancel(asked)
        target, wait_ms, caller_id = asked if len(asked) == 3 else ("orders", asked[0], None)
        return Request(target, b"hi", self.now_ms + wait_ms, None, [], None, caller_id, None)

    @precondition(lambda self: self.owner.index.positions.requests < len(self.asked))
    @rule(count=st.integers(1, 9))
    def intake_stores(self, count: int) -> None:
        start = self.owner.index.positions.requests
        end = min(start + count, len(self.asked))
        batch = Batch(start, end, self.journal.request_records[start:end])  # type: ignore[arg-type]
        if self.succeeds(lambda: self.owner.intake.parse_and_store(batch, self.now_ms)):
            self.note_ended_requests(start, end)

    def note_ended_requests(self, start: int, end: int) -> None:
        """Requests that were not due yet when a later one ended them must never be delivered."""
        changes = self.asked[start:end]
        names = {c.caller_id for c in changes if isinstance(c, Request | Cancel)} - {None}
        for name in names:
            under = [
                (offset, change)
                for offset, change in enumerate(self.asked[:end])
                if isinstance(change, Request | Cancel) and change.caller_id == name
            ]
            self.ended_in_time |= {
                offset
                for offset, change in under[:-1]
                if isinstance(change, Request)
                and change.due_ms > self.now_ms
                and under[-1][0] >= start
            }

    @rule(
        passed_ms=passing,
        count=st.integers(1, 3),
        commit_results=commit_results,
        silent_at=silences,
        remembers=st.booleans(),
    )
    def dispatch_ticks(
        self,
        passed_ms: int,
        count: int,
        commit_results: list[str],
        silent_at: str | None,
        remembers: bool,
    ) -> None:
        self.now_ms += passed_ms
        if remembers:
            self.remember()
        self.kafka.next_commits, self.kafka.next_failure = list(commit_results), silent_at
        for _ in range(count):
            self.succeeds(lambda: self.owner.dispatch.tick(self.now_ms))
        self.kafka.next_commits, self.kafka.next_failure = [], None

    @rule(commit_results=commit_results, is_trimmed=st.booleans())
    def the_low_water_mark_is_written(self, commit_results: list[str], is_trimmed: bool) -> None:
        self.kafka.next_commits = list(commit_results)
        mark: Mark | None = None

        def write() -> None:
            nonlocal mark
            with closing(self.owner.index.walk()) as walk:
                while walk.slice():
                    pass
                mark = self.owner.low_water.write(walk.positions, walk.lowest)

        self.succeeds(write)
        self.kafka.next_commits = []
        if mark is not None and is_trimmed:
            self.journal.first_request = max(self.journal.first_request, mark.requests)
            self.journal.first_receipt = max(self.journal.first_receipt, mark.receipts)

    def succeeds(self, act: Callable[[], object]) -> bool:
        try:
            act()
        except RecoveryRequired:
            self.take_over()
            return False
        return True

    @rule(is_away=st.booleans())
    def a_target_loses_or_gets_its_leader(self, is_away: bool) -> None:
        if is_away:
            self.unavailable.refusals["orders"] = (Reason.UNREACHABLE, "no leader")
        else:
            self.unavailable.refusals.pop("orders", None)

    @rule(is_hidden=st.booleans())
    def a_transaction_hides_the_messages(self, is_hidden: bool) -> None:
        self.journal.unreadable = set(range(len(self.asked))) if is_hidden else set()

    # what fails

    @precondition(lambda self: self.kafka.visible)
    @rule()
    def the_owner_is_killed(self) -> None:
        self.take_over()

    @rule(data=st.data())
    def a_fenced_owner_wakes_up(self, data: st.DataObject) -> None:
        zombie = data.draw(st.sampled_from(self.zombies))
        try:
            zombie.dispatch.tick(self.now_ms)
        except RecoveryRequired:
            return

    @rule()
    def remember(self) -> None:
        self.snapshots.append({key: self.client.dump(key) for key in self.client.keys("*")})
        del self.snapshots[:-3]

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), is_noticed=st.booleans())
    def redis_is_rolled_back(self, data: st.DataObject, is_noticed: bool) -> None:
        then = data.draw(st.sampled_from(self.snapshots))
        self.client.flushall()
        for key, value in then.items():
            self.client.restore(key, 0, value)
        if is_noticed:
            self.take_over()
        else:
            self.succeeds(lambda: self.owner.dispatch.tick(self.now_ms))

    @rule(is_noticed=st.booleans())
    def redis_loses_only_the_due_times(self, is_noticed: bool) -> None:
        self.client.delete(f"{PREFIX}due")
        if is_noticed:
            self.take_over()

    @rule(batch=st.integers(0, 3), read_at_once=st.sampled_from([1, 2, 5]))
    def redis_is_emptied_and_the_rebuild_is_interrupted(
        self, batch: int, read_at_once: int
    ) -> None:
        self.client.flushall()
        self.zombies.append(self.owner)
        self.owner = owner = self.wire()
        left = batch

        def apply(found: Batch, opening: Rebuild | None) -> Taken:
            nonlocal left
            if left == 0:
                raise JournalLost("no answer")
            left -= 1
            return owner.intake.parse_and_store(found, self.now_ms, opening)

        self.journal.read_at_once = read_at_once
        self.succeeds(replace(owner.recovery, apply=apply).open)
        self.journal.read_at_once = 1000

    @precondition(lambda self: self.kafka.visible)
    @rule(is_noticed=st.booleans())
    def redis_is_emptied(self, is_noticed: bool) -> None:
        self.client.flushall()
        if is_noticed:
            self.take_over()

    # the proof

    @invariant()
    def nothing_is_delivered_twice(self) -> None:
        assert [offset for offset, count in self.kafka.outcomes().items() if count > 1] == []

    @invariant()
    def nothing_is_delivered_early(self) -> None:
        for outgoing, at_ms in self.kafka.visible:
            asked = self.asked[outgoing.offset]
            if not is_too_late(outgoing):
                assert not isinstance(asked, Request) or asked.due_ms <= at_ms

    @invariant()
    def nothing_ended_in_time_is_delivered(self) -> None:
        assert self.ended_in_time & self.kafka.outcomes().keys() == set()

    def every_request_gets_its_outcome(self) -> None:
        """Once nothing fails, every request gets its outcome, and the receipts record it."""
        self.take_over()
        self.journal.unreadable.clear()
        self.unavailable.refusals.pop("orders", None)
        for _ in range(12):
            self.now_ms += LONGEST_RETRY_MS
            for _ in range(1000):
                if self.succeeds(lambda: self.owner.dispatch.tick(self.now_ms)):
                    index = self.owner.index
                    if not index.due(
                        self.now_ms, 1, release=dict.fromkeys(index.parked().values(), 1)
                    ).entries:
                        break
        self.nothing_is_delivered_twice()
        self.nothing_ended_in_time_is_delivered()
        outcomes = self.kafka.outcomes()
        assert [o for o in self.must_have_an_outcome() if o not in outcomes] == []
        assert self.ended_by_the_receipts() == set(outcomes)
        self.at_most_one_replaces_each()

    def at_most_one_replaces_each(self) -> None:
        """A request has an outcome, or at most one replacement was in time."""
        too_late = {outgoing.offset for outgoing, _ in self.kafka.visible if is_too_late(outgoing)}
        for named in set(self.replaces.values()):
            took = [by for by, of in self.replaces.items() if of == named and by not in too_late]
            asked = self.asked[named]
            ends = len(took) + (named in self.kafka.outcomes())
            assert ends <= 1
            if isinstance(asked, Request) and asked.caller_id is None:
                assert ends == 1

    def must_have_an_outcome(self) -> list[int]:
        named = set(self.replaces.values())
        last = {
            change.caller_id: offset
            for offset, change in enumerate(self.asked)
            if isinstance(change, Request | Cancel)
        }
        return [
            offset
            for offset, change in enumerate(self.asked)
            if isinstance(change, Invalid)
            or (
                isinstance(change, Request)
                and (change.caller_id is None or last[change.caller_id] == offset)
                and offset not in named
            )
        ]

    def ended_by_the_receipts(self) -> set[int]:
        kept = [(o, decode(v)) for o, v in enumerate(self.journal.receipt_records) if v is not None]
        return {offset for _, receipt in without_void(kept) for offset in receipt.removals()}


@histories(20, 250)
def test_every_request_has_one_outcome_whatever_fails(
    fake_backend: Backend, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blackbox.index.intake_changes.IN_FLIGHT_WAIT_S", 0)
    monkeypatch.setattr("blackbox.index.intake_changes.IN_FLIGHT_LOOK_S", 0)

    class OnThisRedis(ShardMachine):
        pass

    OnThisRedis.backend = fake_backend
    run_state_machine_as_test(
        OnThisRedis,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )
