"""Targets that are missing, unavailable or paused: their requests wait, in bands, and nobody else does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis

from blackbox.core import parking
from blackbox.core.dispatch import Dispatch
from blackbox.core.due_batch import (
    LONGEST_RETRY_MS,
    QUEUED,
)  # fmt: skip
from blackbox.core.parking import BANDS, band_at
from blackbox.index.inspector import Inspector
from blackbox.index.shard_index import ShardIndex
from blackbox.index.shared_state import SharedState
from blackbox.records.errors import (
    IndexFull,
    Refused,
)
from blackbox.records.request import Reason
from tests.contract.held import GRACE_S, NOW_MS, PREFIX, SHARD, held
from tests.support.fakes import FakeJournal, FakeTargets, FakeWriter
from tests.unit.dispatch.entries import (
    LETTERS,
    UNKNOWN,
    Make,
    Pend,
    invalid,
    letter,
    prefers_the_same_band,
    stored_entry,
    to,
    told,
)


def test_a_missing_target_is_retried_with_growing_delays_and_then_dead_lettered(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any
) -> None:
    pend(to(caller_id="a"))
    targets.refusals["orders"] = UNKNOWN
    dispatch = make(retries=8)
    now_ms, waits_s = NOW_MS, []
    while not writer.committed:
        did = dispatch.tick(now_ms)
        if held(client).due:
            [(at_ms, _)] = held(client).due
            assert did.next_due_ms == at_ms
            waits_s.append((at_ms - now_ms) / 1000)
            assert dispatch.tick(at_ms - 1).postponed == 0
            now_ms = at_ms

    assert waits_s == [1, 2, 4, 8, 16, 32, 60, 60]
    assert told(letter(writer, 0)) == (UNKNOWN[0], UNKNOWN[1] + ", tried 9 times")
    assert letter(writer, 0).value == b"record 0"
    assert writer.receipts[0].dead == [0]
    assert held(client).holders == {}


def test_a_message_for_a_restored_target_keeps_its_due_time(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    pend(to())
    targets.refusals["orders"] = UNKNOWN
    dispatch.tick(NOW_MS)
    targets.refusals.clear()

    did = dispatch.tick(NOW_MS + 1000)

    assert did.due_ms == [NOW_MS]
    assert dict(writer.committed[0].headers)["blackbox-due-ms"] == str(NOW_MS)


def test_an_unreachable_target_is_never_given_up(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any
) -> None:
    pend(to())
    targets.refusals["orders"] = (Reason.UNREACHABLE, "no leader")
    dispatch = make(retries=2)
    for number in range(20):
        dispatch.tick(NOW_MS + number * LONGEST_RETRY_MS)

    assert writer.committed == []
    assert (stored_entry(client, 0).attempts, stored_entry(client, 0).detail) == (0, "no leader")
    targets.refusals["orders"] = UNKNOWN
    dispatch.tick(NOW_MS)
    assert stored_entry(client, 0).attempts == 1
    assert stored_entry(client, 0).detail == f"{UNKNOWN[1]}; attempt 1 of 3"
    assert held(client).due == [(NOW_MS + 1000, 0)]


def test_a_parked_dead_letter_keeps_its_reason(
    dispatch: Dispatch, pend: Pend, targets: FakeTargets, client: Any
) -> None:
    pend(to()._replace(reason=Reason.EXPIRED, detail="due 9 ms ago"))
    targets.refusals[LETTERS] = (Reason.UNREACHABLE, "no leader")

    dispatch.tick(NOW_MS)

    stored = stored_entry(client, 0)
    assert (stored.waits, stored.detail) == (1, "due 9 ms ago")


def test_a_paused_target_receives_nothing_and_does_not_delay_others(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, connections: redis.ConnectionPool
) -> None:
    pend(to(), to("bills"))
    shared = SharedState(connections)
    shared.pause("orders", NOW_MS, [SHARD])
    dispatch.tick(NOW_MS)
    assert [o.topic for o in writer.committed] == ["bills"]
    shared.resume("orders", [SHARD])
    for _ in range(2):
        dispatch.tick(NOW_MS)
    assert [o.topic for o in writer.committed] == ["bills", "orders"]


def test_a_parked_request_is_not_touched_until_its_target_accepts_messages(
    dispatch: Dispatch, pend: Pend, targets: FakeTargets, index: ShardIndex, client: Any
) -> None:
    pend(*(to() for _ in range(5)), to(due_ms=NOW_MS + 9))
    targets.refusals["orders"] = (Reason.UNREACHABLE, "no leader")
    did = dispatch.tick(NOW_MS)
    assert (did.postponed, did.next_due_ms) == (5, NOW_MS + 9)
    parked = held(client)
    for number in range(3):
        did = dispatch.tick(NOW_MS + number)
        assert (did.postponed, did.oldest_ms, did.pending) == (0, NOW_MS + 9, 6)
    assert held(client) == parked
    assert Inspector(index.connections).pending_at(SHARD, 0).next_try_ms is None  # type: ignore[union-attr]


@pytest.mark.parametrize("is_reopened", [False, True])
def test_parked_requests_are_delivered_by_due_time_and_do_not_delay_others(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any, connections: Any,
    is_reopened: bool,
) -> None:  # fmt: skip
    due = [7, 3, 9, 1, 8, 2]
    pend(*(to(due_ms=NOW_MS + ms) for ms in due))
    targets.refusals["orders"] = (Reason.UNREACHABLE, "no leader")
    dispatch = make(batch_limit=4)
    while dispatch.tick(NOW_MS + 10).postponed:
        pass
    assert not writer.committed
    if is_reopened:
        index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
        index.load()
        dispatch = replace(dispatch, index=index)
    targets.refusals.clear()
    pend(to("bills", due_ms=NOW_MS + 20), to(due_ms=NOW_MS + 15))

    first = dispatch.tick(NOW_MS + 20)
    assert first.is_full, "more may be delivered at once"
    assert writer.sent_to("bills") == [6]
    for _ in range(9):
        dispatch.tick(NOW_MS + 20)

    order = sorted(range(6), key=lambda offset: due[offset])
    assert writer.sent_to("orders") == [*order, 7]
    assert held(client).due == []


def test_a_request_parked_behind_a_backlog_says_so(
    make: Make, pend: Pend, targets: FakeTargets, client: Any
) -> None:
    pend(*(to() for _ in range(5)))
    targets.refusals["orders"] = (Reason.UNREACHABLE, "no leader")
    dispatch = make(batch_limit=3)
    for _ in range(2):
        dispatch.tick(NOW_MS)
    targets.refusals.clear()
    pend(to(due_ms=NOW_MS + 1))
    dispatch.tick(NOW_MS + 1)
    assert stored_entry(client, 5).detail == QUEUED


def test_a_resumed_target_catches_up_under_its_own_load(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    targets.refusals["orders"] = (Reason.UNREACHABLE, "no leader")
    dispatch = make(batch_limit=20)
    pend(*(to() for _ in range(100)))
    while dispatch.tick(NOW_MS).postponed:
        pass
    targets.refusals.clear()
    for number in range(1, 100):
        pend(*(to(due_ms=NOW_MS + number) for _ in range(12)))
        did = dispatch.tick(NOW_MS + number)
    assert did.pending <= 24
    assert writer.sent_to("orders") == sorted(writer.sent_to("orders"))


def test_a_resumed_target_catches_up_under_a_load_for_others(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    targets.refusals["orders"] = (Reason.UNREACHABLE, "no leader")
    dispatch = make(batch_limit=10)
    pend(*(to(due_ms=NOW_MS) for _ in range(40)))
    for _ in range(10):
        dispatch.tick(NOW_MS)
    pend(*(to("bills", due_ms=NOW_MS) for _ in range(11)))
    dispatch.tick(NOW_MS)
    targets.refusals.clear()
    for number in range(1, 8):
        pend(to("bills", due_ms=NOW_MS + number))
        dispatch.tick(NOW_MS + number)
    assert writer.sent_to("orders") == list(range(40))


def test_a_target_that_is_paused_again_does_not_delay_others(
    make: Make, pend: Pend, writer: FakeWriter, connections: redis.ConnectionPool
) -> None:
    shared = SharedState(connections)
    shared.pause("orders", NOW_MS, [SHARD])
    dispatch = make(batch_limit=4)
    pend(*(to() for _ in range(20)))
    for _ in range(8):
        dispatch.tick(NOW_MS)
    shared.resume("orders", [SHARD])
    for _ in range(2):
        dispatch.tick(NOW_MS)
    pend(*(to("bills", due_ms=NOW_MS + number) for number in range(20)))
    shared.pause("orders", NOW_MS, [SHARD])
    for _ in range(12):
        dispatch.tick(NOW_MS + 30)
    assert writer.sent_to("bills") == list(range(20, 40))


def test_a_target_that_loses_its_leader_again_does_not_delay_others(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, monkeypatch: Any
) -> None:
    away = Reason.UNREACHABLE, "no leader"
    targets.refusals["orders"] = away
    dispatch = make(batch_limit=4)
    pend(*(to() for _ in range(20)))
    while dispatch.tick(NOW_MS).postponed:
        pass
    pend(*(to("bills", NOW_MS + number) for number in range(20)))
    targets.refusals.clear()
    limits = targets.limits

    def gone(topics: Any) -> Any:
        targets.refusals["orders"] = away
        return limits(topics)

    monkeypatch.setattr(targets, "limits", gone)
    for _ in range(12):
        dispatch.tick(NOW_MS + 50)
    assert writer.sent_to("bills") == list(range(20, 40))


def test_a_request_due_with_the_last_of_a_backlog_is_not_parked_behind_it(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    targets.refusals["orders"] = (Reason.UNREACHABLE, "no leader")
    dispatch = make(batch_limit=20)
    pend(to())
    dispatch.tick(NOW_MS)
    targets.refusals.clear()
    pend(to(due_ms=NOW_MS + 1))
    assert dispatch.tick(NOW_MS + 1).postponed == 0
    assert writer.sent_to("orders") == [0, 1]


def test_at_least_once_postponed_requests_are_not_overtaken_by_the_batch_read_ahead(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, monkeypatch: Any
) -> None:
    writer.exactly_once = False
    dispatch = make(batch_limit=4)
    pend(*(to(due_ms=NOW_MS + number) for number in range(8)))
    flush, away = writer.flush, (Reason.UNREACHABLE, "no leader")

    def lost(hopeless: Any = dict) -> Any:
        targets.refusals["orders"] = writer.failing["orders"] = away
        return flush(hopeless)

    with monkeypatch.context() as patched:
        patched.setattr(writer, "flush", lost)
        dispatch.tick(NOW_MS + 10)
    writer.failing.clear()
    targets.refusals.clear()
    for number in range(10):
        dispatch.tick(NOW_MS + 500 + 300 * number)
    assert writer.sent_to("orders") == list(range(8))


def test_a_batch_read_ahead_does_not_overtake_requests_that_the_previous_one_parks(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, monkeypatch: Any
) -> None:
    targets.refusals["orders"] = (Reason.UNREACHABLE, "no leader")
    dispatch = make(batch_limit=4)
    pend(to("bills"), *(to(due_ms=NOW_MS + 1 + number) for number in range(10)))
    limits = targets.limits

    def back(topics: Any) -> Any:
        targets.refusals.clear()
        return limits(topics)

    monkeypatch.setattr(targets, "limits", back)
    for _ in range(10):
        dispatch.tick(NOW_MS + 100)
    assert writer.sent_to("orders") == list(range(1, 11))


def test_consecutive_batches_do_not_park_two_targets_in_one_band(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, monkeypatch: Any
) -> None:
    monkeypatch.setattr(parking, "bands_of", lambda target: iter([7]))
    away = Reason.UNREACHABLE, "no leader"
    targets.refusals |= {"orders": away, "cards": away}
    dispatch = make(batch_limit=4)
    pend(
        to("bills"), *(to(due_ms=NOW_MS + 1) for _ in range(3)),
        to("bills", due_ms=NOW_MS + 2), *(to("cards", due_ms=NOW_MS + 2) for _ in range(3)),
    )  # fmt: skip
    for _ in range(4):
        dispatch.tick(NOW_MS + 10)
    del targets.refusals["orders"]
    for number in range(3):
        dispatch.tick(NOW_MS + 1000 * number)
    assert len(writer.sent_to("orders")) == 3


def test_a_parked_request_whose_outcome_is_unknown_becomes_a_dead_letter_at_once(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, index: ShardIndex
) -> None:
    targets.refusals["orders"] = (Reason.UNREACHABLE, "no leader")
    pend(to(), to(due_ms=NOW_MS + 5), to("bills", due_ms=NOW_MS + 5000))
    dispatch.tick(NOW_MS + 5)
    assert index.outcome_unknown(NOW_MS + 1, NOW_MS + 10) == 1
    for number in range(3):
        dispatch.tick(NOW_MS + 10 + number)
    assert writer.sent_to(LETTERS) == [0]


def test_requests_in_flight_when_a_target_lost_its_leader_are_delivered_first(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, connections: Any
) -> None:
    pend(*(to(due_ms=NOW_MS + number) for number in range(8)))
    away = Reason.UNREACHABLE, "no leader"
    writer.meanwhile = lambda: targets.refusals.update(orders=away)
    with pytest.raises(Refused):
        make(batch_limit=4).tick(NOW_MS + 10)
    writer.meanwhile = None
    dispatch = make(batch_limit=4)
    index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
    index.load()
    dispatch = replace(dispatch, index=index)
    dispatch.tick(NOW_MS + 20)
    targets.refusals.clear()
    for number in range(10):
        dispatch.tick(NOW_MS + 500 + 300 * number)
    assert writer.sent_to("orders") == list(range(8))


def test_the_next_owner_does_not_touch_parked_requests(
    make: Make, pend: Pend, client: Any, connections: redis.ConnectionPool
) -> None:
    pend(*(to() for _ in range(5)))
    shared = SharedState(connections)
    shared.pause("orders", NOW_MS, [SHARD])
    make().tick(NOW_MS)
    parked = held(client)
    later = make()
    for number in range(3):
        assert later.tick(NOW_MS + number).postponed == 0
    assert held(client) == parked
    shared.resume("orders", [SHARD])
    assert later.tick(NOW_MS + 9).is_full, "the next tick follows at once"
    assert later.tick(NOW_MS + 9).due_ms == [NOW_MS] * 5


def test_parked_requests_do_not_reduce_the_batches_of_other_targets(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    pend(*(to() for _ in range(20)))
    targets.refusals["orders"] = (Reason.UNREACHABLE, "no leader")
    dispatch = make(batch_limit=4)
    while dispatch.tick(NOW_MS).postponed:
        pass
    targets.refusals.clear()
    pend(*(to("bills", due_ms=NOW_MS + number) for number in range(20)))
    for number in range(1, 6):
        dispatch.tick(NOW_MS + 30)
        assert writer.sent_to("bills") == list(range(20, 20 + 4 * number))
        assert writer.sent_to("orders") == list(range(4 * number))


def test_a_request_expires_while_its_target_is_unavailable(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any
) -> None:
    pend(to()._replace(expires_ms=NOW_MS + 500))
    targets.refusals["orders"] = (Reason.UNREACHABLE, "no leader")
    dispatch.tick(NOW_MS)
    assert held(client).due == [(NOW_MS + 1000, 0)]
    dispatch.tick(NOW_MS + 1000)
    assert letter(writer, 0) is not None


def test_two_targets_with_the_same_band_wait_separately(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, monkeypatch: Any
) -> None:
    monkeypatch.setattr(parking, "bands_of", lambda target: iter([7]))
    pend(to("orders"), to("bills"))
    targets.refusals |= dict.fromkeys(("orders", "bills"), (Reason.UNREACHABLE, "no leader"))
    dispatch.tick(NOW_MS)
    del targets.refusals["bills"]
    dispatch.tick(NOW_MS + 1000)
    assert [o.topic for o in writer.committed] == ["bills"]
    targets.refusals.clear()
    dispatch.tick(NOW_MS + 1000)
    assert [o.topic for o in writer.committed] == ["bills", "orders"]


def test_the_lost_payload_of_a_parked_request_is_read_from_kafka(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any, connections: Any,
    journal: FakeJournal,
) -> None:  # fmt: skip
    pend(to(), to())
    targets.refusals["orders"] = (Reason.UNREACHABLE, "no leader")
    dispatch = make()
    dispatch.tick(NOW_MS)
    client.delete(*(f"{PREFIX}msg:{offset:016x}" for offset in range(2)))
    index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
    index.load()
    dispatch = replace(dispatch, index=index)
    targets.refusals.clear()
    dispatch.tick(NOW_MS)
    assert [o.value for o in writer.committed] == [b"read again", b"read again"]


def test_payloads_stay_in_redis_as_long_as_their_requests_wait(
    make: Make, pend: Pend, index: ShardIndex, targets: FakeTargets, client: Any
) -> None:
    """A replacement by id cannot be read again, nor can a record that retention has removed."""
    pend(to("paused"), to())
    targets.refusals["paused"] = (Reason.UNREACHABLE, "paused")
    make().tick(NOW_MS)
    assert client.ttl(f"{PREFIX}msg:{0:016x}") > 3000 * 86_400

    pend(to())
    index.postpone({2: (NOW_MS + 5000 * GRACE_S, None)}, NOW_MS)
    assert client.ttl(f"{PREFIX}msg:{2:016x}") > 5 * GRACE_S


def test_parked_dead_letters_keep_their_payloads_and_are_delivered_after_a_restart(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any, connections: Any
) -> None:
    pend(invalid(), to("bills"))
    targets.refusals = {LETTERS: UNKNOWN, "bills": (Reason.UNREACHABLE, "no leader")}
    dispatch = make()
    dispatch.tick(NOW_MS)
    assert client.ttl(f"{PREFIX}msg:{0:016x}") > 3000 * 86_400, (
        "a record read again would be admitted"
    )

    index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
    index.load()
    dispatch = replace(dispatch, index=index)
    for _ in range(3):
        dispatch.tick(NOW_MS)
    assert writer.committed == []
    del targets.refusals[LETTERS]
    dispatch.tick(NOW_MS)
    dispatch.tick(NOW_MS)

    assert [o.topic for o in writer.committed] == [LETTERS]


def test_a_dead_letter_without_a_free_band_keeps_its_payload_without_being_rewritten(
    dispatch: Dispatch, pend: Pend, targets: FakeTargets, client: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(parking, "bands_of", lambda target: iter([7]))
    pend(to("bills"))
    targets.refusals = dict.fromkeys((LETTERS, "bills"), (Reason.UNREACHABLE, "no leader"))
    dispatch.tick(NOW_MS)
    parked = held(client).due
    pend(to()._replace(reason=Reason.EXPIRED, detail="due 9 ms ago", waits=6))
    for minute in range(120):
        client.expire(f"{PREFIX}msg:{1:016x}", 61)
        dispatch.tick(NOW_MS + minute * LONGEST_RETRY_MS)
        assert held(client).due == [(NOW_MS + (minute + 1) * LONGEST_RETRY_MS, 1), *parked]
        assert client.ttl(f"{PREFIX}msg:{1:016x}") >= GRACE_S
        assert stored_entry(client, 1).waits == 6


@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_target_keeps_its_band_although_the_one_that_it_prefers_is_free_again(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any,
    connections: Any, is_reopened: bool,
) -> None:  # fmt: skip
    other, away = prefers_the_same_band("orders"), (Reason.UNREACHABLE, "no leader")
    targets.refusals |= {other: away, "orders": away}
    pend(to(other), to())
    dispatch.tick(NOW_MS)
    assert len({band_at(score) for score, _ in held(client).due}) == 2
    del targets.refusals[other]
    dispatch.tick(NOW_MS)
    if is_reopened:
        index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
        index.load()
        dispatch = replace(dispatch, index=index)
    pend(to())
    dispatch.tick(NOW_MS)

    assert writer.sent_to(other) == [0]
    assert len({band_at(score) for score, _ in held(client).due}) == 1
    targets.refusals.clear()
    dispatch.tick(NOW_MS)
    assert writer.sent_to("orders") == [1, 2]


def test_hundreds_of_parked_targets_have_a_band_each() -> None:
    parked: dict[int, str] = {}
    for number in range(BANDS // 2):
        band = parking.band_for(f"target-{number}", parked)
        assert band is not None
        assert band not in parked
        parked[band] = f"target-{number}"
    assert all(0 < band <= BANDS for band in parked)


def test_a_thousand_requests_without_a_target_do_not_delay_others(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any
) -> None:
    pend(*(to("gone", due_ms=NOW_MS - 1) for _ in range(1000)), to())
    targets.refusals["gone"] = UNKNOWN

    first = dispatch.tick(NOW_MS)
    assert (first.postponed, first.is_full) == (1000, True)
    dispatch.tick(NOW_MS)

    assert writer.sent_to("orders") == [1000]
    assert len(held(client).due) == 1000


def test_postponing_requests_costs_no_extra_round_trips(
    dispatch: Dispatch, pend: Pend, targets: FakeTargets, index: ShardIndex, client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pend(to("gone"), to(), to("gone"))
    targets.refusals["gone"] = UNKNOWN
    monkeypatch.setattr(index, "postpone", None)

    did = dispatch.tick(NOW_MS)

    assert held(client).due == [(NOW_MS + 1000, 0), (NOW_MS + 1000, 2)]
    assert (did.postponed, did.due_ms, did.next_due_ms) == (2, [NOW_MS], NOW_MS + 1000)


def test_requests_being_postponed_are_not_read_ahead(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    dispatch = make(batch_limit=3)
    pend(to("gone"), to(), to(), to(), to(), to())
    targets.refusals["gone"] = UNKNOWN

    first, second = dispatch.tick(NOW_MS), dispatch.tick(NOW_MS)

    assert writer.sent_to("orders") == [1, 2, 3, 4, 5]
    assert (first.postponed, second.postponed) == (1, 0)
    assert (first.pending, second.pending) == (6, 4)


def test_a_request_that_a_full_redis_cannot_postpone_is_retried_at_the_next_poll(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, index: ShardIndex,
    client: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def refuse(*_: Any) -> None:
        raise IndexFull("Redis has no memory left")

    pend(to("gone"))
    targets.refusals["gone"] = UNKNOWN
    monkeypatch.setattr(index, "postpone", refuse)

    did = dispatch.tick(NOW_MS)

    assert held(client).due == [(NOW_MS, 0)]
    assert did.postponed == 0
