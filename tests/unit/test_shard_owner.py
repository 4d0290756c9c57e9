from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, cast

import pytest

from blackbox.core.dispatched import Dispatched
from blackbox.core.intake import Taken
from blackbox.core.low_water import LowWater
from blackbox.core.parsing import Parsed
from blackbox.core.plan import Binding, Positions
from blackbox.core.recovery import Recovered
from blackbox.engine.linger import Linger
from blackbox.engine.metrics import Metrics
from blackbox.engine.shard_owner import ShardOwner
from blackbox.engine.shard_session import ShardSession
from blackbox.records.clock import Clock, ShardClock
from blackbox.records.errors import PositionsMoved, Refused
from blackbox.records.request import Reason, Shard
from tests.support.world import until

ANSWER_S = 10.0
QUIET_S = 0.3
NOTHING = Parsed(0, 0, [])


@dataclass
class FakeVerbs:
    """Index, writer, recovery, intake and dispatch in one; the tests decide what a tick does."""

    ticks: SimpleQueue[int]
    during: list[Any] = field(default_factory=list)
    positions: Positions = field(default_factory=lambda: Positions(0, 0))
    first_due_ms: int | None = None
    next_due_ms: list[int | None] = field(default_factory=list)
    done: Dispatched = field(default_factory=Dispatched)
    cluster: str = ""
    gone: int = 0

    def open(self) -> Recovered:
        return Recovered(
            0, 0, self.gone, binding=Binding("cluster", "topic", "receipts", "blackbox")
        )

    def count_rates_in(self, cluster: str) -> None:
        self.cluster = cluster

    def forget_gone(self) -> None:
        self.gone = 0

    def store(self, parsed: Parsed, now_ms: int, while_busy: Any = None) -> Taken:
        return Taken(1, 0, 0, 0, self.first_due_ms)

    def tick(self, now_ms: int) -> Dispatched:
        if self.during:
            self.during.pop(0)()
        self.ticks.put(now_ms)
        return Dispatched(next_due_ms=self.next_due_ms.pop(0) if self.next_due_ms else None)

    def load(self) -> Positions:
        return self.positions

    def close(self) -> None:
        raise OSError("closing may fail")


@pytest.fixture
def verbs() -> FakeVerbs:
    return FakeVerbs(SimpleQueue())


@pytest.fixture
def calls() -> list[tuple[str, object]]:
    return []


@pytest.fixture
def wake_up() -> bool:
    return True


@pytest.fixture
def owner(verbs: FakeVerbs, calls: list[tuple[str, object]], wake_up: bool) -> Iterator[ShardOwner]:
    all_in_one = cast(Any, verbs)
    low_water = LowWater(Shard("TB", 0), all_in_one, all_in_one, lambda: 0)
    session = ShardSession(
        all_in_one, all_in_one, all_in_one, all_in_one, low_water, ShardClock(Clock()),
        cast(Any, Quiet()), (verbs, verbs),
    )  # fmt: skip
    owner = ShardOwner(
        Shard("TB", 0),
        lambda _: session,
        clock=Clock(),
        metrics=Metrics(),
        wake_up=wake_up,
        linger=Linger(0.012),
        stuck_after_s=60,
        opened=lambda o, offset: calls.append(("opened", offset)),
        closed=lambda o: calls.append(("closed", o)),
        ended=lambda o: calls.append(("ended", o)),
    )
    yield owner
    owner.stop()
    assert owner.join(ANSWER_S)


def test_a_refusal_in_the_first_tick_does_not_keep_a_shard_closed(
    owner: ShardOwner, verbs: FakeVerbs, calls: list[tuple[str, object]]
) -> None:
    def refuse() -> None:
        raise Refused({7: (Reason.TOO_LARGE, "too large")})

    verbs.during += [refuse] * 20
    owner.start()

    until("it is open and delivers", lambda: owner.is_open and not verbs.ticks.empty(), 5.0)
    assert [what for what, _ in calls].count("opened") == 21


