"""The content of a low-water mark, and when it is valid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from threading import Event
from typing import Any, cast

import pytest

from blackbox.core.dispatched import Dispatched
from blackbox.core.low_water import PAIRS, LowWater, next_mark
from blackbox.core.plan import Positions, Replacement
from blackbox.core.recovery import Recovered
from blackbox.engine import shard_session
from blackbox.engine.caretaker import WALKED_SHARE, Caretaker
from blackbox.engine.linger import Linger
from blackbox.engine.metrics import Metrics
from blackbox.engine.shard_owner import ShardOwner
from blackbox.engine.shard_session import ShardSession
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.records.clock import Clock, ShardClock
from blackbox.records.errors import Fenced, RecoveryRequired
from blackbox.records.receipt import Claim, Mark
from blackbox.records.request import Shard, request_id
from tests.contract.held import NOW_MS, SHARD, entry, store
from tests.support.fakes import FakeWriter
from tests.support.world import until

ANSWER_S = 10.0


@pytest.fixture
def low_water(index: ShardIndex, writer: FakeWriter) -> LowWater:
    return LowWater(SHARD, index, writer, lambda: NOW_MS, "topic", group="group")


def ignoring(index: ShardIndex, count: int) -> None:
    """Store replacements, from offset 1 on, of a request that ended before."""
    late = Replacement(request_id(SHARD, 0), None, entry(), entry())
    store(index, 0, 1 + count, dict.fromkeys(range(1, 1 + count), late))


def test_a_mark_records_ignored_records_below_its_position(
    index: ShardIndex, writer: FakeWriter, low_water: LowWater
) -> None:
    ignoring(index, 2)

    mark = low_water.write(Positions(3, 0), 3)

    [receipt] = writer.receipts
    assert (receipt.mark, receipt.read, receipt.ignored) == (mark, 3, [1, 2])
    assert (receipt.topic_id, receipt.group) == ("topic", "group")
    assert index.unrecorded(10) == (3, [])


def test_the_last_receipt_with_ignored_records_carries_the_mark(
    index: ShardIndex, writer: FakeWriter, low_water: LowWater, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blackbox.core.low_water.IGNORED_PER_RECEIPT", 2)
    ignoring(index, 5)

    mark = low_water.write(Positions(6, 0), 6)

    told = [(receipt.ignored, receipt.mark) for receipt in writer.receipts]
    assert told == [([1, 2], None), ([3, 4], None), ([5], mark)]


def test_an_idle_shard_writes_no_mark_again(
    index: ShardIndex, writer: FakeWriter, low_water: LowWater
) -> None:
    store(index, 0, 3, {1: entry()})
    first = low_water.write(Positions(3, 0), 1)

    assert low_water.write(index.positions, 1) == first
    assert len(writer.receipts) == 1

    store(index, 3, 4, {3: entry()})
    low_water.write(index.positions, 1)
    assert len(writer.receipts) == 2


def test_ignored_records_of_a_failed_receipt_stay_unrecorded(
    index: ShardIndex, writer: FakeWriter, low_water: LowWater
) -> None:
    ignoring(index, 1)
    writer.before["commit"] = Fenced("another owner")

    with pytest.raises(Fenced):
        low_water.write(Positions(2, 0), 2)

    assert low_water.last is None
    assert index.unrecorded(10) == (2, [1])


def test_a_mark_takes_its_receipts_offset_from_the_last_pair_below_it() -> None:
    first = next_mark(None, Positions(10, 100), 4)
    second = next_mark(first, Positions(20, 200), 12)
    third = next_mark(second, Positions(30, 300), 30)

    assert first == Mark(4, 0, [(10, 100)])
    assert second == Mark(12, 100, [(20, 200)])
    assert third == Mark(30, 300, [])


def test_a_mark_never_goes_back() -> None:
    assert next_mark(Mark(9, 90), Positions(7, 70), 5) == Mark(9, 90, [])


def test_a_mark_keeps_a_limited_number_of_pairs_with_the_first_and_the_last() -> None:
    mark: Mark | None = None
    for number in range(1, 10 * PAIRS):
        mark = next_mark(mark, Positions(number, 10 * number), 0)

    assert mark is not None
    assert len(mark.pairs) <= PAIRS
    assert tuple(mark.pairs[0]) == (1, 10)
    assert tuple(mark.pairs[-1]) == (10 * PAIRS - 1, 10 * (10 * PAIRS - 1))


class FinishedWalk:
    """A walk that ends at once."""

    positions = Positions(3, 0)
    doubtful: Mapping[int, Claim] = {}
    lowest = 3

    def slices(self) -> int:
        return 1

    def slice(self) -> bool:
        return False

    def close(self) -> None: ...


class FakeVerbs:
    """Index, writer, recovery and dispatch in one. Commits wait until they may fail."""

    positions = Positions(3, 0)
    doubtful: Mapping[int, Claim] = {}

    def __init__(self) -> None:
        self.commits: SimpleQueue[str] = SimpleQueue()
        self.may_fail = Event()

    def open(self) -> Recovered:
        return Recovered(0, 0, 0)

    def count_rates_in(self, cluster: str) -> None: ...

    def walk(self) -> FinishedWalk:
        return FinishedWalk()

    def tick(self, now_ms: int) -> Dispatched:
        return Dispatched()

    def unrecorded(self, most: int) -> tuple[int, Sequence[int]]:
        return 3, []

    def begin(self) -> None: ...

    def commit(self, receipt: object) -> int:
        self.commits.put("commit")
        assert self.may_fail.wait(ANSWER_S)
        raise Fenced("another owner")

    def close(self) -> None: ...


@pytest.fixture
def verbs() -> FakeVerbs:
    return FakeVerbs()


@pytest.fixture
def owner(verbs: FakeVerbs) -> Iterator[ShardOwner]:
    every = cast(Any, verbs)
    low_water = LowWater(SHARD, every, every, lambda: 0)
    session = ShardSession(
        every, every, every, every, low_water, ShardClock(Clock()), every, (every,)
    )
    owner = ShardOwner(
        SHARD, lambda _: session, clock=Clock(), metrics=Metrics(), wake_up=True,
        linger=Linger(0.012), stuck_after_s=60,
        opened=lambda *_: None, closed=lambda _: None, ended=lambda _: None,
    )  # fmt: skip
    owner.start()
    until("it is open", lambda: owner.is_open)
    yield owner
    verbs.may_fail.set()
    owner.stop()
    assert owner.join(ANSWER_S)


class RecordingOwner:
    """An owner that records the order and the duration of walks."""

    def __init__(self, name: int, firsts: list[int]) -> None:
        self.shard = Shard("TB", name)
        self.binding = None
        self.firsts = firsts

    def find_low_water(self, walk_s: float, stopping: Event) -> None:
        self.firsts.append(self.shard.partition)
        assert walk_s == pytest.approx(0.01 * WALKED_SHARE / 4)
        stopping.set()


def test_the_caretaker_starts_with_a_different_shard_each_time() -> None:
    access = KafkaAccess("127.0.0.1:1", "unit", {"log_level": "0"})
    firsts: list[int] = []
    owners = cast(Any, [RecordingOwner(name, firsts) for name in range(4)])
    for _ in range(100):
        if set(firsts) == set(range(4)):
            break
        caretaker = Caretaker(
            access, Metrics(), Clock(), lambda: owners, interval_s=0.01, retention_s=0
        )
        caretaker._run()
    assert set(firsts) == set(range(4))


def test_an_abandoned_walk_raises_an_error(
    owner: ShardOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FinishedWalk, "slice", lambda _: True)
    stopping = Event()
    stopping.set()

    with pytest.raises(RecoveryRequired, match="the walk was abandoned"):
        owner.find_low_water(0, stopping)


def test_a_walk_that_takes_too_long_counts_as_far_as_it_got(
    owner: ShardOwner, verbs: FakeVerbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FinishedWalk, "slice", lambda _: True)  # it never ends by itself
    monkeypatch.setattr(FinishedWalk, "lowest", 2)
    monkeypatch.setattr(shard_session, "SHORT_WALK_S", 0.0)
    monkeypatch.setattr(FakeVerbs, "commit", lambda *_: 1)
    monkeypatch.setattr(FakeVerbs, "settle", lambda *_: None, raising=False)

    assert owner.find_low_water(0, Event()) == Mark(2, 0, [(3, 0)])


def test_no_walk_starts_while_a_request_is_in_doubt(owner: ShardOwner, verbs: FakeVerbs) -> None:
    verbs.doubtful = {7: Claim(7, "delivered", "orders/0", 7, "")}

    with pytest.raises(
        RecoveryRequired, match="cannot read yet whether some requests were delivered"
    ):
        owner.find_low_water(0, Event())


def test_a_mark_that_kafka_did_not_accept_is_not_reported(
    owner: ShardOwner, verbs: FakeVerbs
) -> None:
    verbs.may_fail.set()

    with pytest.raises(RecoveryRequired, match="another owner"):
        owner.find_low_water(0, Event())

    assert verbs.commits.get(timeout=ANSWER_S) == "commit"
