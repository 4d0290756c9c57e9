"""What a tick delivers, in which order, and what it leaves for the next tick or the next owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import count as numbers
from typing import Any

import pytest
import redis

from blackbox.core import receipt_room
from blackbox.core.dispatch import Dispatch
from blackbox.core.dispatched import Dispatched
from blackbox.core.interpret import refused_entry
from blackbox.core.plan import Carried, Cold, DueEntries, Positions
from blackbox.core.settlement import Settlement
from blackbox.index.inspector import Inspector
from blackbox.index.shard_index import ShardIndex
from blackbox.records.errors import (
    Fenced,
    JournalLost,
    PositionsMoved,
    RecoveryRequired,
    TooEarly,
)
from blackbox.records.outgoing import Refusal
from blackbox.records.receipt import (
    Receipt,
    encode,
    outcome_bytes,
    topic_bytes,
)
from blackbox.records.request import Cancel, Invalid, Reason, request_id
from tests.contract.held import NOW_MS, PREFIX, SHARD, held, store
from tests.support.fakes import FakeTargets, FakeWriter, record
from tests.unit.dispatch.entries import LETTERS, TOO_LARGE, Make, Pend, invalid, to


def test_without_due_requests_there_is_no_transaction(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter
) -> None:
    assert dispatch.tick(NOW_MS) == Dispatched()
    pend(to(due_ms=NOW_MS + 5), to(due_ms=NOW_MS + 9))

    did = dispatch.tick(NOW_MS)

    assert (did.next_due_ms, did.oldest_ms, did.pending) == (NOW_MS + 5, NOW_MS + 5, 2)
    assert writer.calls == []


def test_positions_are_checked_even_if_nothing_is_due(dispatch: Dispatch, client: Any) -> None:
    client.set(PREFIX + "receipts", 9)

    with pytest.raises(PositionsMoved):
        dispatch.tick(NOW_MS)


def test_messages_are_flushed_before_the_receipt_and_removed_after_the_commit(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, index: ShardIndex,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pend(to("orders"), invalid(), to("bills"))
    settle = index.settle

    def settle_noted(done: Settlement) -> None:
        writer.calls.append("settle")
        settle(done)

    monkeypatch.setattr(index, "settle", settle_noted)

    dispatch.tick(NOW_MS)

    assert writer.calls == [
        "begin", "send orders@0", "send bills@2", f"send {LETTERS}@1", "flush", "commit", "settle",
    ]  # fmt: skip


@pytest.mark.parametrize("here", [True, False])
def test_a_request_cancelled_after_it_was_read_is_not_delivered(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, index: ShardIndex,
    connections: redis.ConnectionPool, monkeypatch: pytest.MonkeyPatch, here: bool,
) -> None:  # fmt: skip
    pend(to(caller_id="a"), to(caller_id="b"))
    other = index if here else ShardIndex(SHARD, connections, grace_s=3600)
    unavailable = targets.unavailable

    def cancelled_in_between(topics: Iterable[str]) -> Mapping[str, Refusal]:
        other.load()
        store(other, 2, 3, {2: Cancel("a")})
        monkeypatch.setattr(targets, "unavailable", unavailable)
        return unavailable(topics)

    monkeypatch.setattr(targets, "unavailable", cancelled_in_between)

    dispatch.tick(NOW_MS)

    assert [o.offset for o in writer.committed] == [1]
    assert writer.receipts[0].delivered == {"orders/0": [(1, 0)]}


def test_a_batch_is_in_flight_from_its_first_record_to_its_commit(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, connections: redis.ConnectionPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pend(to(), to(), to(due_ms=NOW_MS + 1))
    inspector = Inspector(connections)
    seen: list[list[bool]] = []

    def look(call: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*given: Any) -> Any:
            seen.append([inspector.is_in_flight(SHARD, offset) for offset in range(3)])
            return call(*given)

        return looked

    for step in ("begin", "flush", "commit"):
        monkeypatch.setattr(writer, step, look(getattr(writer, step)))

    dispatch.tick(NOW_MS)

    assert seen == [[True, True, False]] * 3
    assert not inspector.is_in_flight(SHARD, 0)


def test_a_late_replacement_is_recorded_as_invalid(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter
) -> None:
    late = Invalid(Reason.TOO_LATE, "it was delivered")
    pend(refused_entry(record(0), late, NOW_MS))

    dispatch.tick(NOW_MS)

    assert (writer.receipts[0].invalid, writer.receipts[0].dead) == ([0], [])


def test_a_tick_delivers_due_requests_and_reports_them(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, client: Any
) -> None:
    pend(to(due_ms=NOW_MS - 3), to(due_ms=NOW_MS + 1), to("bills", due_ms=NOW_MS))

    did = dispatch.tick(NOW_MS)

    assert did == Dispatched(
        due_ms=[NOW_MS - 3, NOW_MS],
        targets=Counter(orders=1, bills=1),
        next_due_ms=NOW_MS + 1,
        oldest_ms=NOW_MS - 3,
        pending=3,
    )
    assert [(o.topic, o.value) for o in writer.committed] == [
        ("orders", b"hello"), ("bills", b"hello"),
    ]  # fmt: skip
    assert dict(writer.committed[0].headers)["blackbox-id"] == request_id(SHARD, 0)
    assert held(client).offsets() == [1]
    assert held(client).positions == Positions(3, 1)


def test_a_receipt_names_where_every_request_went(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter
) -> None:
    pend(to(), to("bills"), invalid(), to(), to(expires_ms=NOW_MS - 1), to("huge"))
    writer.refused["huge"] = TOO_LARGE

    dispatch.tick(NOW_MS)

    [receipt] = writer.receipts
    assert receipt.at_ms == NOW_MS
    assert receipt.delivered == {"orders/0": [(0, 0), (3, 1)], "bills/0": [(1, 0)]}
    assert (receipt.dead, receipt.expired, receipt.invalid) == ([5], [4], [2])
    assert sorted(offset for offset, _ in receipt.letters[f"{LETTERS}/0"]) == [2, 4, 5]
    assert (receipt.barrier, receipt.void, receipt.gone) == (False, [], None)


def test_the_same_request_is_not_delivered_twice(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter
) -> None:
    pend(to(), to())

    dispatch.tick(NOW_MS)
    dispatch.tick(NOW_MS)

    assert writer.sent_to("orders") == [0, 1]


def test_a_cancelled_request_is_never_delivered(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter
) -> None:
    pend(to(caller_id="a"), to(caller_id="b"), Cancel("a"))

    dispatch.tick(NOW_MS)

    assert writer.sent_to("orders") == [1]


def test_a_delivery_frees_its_caller_id(dispatch: Dispatch, pend: Pend, client: Any) -> None:
    pend(to(caller_id="a"), to(due_ms=NOW_MS + 1, caller_id="b"))

    dispatch.tick(NOW_MS)

    assert held(client).holders == {"b": 1}


def test_a_full_batch_is_followed_by_the_next_at_once(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    pend(*(to() for _ in range(7)))
    dispatch = make(batch_limit=3)
    ticks = 0
    while dispatch.tick(NOW_MS).is_full:
        ticks += 1
        assert ticks < 9

    assert writer.sent_to("orders") == list(range(7))
    assert max(len(list(receipt.removals())) for receipt in writer.receipts) == 3


def test_a_batch_ends_before_its_receipt_is_too_large(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    room = 20_000
    monkeypatch.setattr(targets, "ids", lambda topics: dict.fromkeys(topics, "abcdefgh"))
    monkeypatch.setattr(receipt_room, "MOST_RECEIPT_BYTES", room)
    dispatch = make()
    pend(*(to(f"{n}".ljust(120, "x")) for n in range(200)))

    while held(client).due:
        assert dispatch.tick(NOW_MS).is_full or not held(client).due

    assert [outgoing.offset for outgoing in writer.committed] == list(range(200))
    sizes = [len(encode(receipt)) for receipt in writer.receipts]
    assert max(sizes) < room < 2 * min(sizes[:-1])


def test_a_receipt_takes_no_more_than_is_reckoned_for_its_outcomes() -> None:
    names = [f"{n}".ljust(120, "x") for n in range(100)]
    outcomes = [(10**13 - 1 - n, 10**13 - 1 - n) for n in range(100)]
    places = {f"{name}/99999": [pair] for name, pair in zip(names, outcomes, strict=True)}
    dead, ids = [offset for offset, _ in outcomes], dict.fromkeys(names, "abcdefgh")
    sizes = [
        len(encode(Receipt(NOW_MS, delivered=places, topics=ids))),
        len(encode(Receipt(NOW_MS, letters=places, dead=dead, topics=ids))),
    ]

    reckoned = sum(outcome_bytes(name) + topic_bytes(name) for name in names)

    assert max(sizes) <= reckoned + 100 <= 1.1 * min(sizes)


def test_dead_letters_that_a_receipt_has_no_room_for_are_written_with_the_next(
    make: Make, pend: Pend, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 2 * outcome_bytes("orders") + topic_bytes("orders")
    room += outcome_bytes(LETTERS) + topic_bytes(LETTERS)
    monkeypatch.setattr(receipt_room, "MOST_RECEIPT_BYTES", room)
    pend(to(), invalid(), invalid(), to())
    dispatch = make()

    first = dispatch.tick(NOW_MS)

    assert first.is_full
    assert [outgoing.offset for outgoing in writer.committed] == [0, 3, 1]
    dispatch.tick(NOW_MS)
    assert [outgoing.offset for outgoing in writer.committed] == [0, 3, 1, 2]


def test_a_request_stored_during_a_batch_does_not_wait_for_the_next_poll(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    pend(to(), to(), to())
    dispatch = make(batch_limit=2)
    assert dispatch.tick(NOW_MS).is_full
    pend(to(due_ms=NOW_MS - 9))

    while dispatch.tick(NOW_MS).is_full:
        pass

    assert sorted(writer.sent_to("orders")) == [0, 1, 2, 3]


def test_the_record_of_a_promotion_is_forgotten_when_the_request_ends(
    dispatch: Dispatch, index: ShardIndex
) -> None:
    store(index, 0, 2, {0: Cold(None), 1: Cold(None)})
    carried = {2: to(origin=0), 3: to(due_ms=NOW_MS + 9, origin=1)}
    store(index, 2, 4, {o: Carried(o - 2, o - 2, None, asked) for o, asked in carried.items()})

    dispatch.tick(NOW_MS)

    assert index.moved([0, 1]) == {1: 3}


class NoRates:
    """Rules without any rate."""

    def limited(self) -> dict[str, int]:
        return {}

    def count(self, cluster: str, more: Mapping[str, int], now_ms: int) -> dict[str, int]:
        raise AssertionError(more)


def test_with_rules_receipts_record_the_read_position_even_if_nothing_is_due(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    dispatch = make(rates=NoRates())
    pend(to(due_ms=NOW_MS + 60_000))
    for passed_s in range(12):
        dispatch.tick(NOW_MS + 1000 * passed_s)
    pend(to(due_ms=NOW_MS + 60_000))
    for passed_s in range(1, 3):
        dispatch.tick(NOW_MS + 1000 * passed_s)
    assert [receipt.read for receipt in writer.receipts] == [1]

    dispatch.tick(NOW_MS + 5000)
    assert [receipt.read for receipt in writer.receipts] == [1, 2]


def test_a_batch_whose_requests_are_all_cancelled_is_never_in_flight(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, index: ShardIndex,
    connections: redis.ConnectionPool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pend(to(caller_id="a"))
    unavailable = targets.unavailable

    def cancelled_in_between(topics: Iterable[str]) -> Mapping[str, Refusal]:
        store(index, 1, 2, {1: Cancel("a")})
        monkeypatch.setattr(targets, "unavailable", unavailable)
        return unavailable(topics)

    monkeypatch.setattr(targets, "unavailable", cancelled_in_between)
    dispatch.tick(NOW_MS)

    assert writer.calls == []
    assert not Inspector(connections).is_in_flight(SHARD, 0)


@pytest.mark.parametrize("step", ["begin", "send orders@0", "flush", "commit"])
@pytest.mark.parametrize("doubt", [Fenced("fenced"), JournalLost("lost")], ids=["fenced", "lost"])
def test_a_failure_before_the_commit_is_known_changes_no_entry(
    dispatch: Dispatch,
    pend: Pend,
    writer: FakeWriter,
    client: Any,
    step: str,
    doubt: RecoveryRequired,
) -> None:
    pend(to(), invalid())
    before = held(client)
    writer.before[step] = doubt

    with pytest.raises(type(doubt)):
        dispatch.tick(NOW_MS)

    assert held(client) == before
    assert writer.receipts == []


def test_a_transaction_stamped_too_early_is_repeated_when_it_is_due(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, client: Any
) -> None:
    pend(to(), to())
    writer.before["commit"] = TooEarly("Kafka's clock is 1000 ms before it")

    did = dispatch.tick(NOW_MS)

    assert (did.due_ms, did.is_full, did.next_due_ms) == ([], False, NOW_MS)
    assert held(client).offsets() == [0, 1]
    dispatch.tick(NOW_MS + 1000)
    assert [o.topic for o in writer.committed] == ["orders", "orders"]
    assert writer.not_before_ms == NOW_MS


def test_an_owner_that_was_replaced_during_its_commit_removes_nothing(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, client: Any
) -> None:
    pend(to())
    commit = writer.commit

    def commit_slowly(receipt: Any, not_before_ms: int = 0) -> int:
        client.set(PREFIX + "receipts", 5)
        return commit(receipt)

    writer.commit = commit_slowly  # type: ignore[method-assign]

    with pytest.raises(PositionsMoved):
        dispatch.tick(NOW_MS)

    assert held(client).offsets() == [0]


def test_a_request_cancelled_after_it_was_read_ahead_is_not_delivered(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    dispatch = make(batch_limit=2)
    pend(to(), to(), to(caller_id="unwanted"), to())
    dispatch.tick(NOW_MS)
    pend(Cancel("unwanted"))

    dispatch.tick(NOW_MS)

    assert [o.offset for o in writer.committed] == [0, 1, 3]


def test_cancels_during_a_batch_do_not_change_the_order_of_those_behind_it(
    make: Make, pend: Pend, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = make(batch_limit=2)
    pend(*(to(caller_id=f"id{n}") for n in range(6)))
    begin = writer.begin

    def cancelled_meanwhile() -> None:
        begin()
        monkeypatch.setattr(writer, "begin", begin)
        pend(Cancel("id0"))  # too late, but it is applied to the index

    monkeypatch.setattr(writer, "begin", cancelled_meanwhile)

    for _ in range(3):
        dispatch.tick(NOW_MS)

    assert [o.offset for o in writer.committed] == [0, 1, 2, 3, 4, 5]


def test_each_payload_is_read_once_while_another_process_stores_requests(
    make: Make, pend: Pend, writer: FakeWriter, index: ShardIndex, others_index: ShardIndex,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    dispatch = make(batch_limit=2)
    pend(*(to() for _ in range(6)))
    others_index.load()
    read: list[int] = []
    due, begin, offsets = index.due, writer.begin, numbers(6)

    def due_entries(*asked: Any, **more: Any) -> DueEntries:
        found = due(*asked, **more)
        read.extend(offset for offset, _ in found.entries)
        return found

    def begin_and_store() -> None:
        begin()
        stored = next(offsets)
        store(others_index, stored, stored + 1, {stored: to(due_ms=NOW_MS + 60_000)})

    monkeypatch.setattr(index, "due", due_entries)
    monkeypatch.setattr(writer, "begin", begin_and_store)
    for _ in range(3):
        dispatch.tick(NOW_MS)

    assert [o.offset for o in writer.committed] == [0, 1, 2, 3, 4, 5]
    assert read == [0, 1, 2, 3, 4, 5]


def test_in_a_backlog_a_new_request_with_an_earlier_due_time_waits_for_two_batches(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    dispatch = make(batch_limit=2)
    pend(*(to() for _ in range(20)))
    dispatch.tick(NOW_MS)
    pend(to("orders", NOW_MS - 1000))

    for _ in range(3):
        dispatch.tick(NOW_MS)

    assert [o.offset for o in writer.committed] == [0, 1, 2, 3, 4, 20, 5]