def test_a_shard_that_fails_for_hours_opens_again_in_the_end(
    owner: ShardOwner, verbs: FakeVerbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,030 openings that last less than five seconds each: three hours, at ten seconds between them."""
    monkeypatch.setattr("blackbox.engine.shard_owner.LONGEST_PAUSE_S", 0.0)

    def fail() -> None:
        raise PositionsMoved("Redis was slow")

    verbs.during += [lambda: None, fail] * 1030  # the first tick belongs to the opening
    owner.start()

    until("it delivers", lambda: owner.is_open and not verbs.during, 30.0)


def test_an_open_shard_counts_the_rates_of_its_own_cluster(
    owner: ShardOwner, verbs: FakeVerbs
) -> None:
    at_first_tick = list[str]()
    verbs.during = [lambda: at_first_tick.append(verbs.cluster)]
    owner.start()

    until("it is open", lambda: owner.is_open, 5.0)
    assert at_first_tick == ["cluster"]


def test_requests_that_retention_removed_are_counted_once_although_an_opening_fails_late(
    owner: ShardOwner, verbs: FakeVerbs
) -> None:
    def fail() -> None:
        raise PositionsMoved("gone back")

    def counted(metric: str) -> float | None:
        return owner.metrics.registry.get_sample_value(metric, {"shard": "TB-0"})

    verbs.gone, verbs.during = 3, [fail]
    owner.start()
    until("it is open", lambda: owner.is_open, 5.0)
    owner.recover(PositionsMoved("gone back"))
    until("it has opened again", lambda: counted("blackbox_recoveries_total") == 2, 5.0)

    assert (verbs.gone, counted("blackbox_gone_total")) == (0, 3)


class Quiet:
    def close(self) -> None: ...


def test_a_request_stored_during_a_tick_and_due_soon_wakes_the_owner(
    owner: ShardOwner, verbs: FakeVerbs
) -> None:
    def store_something_due_soon() -> None:
        verbs.first_due_ms = Clock().earliest_ms() + 30
        assert owner.take(NOTHING)

    verbs.during = [lambda: None, lambda: None, store_something_due_soon]
    verbs.next_due_ms = [None, Clock().earliest_ms() + 5]
    owner.start()
    for _ in range(4):
        verbs.ticks.get(timeout=ANSWER_S)  # there are no polls: only the wake-up causes it


def test_a_shard_is_recovered_even_if_closing_fails(
    owner: ShardOwner, verbs: FakeVerbs, calls: list[tuple[str, object]]
) -> None:
    owner.start()
    verbs.ticks.get(timeout=ANSWER_S)
    owner.recover(PositionsMoved("gone back"))
    until("it opens again", lambda: len(calls) >= 3)
    assert [name for name, _ in calls[:3]] == ["opened", "closed", "opened"]


def test_a_shard_to_be_recovered_stores_nothing_during_its_last_tick(
    owner: ShardOwner, verbs: FakeVerbs
) -> None:
    taken: list[bool] = []

    def is_in_doubt() -> None:
        owner.recover(PositionsMoved("gone back"))
        taken.append(owner.take(NOTHING))

    verbs.during = [lambda: None, is_in_doubt]
    owner.start()
    until("it stores again", lambda: bool(taken) and owner.take(NOTHING))
    assert taken == [False]


def test_a_batch_beyond_the_position_is_read_again_from_the_position(
    owner: ShardOwner, verbs: FakeVerbs, calls: list[tuple[str, object]]
) -> None:
    owner.start()
    verbs.ticks.get(timeout=ANSWER_S)
    verbs.ticks.get(timeout=ANSWER_S)
    assert not owner.take(Parsed(5, 9, []))
    assert calls == [("opened", 0), ("opened", 0)]


def started(owner: ShardOwner, verbs: FakeVerbs, *, next_due_ms: int | None) -> None:
    """Wait until the owner is idle, after the tick of its opening and another one that found this due time."""
    verbs.next_due_ms = [None, next_due_ms]
    owner.start()
    for _ in range(2):
        verbs.ticks.get(timeout=ANSWER_S)
    until("the owner is idle", lambda: owner._next_due_ms == next_due_ms)


def is_quiet(verbs: FakeVerbs) -> bool:
    try:
        verbs.ticks.get(timeout=QUIET_S)
    except Empty:
        return True
    return False


def in_ms(wait_ms: int) -> int:
    return Clock().earliest_ms() + wait_ms


def test_an_earlier_due_time_wakes_the_owner_in_time(owner: ShardOwner, verbs: FakeVerbs) -> None:
    started(owner, verbs, next_due_ms=in_ms(3_600_000))
    due_ms = in_ms(150)
    verbs.next_due_ms = [due_ms]
    owner.wake_at(due_ms)
    assert verbs.ticks.get(timeout=ANSWER_S) < due_ms  # reads the new due time
    assert verbs.ticks.get(timeout=ANSWER_S) >= due_ms  # and ticks in time


def test_a_due_time_wakes_an_owner_without_pending_requests(
    owner: ShardOwner, verbs: FakeVerbs
) -> None:
    started(owner, verbs, next_due_ms=None)
    owner.wake_at(in_ms(3_600_000))
    verbs.ticks.get(timeout=ANSWER_S)


def test_a_past_due_time_wakes_the_owner_at_once(owner: ShardOwner, verbs: FakeVerbs) -> None:
    started(owner, verbs, next_due_ms=in_ms(3_600_000))
    owner.wake_at(in_ms(-5000))
    verbs.ticks.get(timeout=ANSWER_S)


@pytest.mark.parametrize("later_ms", [0, 1, 3_600_000])
def test_a_later_due_time_does_not_wake_the_owner(
    owner: ShardOwner, verbs: FakeVerbs, later_ms: int
) -> None:
    known_ms = in_ms(3_600_000)
    started(owner, verbs, next_due_ms=known_ms)
    owner.wake_at(known_ms + later_ms)
    assert is_quiet(verbs)


def test_an_owner_that_is_not_open_yet_accepts_a_due_time(
    owner: ShardOwner, verbs: FakeVerbs
) -> None:
    owner.wake_at(in_ms(-1))
    owner.start()
    for _ in range(2):
        verbs.ticks.get(timeout=ANSWER_S)


class TestWithoutWakeUp:
    """`BLACKBOX_WAKE_UP=false`: only polls cause ticks."""

    @pytest.fixture
    def wake_up(self) -> bool:
        return False

    def test_without_wake_up_no_due_time_wakes_the_owner(
        self, owner: ShardOwner, verbs: FakeVerbs
    ) -> None:
        started(owner, verbs, next_due_ms=in_ms(20))
        owner.wake_at(in_ms(10))
        owner.wake_at(in_ms(-5000))
        assert is_quiet(verbs)

    def test_without_wake_up_a_poll_wakes_the_owner(
        self, owner: ShardOwner, verbs: FakeVerbs
    ) -> None:
        started(owner, verbs, next_due_ms=None)
        owner.poll()
        verbs.ticks.get(timeout=ANSWER_S)
