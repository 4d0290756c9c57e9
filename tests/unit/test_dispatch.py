from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count as numbers
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from blackbox.core import delivery_transaction, lost_payload, parking
from blackbox.core.dispatch import Dispatch
from blackbox.core.dispatched import Dispatched
from blackbox.core.due_batch import (
    ALONE_SPREAD_MS,
    LONGEST_RETRY_MS,
    MOST_LETTER_BYTES,
    MOST_LETTER_SPAN,
    QUEUED,
)  # fmt: skip
from blackbox.core.follow_ups import CONTENDED_MS, FollowUps
from blackbox.core.interpret import MOST_REFUSED_BYTES, refused_entry
from blackbox.core.letter_record import RECORD_GONE
from blackbox.core.parking import BANDS, band_at, bands_of
from blackbox.core.plan import Batch, Bounds, Carried, Cold, DueEntries, Positions
from blackbox.core.rate_limit import TURNS_MS, next_turn_ms
from blackbox.core.settlement import Settlement
from blackbox.core.triage import ALONE_PER_TICK, LETTER_LATER_MS, Triage
from blackbox.formats import Options, make_format
from blackbox.index.connection import Clients
from blackbox.index.inspector import Inspector
from blackbox.index.shard_index import ShardIndex
from blackbox.index.shared_state import SharedState
from blackbox.records import entry as entries
from blackbox.records import topic_limits
from blackbox.records.entry import Entry
from blackbox.records.errors import (
    Fenced,
    IndexFull,
    IndexLost,
    JournalLost,
    PositionsMoved,
    RecoveryRequired,
    Refused,
    TooEarly,
)
from blackbox.records.outgoing import MESSAGE_ONLY, Outgoing, Refusal, deliveries
from blackbox.records.receipt import (
    Claim,
    Receipt,
    encode,
    outcome_bytes,
    topic_bytes,
)
from blackbox.records.recurrence import ENDS_TOO_LARGE
from blackbox.records.refusal_causes import BROKEN_RULES
from blackbox.records.request import Cancel, Invalid, Reason, Record, Request, Shard, request_id
from blackbox.records.topic_limits import MOST_PARTS, NO_LIMITS, PARTS_S, Limits, batch_bytes
from blackbox.rules.file import RulesFile
from blackbox.rules.target_rates import TargetRates
from tests.contract.held import GRACE_S, NOW_MS, PREFIX, SHARD, held, store
from tests.fakes import FakeFormat, FakeJournal, FakeTargets, FakeWriter, record

LETTERS = "dead-letters"
UNKNOWN = (Reason.UNKNOWN_TOPIC, "the topic 'orders' does not exist; create it")
TOO_LARGE = (Reason.TOO_LARGE, "larger than max.message.bytes")

Make = Callable[..., Dispatch]


@pytest.fixture
def make(index: ShardIndex, writer: FakeWriter, targets: FakeTargets, journal: FakeJournal) -> Make:
    def make_dispatch(**settings: Any) -> Dispatch:
        names = {"batch_limit", "counted", "cluster"} & settings.keys()
        own = {name: settings.pop(name) for name in names}
        settings.setdefault("follow_ups", FollowUps(SHARD, journal.format, journal))
        settings.setdefault("reread", reread)
        triage = Triage(
            shard=SHARD,
            targets=targets,
            journal=journal,
            dead_letter_topic=LETTERS,
            **settings,
        )
        return Dispatch(index, writer, triage, **own)

    return make_dispatch


@pytest.fixture
def dispatch(make: Make) -> Dispatch:
    return make()


@pytest.fixture
def pend(index: ShardIndex, journal: FakeJournal) -> Callable[..., None]:
    """Make these requests pending, with their records in the journal."""

    def add(*changes: Entry | Cancel) -> None:
        start = len(journal.request_records)
        offsets = range(start, start + len(changes))
        journal.request_records += [record(o, b"record %d" % o, NOW_MS) for o in offsets]
        store(index, start, offsets.stop, dict(zip(offsets, changes, strict=True)))

    return add


Pend = Callable[..., None]


def to(target: str = "orders", due_ms: int = NOW_MS, **more: Any) -> Entry:
    return Entry(target, more.pop("message", b"hello"), due_ms, **more)


def invalid() -> Entry:
    return refused_entry(record(0, b"{"), Invalid(Reason.NOT_JSON, "no JSON"), NOW_MS)


def reread(kept: Record, cause: str | None) -> Entry:
    if cause is not None:
        refusal = BROKEN_RULES.get(cause, NO_JSON)
        return refused_entry(kept, refusal, kept.timestamp_ms)
    return Entry("orders", b"read again", kept.timestamp_ms)


def letter(writer: FakeWriter, offset: int) -> Outgoing:
    [found] = [o for o in writer.committed if o.topic == LETTERS and o.offset == offset]
    return found


def told(outgoing: Outgoing) -> tuple[object, object]:
    headers = dict(outgoing.headers)
    return headers["blackbox-reason"], headers["blackbox-detail"]


def stored_entry(client: Any, offset: int) -> Entry:
    return entries.decode(held(client).payloads[offset])


# one tick


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


def in_doubt(index: ShardIndex, *offsets: int, outcome: str = "delivered") -> None:
    index.mark_doubtful({o: Claim(o, outcome, "elsewhere/0", 7, "") for o in offsets})


def test_a_doubtful_request_that_was_delivered_is_recorded_and_not_sent(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, index: ShardIndex, client: Any
) -> None:
    pend(to(caller_id="a"), to())
    in_doubt(index, 0)

    dispatch.tick(NOW_MS)

    assert [one.offset for one in writer.committed] == [1]
    assert writer.receipts[0].delivered == {"elsewhere/0": [(0, 7)]}
    assert (held(client).due, held(client).holders, index.doubtful) == ([], {}, {})


def test_a_doubtful_dead_letter_is_recorded_with_its_outcome(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, index: ShardIndex
) -> None:
    pend(to())
    in_doubt(index, 0, outcome="expired")

    dispatch.tick(NOW_MS)

    [told] = writer.receipts
    assert (told.expired, told.letters, told.delivered) == ([0], {"elsewhere/0": [(0, 7)]}, {})


def test_a_doubtful_request_that_was_not_delivered_is_sent_at_once(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, index: ShardIndex, journal: FakeJournal
) -> None:
    pend(to())
    in_doubt(index, 0)
    journal.absent = {0}

    dispatch.tick(NOW_MS)

    assert [one.offset for one in writer.committed] == [0]
    assert index.doubtful == {}


def test_a_doubtful_request_waits_with_a_reason_and_others_are_delivered(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, index: ShardIndex, journal: FakeJournal,
    client: Any,
) -> None:  # fmt: skip
    pend(to(), to())
    in_doubt(index, 0)
    journal.unreadable = {0}

    dispatch.tick(NOW_MS)

    assert [one.offset for one in writer.committed] == [1]
    assert stored_entry(client, 0).detail == (
        "cannot read yet whether it was delivered to elsewhere/0 at 7"
    )
    journal.unreadable = set()
    dispatch.tick(NOW_MS + 10_000)
    assert [one.offset for one in writer.committed] == [1]
    assert held(client).due == []


def test_a_doubtful_request_is_checked_with_growing_delays(
    dispatch: Dispatch, pend: Pend, index: ShardIndex, journal: FakeJournal
) -> None:
    pend(to())
    in_doubt(index, 0)
    journal.unreadable = {0}
    for second in range(120):
        dispatch.tick(NOW_MS + 1000 * second)

    assert 12 <= journal.calls.count("check") <= 16


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
    monkeypatch.setattr(delivery_transaction, "MOST_RECEIPT_BYTES", room)
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
    monkeypatch.setattr(delivery_transaction, "MOST_RECEIPT_BYTES", room)
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


# what cannot be delivered


def test_a_message_its_topic_would_refuse_is_dead_lettered_after_the_others(
    pend: Pend, make: Make, writer: FakeWriter, targets: FakeTargets
) -> None:
    targets.strict["compacted"] = Limits(needs_key=True, most_bytes=None)
    dispatch = make(batch_limit=2)
    before_ms = NOW_MS - 5
    pend(to("compacted", before_ms), to("compacted", before_ms, key=b"k"), to("orders", before_ms))

    assert dispatch.tick(NOW_MS).next_due_ms == NOW_MS + LETTER_LATER_MS
    assert [o.offset for o in writer.committed] == [1]

    dispatch.tick(NOW_MS)
    assert [o.offset for o in writer.committed] == [1, 2]

    for _ in range(2):  # the first one ends what was read ahead
        dispatch.tick(NOW_MS + LETTER_LATER_MS)
    assert [o.offset for o in writer.committed] == [1, 2, 0]
    assert told(letter(writer, 0))[0] == Reason.REFUSED


def test_without_a_backlog_a_message_its_topic_would_refuse_is_dead_lettered_at_once(
    pend: Pend, dispatch: Dispatch, writer: FakeWriter, targets: FakeTargets
) -> None:
    targets.strict["compacted"] = Limits(needs_key=True, most_bytes=None)
    pend(to("compacted"), to())

    assert dispatch.tick(NOW_MS).next_due_ms == NOW_MS
    dispatch.tick(NOW_MS)

    assert [o.offset for o in writer.committed] == [1, 0]
    assert told(letter(writer, 0))[0] == Reason.REFUSED


def test_a_message_sent_alone_that_its_topic_would_refuse_is_dead_lettered(
    pend: Pend, dispatch: Dispatch, writer: FakeWriter, targets: FakeTargets
) -> None:
    targets.strict["compacted"] = Limits(needs_key=True, most_bytes=None)
    pend(to("compacted", alone=True))

    dispatch.tick(NOW_MS)
    dispatch.tick(NOW_MS)

    assert told(letter(writer, 0))[0] == Reason.REFUSED


def test_a_message_the_client_refuses_becomes_a_dead_letter_in_the_same_transaction(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, client: Any
) -> None:
    pend(to(), to("huge", caller_id="a"))
    writer.refused["huge"] = TOO_LARGE

    did = dispatch.tick(NOW_MS)

    assert writer.calls.count("begin") == 1
    assert writer.receipts[0].delivered == {"orders/0": [(0, 0)]}
    assert writer.receipts[0].dead == [1]
    assert told(letter(writer, 1)) == TOO_LARGE
    assert letter(writer, 1).value == b"record 1"
    assert (did.due_ms, did.dead) == ([NOW_MS], {"too-large": 1})
    assert (held(client).due, held(client).holders) == ([], {})


def test_the_record_of_a_promotion_is_forgotten_when_the_request_ends(
    dispatch: Dispatch, index: ShardIndex
) -> None:
    store(index, 0, 2, {0: Cold(None), 1: Cold(None)})
    carried = {2: to(origin=0), 3: to(due_ms=NOW_MS + 9, origin=1)}
    store(index, 2, 4, {o: Carried(o - 2, o - 2, None, asked) for o, asked in carried.items()})

    dispatch.tick(NOW_MS)

    assert index.moved([0, 1]) == {1: 3}


def test_the_dead_letter_of_an_invalid_request_is_its_record(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, journal: FakeJournal
) -> None:
    original = Record(0, NOW_MS, b"\xffk", b"{not json", [("h", b"\xfe"), ("i", None)])
    pend(refused_entry(original, Invalid(Reason.NOT_JSON, "see byte 1"), NOW_MS))
    journal.request_records.clear()

    did = dispatch.tick(NOW_MS)

    found = letter(writer, 0)
    assert (found.key, found.value) == (b"\xffk", b"{not json")
    assert found.headers[:2] == [("h", b"\xfe"), ("i", None)]
    assert told(found) == ("not-json", "see byte 1")
    assert did.dead == {"not-json": 1}


def test_an_expired_request_is_not_delivered(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter
) -> None:
    late_ms = NOW_MS - 50
    pend(to(due_ms=late_ms, expires_ms=NOW_MS - 1), to(due_ms=late_ms, expires_ms=NOW_MS))

    did = dispatch.tick(NOW_MS)

    assert writer.sent_to("orders") == [1]
    assert told(letter(writer, 0)) == ("expired", "due 50 ms ago, which exceeds expires_after")
    assert did.dead == {"expired": 1}


def test_a_dead_letter_too_large_for_its_topic_is_sent_without_its_value(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter
) -> None:
    pend(invalid())
    writer.refuses = lambda o: TOO_LARGE if o.value is not None else None

    dispatch.tick(NOW_MS)

    assert letter(writer, 0).value is None
    assert letter(writer, 0).key == b"key"
    assert writer.receipts[0].letters == {f"{LETTERS}/0": [(0, 0)]}


def test_a_dead_letter_that_the_client_refuses_in_every_form_requires_recovery(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, client: Any
) -> None:
    pend(invalid())
    writer.refused[LETTERS] = TOO_LARGE

    with pytest.raises(RecoveryRequired, match="TB/3@0: no form of its dead letter can be sent"):
        dispatch.tick(NOW_MS)

    assert held(client).offsets() == [0]


def test_dead_letters_are_parked_while_their_topic_is_missing(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any
) -> None:
    pend(invalid(), to())
    targets.refusals[LETTERS] = UNKNOWN

    did = dispatch.tick(NOW_MS)

    assert writer.sent_to("orders") == [1]
    assert (did.dead, did.retried) == ({}, 1)
    [(score, offset)] = held(client).due
    assert (band_at(score), offset) == (next(bands_of(parking.LETTERS)), 0)
    for second in range(10):
        assert dispatch.tick(NOW_MS + 1000 * second).retried == 0, "it is not touched again"
    targets.refusals.clear()
    dispatch.tick(NOW_MS + 10_000)
    assert told(letter(writer, 0)) == ("not-json", "no JSON")


# targets that may recover


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
            assert dispatch.tick(at_ms - 1).retried == 0
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
    assert (did.retried, did.next_due_ms) == (5, NOW_MS + 9)
    parked = held(client)
    for number in range(3):
        did = dispatch.tick(NOW_MS + number)
        assert (did.retried, did.oldest_ms, did.pending) == (0, NOW_MS + 9, 6)
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
    while dispatch.tick(NOW_MS + 10).retried:
        pass
    assert not writer.committed
    if is_reopened:
        dispatch.index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
        dispatch.index.load()
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
    while dispatch.tick(NOW_MS).retried:
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
    while dispatch.tick(NOW_MS).retried:
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
    assert dispatch.tick(NOW_MS + 1).retried == 0
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
    dispatch.index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
    dispatch.index.load()
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
        assert later.tick(NOW_MS + number).retried == 0
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
    while dispatch.tick(NOW_MS).retried:
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
    dispatch.index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
    dispatch.index.load()
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
    index.defer({2: (NOW_MS + 5000 * GRACE_S, None)}, NOW_MS)
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

    dispatch.index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
    dispatch.index.load()
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


def prefers_the_same_band(target: str) -> str:
    """Another target, which would be parked in the same band."""
    band = next(bands_of(target))
    return next(f"t{n}" for n in numbers() if next(bands_of(f"t{n}")) == band)


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
        dispatch.index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
        dispatch.index.load()
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


class NoPace:
    """Rules without any rate."""

    def limited(self) -> dict[str, int]:
        return {}

    def count(self, cluster: str, more: Mapping[str, int], now_ms: int) -> dict[str, int]:
        raise AssertionError(more)


def test_with_rules_receipts_record_the_read_position_even_if_nothing_is_due(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    dispatch = make(pace=NoPace())
    pend(to(due_ms=NOW_MS + 60_000))
    for passed_s in range(12):
        dispatch.tick(NOW_MS + 1000 * passed_s)
    pend(to(due_ms=NOW_MS + 60_000))
    for passed_s in range(1, 3):
        dispatch.tick(NOW_MS + 1000 * passed_s)
    assert [receipt.read for receipt in writer.receipts] == [1]

    dispatch.tick(NOW_MS + 5000)
    assert [receipt.read for receipt in writer.receipts] == [1, 2]


Paced = Callable[[str], TargetRates]


@pytest.fixture
def paced(connections: redis.ConnectionPool, tmp_path: Path) -> Paced:
    """The rates of these rules."""

    def rates(rules: str) -> TargetRates:
        path = tmp_path / "callers.toml"
        path.write_text(rules)
        return TargetRates(RulesFile(path), SharedState(connections))

    return rates


def one_per_second(paced: Paced) -> TargetRates:
    return paced("[targets.orders]\nmessages_per_second = 1")


def test_a_batch_repeated_after_a_failed_commit_uses_no_more_of_the_rate(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced
) -> None:
    pace = one_per_second(paced)
    pend(*(to() for _ in range(20)))
    for later_s in range(10):
        writer.before["commit"] = JournalLost("no answer")
        with pytest.raises(JournalLost):
            make(pace=pace).tick(NOW_MS + 1000 * later_s)
    dispatch = make(pace=pace)

    for later_ms in range(10_000, 32_000, 100):
        dispatch.tick(NOW_MS + later_ms)

    assert writer.sent_to("orders") == list(range(20))


@pytest.mark.parametrize("rules", ["[targets.orders]\nmessages_per_second = 1000", ""])
def test_a_raised_or_removed_rate_applies_to_messages_that_wait_already(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced, rules: str
) -> None:
    dispatch = make(pace=one_per_second(paced))
    pend(*(to() for _ in range(100)))
    dispatch.tick(NOW_MS)
    assert writer.sent_to("orders") == [0]

    dispatch.triage = replace(dispatch.triage, pace=paced(rules))
    for later_ms in range(1000, 3000, 100):
        dispatch.tick(NOW_MS + later_ms)

    assert writer.sent_to("orders") == list(range(100))


def test_a_cancelled_backlog_uses_nothing_of_a_rate(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced
) -> None:
    dispatch = make(pace=one_per_second(paced))
    pend(*(to(caller_id=f"a{n}") for n in range(100)))
    dispatch.tick(NOW_MS)

    pend(*(Cancel(f"a{n}") for n in range(1, 100)), to(due_ms=NOW_MS + 1000))
    for later_ms in range(1000, 3000, 100):
        dispatch.tick(NOW_MS + later_ms)

    assert writer.sent_to("orders") == [0, 199]


def test_the_rate_of_a_target_is_that_of_its_own_cluster(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced
) -> None:
    pace = one_per_second(paced)
    for cluster in ("staging", "production"):
        pend(to())
        make(pace=pace, cluster=cluster).tick(NOW_MS)

    assert writer.sent_to("orders") == [0, 1]


def test_a_rate_that_redis_cannot_count_is_kept_and_delays_no_other_target(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced, monkeypatch: Any
) -> None:
    dispatch = make(pace=one_per_second(paced))
    trips = 0

    def silent(clients: Clients, *commands: Any) -> Any:
        nonlocal trips
        trips += 1
        raise IndexLost("no answer")

    monkeypatch.setattr(Clients, "together", silent)
    pend(*(to() for _ in range(5)), to("bills"))
    for later_ms in range(0, 3000, 100):
        dispatch.tick(NOW_MS + later_ms)

    assert (writer.sent_to("orders"), writer.sent_to("bills")) == ([0, 1, 2], [5])
    assert trips == 1, "each takes as long as a timeout"


def test_targets_with_a_rate_are_counted_together(
    make: Make, pend: Pend, paced: Paced, monkeypatch: Any
) -> None:
    slow = [f"slow-{number}" for number in range(5)]
    dispatch = make(
        pace=paced("".join(f"[targets.{to}]\nmessages_per_second = 1\n" for to in slow))
    )
    trips, together = 0, Clients.together

    def counting(clients: Clients, *commands: Any) -> Any:
        nonlocal trips
        trips += 1
        return together(clients, *commands)

    monkeypatch.setattr(Clients, "together", counting)
    pend(*(to(target) for target in slow * 3))
    dispatch.tick(NOW_MS)
    assert trips == 1
    dispatch.tick(NOW_MS + TURNS_MS)
    assert trips == 1, "this second is used up"

    pend(*(to(target, NOW_MS + 1000) for target in slow))
    dispatch.tick(NOW_MS + 1000 + TURNS_MS)
    assert trips == 3, "to look how many may come out, and to count them"


def test_shards_take_turns_in_the_rate_of_a_target() -> None:
    shards = [Shard("TB", partition) for partition in range(4)]
    seconds = range(NOW_MS, NOW_MS + 400_000, 1000)
    first = Counter(min(shards, key=lambda one: next_turn_ms(one, at_ms)) for at_ms in seconds)

    assert min(first[shard] for shard in shards) > 50


def test_parked_messages_come_out_as_soon_as_their_rate_allows(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced
) -> None:
    dispatch = make(pace=one_per_second(paced))
    pend(*(to() for _ in range(20)))
    now_ms, sent_ms = NOW_MS, dict[int, int]()
    for _ in range(100):
        did = dispatch.tick(now_ms)
        sent_ms |= {o: now_ms for o in writer.sent_to("orders") if o not in sent_ms}
        if not did.is_full:
            now_ms = did.next_due_ms or now_ms

    assert sorted(sent_ms) == sorted(sent_ms, key=lambda o: sent_ms[o])
    assert [at_ms // 1000 - NOW_MS // 1000 for at_ms in sent_ms.values()] == list(range(20))


def test_requests_with_expires_after_wait_for_a_rate_like_all_others(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced
) -> None:
    dispatch = make(pace=one_per_second(paced))
    pend(*(to() for _ in range(4)))
    for later_ms in range(0, 20_000, 100):
        if later_ms in range(0, 4000, 500):
            pend(to(due_ms=NOW_MS + later_ms, expires_ms=NOW_MS + later_ms + 5000))
        dispatch.tick(NOW_MS + later_ms)

    sent, expired = writer.sent_to("orders"), writer.sent_to(LETTERS)
    assert sent[:4] == list(range(4)), "none of them overtakes"
    assert sorted(sent + expired) == list(range(12))
    assert {told(letter(writer, offset))[0] for offset in expired} == {"expired"}


def test_a_target_whose_preferred_band_is_taken_waits_for_its_rate(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, paced: Paced
) -> None:
    other = prefers_the_same_band("orders")
    targets.refusals[other] = (Reason.UNREACHABLE, "no leader")
    dispatch = make(pace=one_per_second(paced))
    pend(to(other), *(to() for _ in range(100)))
    dispatch.tick(NOW_MS)
    for later_ms in range(1000, 4000, 100):
        dispatch.tick(NOW_MS + later_ms)
    assert writer.sent_to("orders") == [1, 2, 3, 4]

    dispatch.triage = replace(
        dispatch.triage, pace=paced("[targets.orders]\nmessages_per_second = 1000")
    )
    for later_ms in range(4000, 6000, 100):
        dispatch.tick(NOW_MS + later_ms)

    assert writer.sent_to("orders") == list(range(1, 101))


def test_a_backlog_whose_preferred_band_is_taken_is_not_read_in_each_second(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, paced: Paced
) -> None:
    other = prefers_the_same_band("orders")
    targets.refusals[other] = (Reason.UNREACHABLE, "no leader")
    rates = paced("[targets.orders]\nmessages_per_second = 10")
    dispatch = make(pace=rates, batch_limit=10)
    pend(to(other), *(to() for _ in range(200)))
    while dispatch.tick(NOW_MS).is_full:
        pass

    pend(to("bills", due_ms=NOW_MS + 1500))
    dispatch.tick(NOW_MS + 1500)

    assert writer.sent_to("bills") == [201]


def test_messages_over_a_rate_without_a_free_band_wait_for_a_minute_at_most(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, paced: Paced, client: Any,
    monkeypatch: Any,
) -> None:  # fmt: skip
    monkeypatch.setattr(parking, "bands_of", lambda target: iter([7]))
    targets.refusals["bills"] = (Reason.UNREACHABLE, "no leader")
    pend(to("bills"), *(to() for _ in range(100)))
    dispatch = make(pace=one_per_second(paced))
    dispatch.tick(NOW_MS)

    times = [score for score, _ in held(client).due if not band_at(score)]
    assert len(times) == 99
    assert NOW_MS < min(times) <= NOW_MS + 1000
    assert max(times) <= NOW_MS + LONGEST_RETRY_MS
    for later_ms in range(1000, 5000, 100):
        dispatch.tick(NOW_MS + later_ms)
    assert writer.sent_to("orders") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("seen_after_ms", [0, 100, 1500])
def test_new_due_requests_do_not_overtake_a_backlog_under_a_rate(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced, seen_after_ms: int
) -> None:
    dispatch = make(pace=paced("[targets.orders]\nmessages_per_second = 10"))
    pend(*(to() for _ in range(40)))
    arriving = 0
    for passed_ms in range(0, 20_000, 100):
        if passed_ms % 200 == 0 and seen_after_ms <= passed_ms < 10_000:
            pend(to(due_ms=NOW_MS + passed_ms - seen_after_ms))
            arriving += 1
        dispatch.tick(NOW_MS + passed_ms)

    order = [one.offset for one in writer.committed]
    assert len(order) == 40 + arriving
    assert order[10:40] == list(range(10, 40))  # the first ten were sent while no others waited
    assert max(abs(place - offset) for place, offset in enumerate(order)) <= 10


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


def test_a_thousand_requests_without_a_target_do_not_delay_others(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any
) -> None:
    pend(*(to("gone", due_ms=NOW_MS - 1) for _ in range(1000)), to())
    targets.refusals["gone"] = UNKNOWN

    first = dispatch.tick(NOW_MS)
    assert (first.retried, first.is_full) == (1000, True)
    dispatch.tick(NOW_MS)

    assert writer.sent_to("orders") == [1000]
    assert len(held(client).due) == 1000


# what the broker refuses


def test_the_only_suspect_of_a_refused_transaction_becomes_a_dead_letter(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, client: Any
) -> None:
    pend(to(), to("strict", caller_id="a"), to())
    writer.failing["strict"] = TOO_LARGE

    with pytest.raises(Refused):
        dispatch.tick(NOW_MS)
    assert (writer.committed, writer.receipts) == ([], [])
    assert held(client).offsets() == [0, 1, 2]

    dispatch.tick(NOW_MS)
    assert writer.sent_to("orders") == [0, 2]
    assert told(letter(writer, 1)) == TOO_LARGE
    assert letter(writer, 1).value == b"record 1"
    assert held(client).holders == {}


def test_several_suspects_are_sent_alone_and_the_rest_without_them(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, client: Any
) -> None:
    pend(to(), to("strict"), to("strict"))
    writer.failing["strict"] = Reason.REFUSED, "no record of mine"

    with pytest.raises(Refused):
        dispatch.tick(NOW_MS)
    assert [stored_entry(client, offset).alone for offset in range(3)] == [False, True, True]

    dispatch.tick(NOW_MS)
    assert writer.sent_to("orders") == [0]
    writer.failing.clear()
    dispatch.tick(NOW_MS + 1000)
    assert writer.sent_to("strict") == [1, 2]
    assert [list(receipt.removals()) for receipt in writer.receipts[-2:]] == [[1], [2]]


def test_messages_too_large_for_one_batch_are_sent_in_parts_of_one_transaction(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    """A broker compares max.message.bytes with a complete record batch."""
    pend(*(to("strict") for _ in range(10)), to())
    one = batch_bytes(next(deliveries(SHARD, {0: to("strict")})))
    targets.strict["strict"] = Limits(needs_key=False, most_bytes=3 * one)
    writer.most_together["strict"] = 3

    did = dispatch.tick(NOW_MS)

    assert (len(did.due_ms), len(writer.receipts)) == (11, 1)
    assert writer.sent_to("strict") == list(range(10))
    assert writer.calls.count("flush") == 4


def test_a_topic_that_refuses_a_batch_receives_records_one_by_one(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any
) -> None:
    """Its limits are unknown, or have just changed."""
    pend(to(), *(to("strict") for _ in range(5)))
    writer.most_together["strict"] = 1

    with pytest.raises(Refused):
        dispatch.tick(NOW_MS)
    dispatch.tick(NOW_MS)
    did = dispatch.tick(NOW_MS + 1000)

    assert (len(did.due_ms), len(writer.receipts)) == (5, 2)
    assert writer.sent_to("strict") == [1, 2, 3, 4, 5]
    assert did.dead == {}


def test_records_go_one_by_one_in_one_transaction_also_if_another_shard_noted_that_first(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    def note_by_another_shard(_: Outgoing) -> None:
        targets.send_one_by_one(["strict"])

    pend(to(), *(to("strict") for _ in range(5)))
    writer.most_together["strict"] = 1
    writer.fails = note_by_another_shard

    with pytest.raises(Refused):
        dispatch.tick(NOW_MS)
    dispatch.tick(NOW_MS)
    did = dispatch.tick(NOW_MS + 1000)

    assert (len(did.due_ms), len(writer.receipts)) == (5, 2)


def test_the_parts_of_a_transaction_are_limited_and_do_not_delay_others(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any
) -> None:
    pend(*(to("strict") for _ in range(MOST_PARTS + 11)), to())
    targets.strict["strict"] = NO_LIMITS._replace(one_by_one=True)

    did = dispatch.tick(NOW_MS)

    assert writer.sent_to("orders") == [MOST_PARTS + 11]
    assert writer.sent_to("strict") == list(range(MOST_PARTS + 1))
    assert (len(did.due_ms), did.retried) == (MOST_PARTS + 2, 10)
    dispatch.tick(NOW_MS + 1000)
    assert writer.sent_to("strict") == list(range(MOST_PARTS + 11))


@pytest.mark.parametrize("exactly_once", [True, False])
def test_of_messages_sent_one_by_one_only_the_too_large_one_is_dead_lettered(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, exactly_once: bool
) -> None:
    writer.exactly_once = exactly_once
    pend(
        *(to("strict") for _ in range(3)), to("strict")._replace(message=b"x" * 5000), to("strict")
    )
    writer.most_together["strict"] = 1
    writer.fails = lambda o: (
        TOO_LARGE if o.topic == "strict" and len(o.value or b"") > 1000 else None
    )
    now_ms = NOW_MS
    while len(writer.sent_to("strict")) < 4 or not writer.sent_to(LETTERS):
        now_ms += 1000
        with suppress(Refused):
            dispatch.tick(now_ms)
        assert now_ms < NOW_MS + 20_000, "the shard is stuck"

    assert sorted(writer.sent_to("strict")) == [0, 1, 2, 4]
    assert writer.sent_to(LETTERS) == [3]


def test_dead_letters_are_sent_in_parts_that_their_topic_accepts(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    pend(*(invalid() for _ in range(9)))
    targets.strict[LETTERS] = NO_LIMITS._replace(one_by_one=True)
    writer.most_together[LETTERS] = 1

    did = dispatch.tick(NOW_MS)

    assert writer.sent_to(LETTERS) == list(range(9))
    assert did.dead == {"not-json": 9}


def test_a_dead_letter_too_large_in_every_form_is_retried_a_minute_later(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    pend(invalid(), invalid(), to(), to("huge"))
    targets.strict[LETTERS] = Limits(needs_key=False, most_bytes=100)
    writer.refused["huge"] = TOO_LARGE

    did = dispatch.tick(NOW_MS)

    assert [o.topic for o in writer.committed] == ["orders"]
    assert (did.due_ms, did.retried) == ([NOW_MS], 3)
    assert held(client).due == [(NOW_MS + 60_000, offset) for offset in (0, 1, 3)]
    assert stored_entry(client, 3).reason == Reason.TOO_LARGE
    [line] = [record.message for record in caplog.records if "stay pending" in record.message]
    assert line.startswith("TB-3: 3 dead letters stay pending: dead-letters: ")
    targets.strict.clear()
    dispatch.tick(NOW_MS + 60_000)
    assert writer.sent_to(LETTERS) == [0, 1, 3]


def test_if_no_dead_letter_fits_there_is_no_transaction_and_nothing_in_flight(
    dispatch: Dispatch,
    pend: Pend,
    writer: FakeWriter,
    targets: FakeTargets,
    client: Any,
    connections: Any,
) -> None:
    pend(invalid(), invalid()._replace(alone=True))
    targets.strict[LETTERS] = Limits(needs_key=False, most_bytes=100)

    for _ in range(2):
        dispatch.tick(NOW_MS)

    assert (writer.receipts, "commit" in writer.calls) == ([], False)
    assert held(client).due == [(NOW_MS + 60_000, 0), (NOW_MS + 60_000, 1)]
    assert not Inspector(connections).is_in_flight(SHARD, 0)


def test_the_payload_of_a_dead_letter_that_does_not_fit_is_kept(
    dispatch: Dispatch, pend: Pend, targets: FakeTargets, client: Any
) -> None:
    """Only its payload shows that it is one: a record read again from Kafka would be admitted."""
    pend(invalid())
    targets.strict[LETTERS] = Limits(needs_key=False, most_bytes=100)
    for minute in range(3):
        client.expire(f"{PREFIX}msg:{0:016x}", 61)
        dispatch.tick(NOW_MS + minute * LONGEST_RETRY_MS)
        assert client.ttl(f"{PREFIX}msg:{0:016x}") >= GRACE_S


def test_a_dead_letter_is_sent_if_only_its_larger_forms_are_accepted(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    pend(invalid())
    targets.strict[LETTERS] = Limits(needs_key=True, most_bytes=None)
    dispatch.tick(NOW_MS)
    assert letter(writer, 0).value == b"{"


def test_dead_letters_are_parked_while_their_topic_is_paused(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, connections: redis.ConnectionPool
) -> None:
    pend(*(invalid() for _ in range(3)))
    shared = SharedState(connections)
    shared.pause(LETTERS, NOW_MS, [SHARD])
    assert dispatch.tick(NOW_MS).retried == 3
    for _ in range(3):
        assert dispatch.tick(NOW_MS).retried == 0
    shared.resume(LETTERS, [SHARD])
    for _ in range(2):
        dispatch.tick(NOW_MS)
    assert writer.sent_to(LETTERS) == [0, 1, 2]


def test_the_dead_letter_of_a_record_without_timestamp_is_parked_and_delivered(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any
) -> None:
    pend(invalid()._replace(due_ms=-1))
    targets.refusals[LETTERS] = UNKNOWN
    dispatch.tick(NOW_MS)
    [(score, _)] = held(client).due
    assert band_at(score) == next(bands_of(parking.LETTERS))
    targets.refusals.clear()
    dispatch.tick(NOW_MS)
    assert writer.sent_to(LETTERS) == [0]


def test_parts_end_before_the_transaction_times_out(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    seconds = iter(numbers())
    monkeypatch.setattr(topic_limits, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    pend(*(to("strict") for _ in range(10)))
    targets.strict["strict"] = NO_LIMITS._replace(one_by_one=True)

    dispatch.tick(NOW_MS)

    assert writer.sent_to("strict") == list(range(int(PARTS_S) + 1))


def test_a_tick_reports_its_deliveries_before_a_refusal(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter
) -> None:
    pend(to(), to("strict")._replace(alone=True))
    writer.failing["strict"] = TOO_LARGE

    with pytest.raises(Refused):
        dispatch.tick(NOW_MS)

    assert (dispatch.done.due_ms, dispatch.done.pending) == ([NOW_MS], 2)


def test_a_suspect_that_is_refused_alone_is_dead_lettered(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter
) -> None:
    pend(to("strict"), to("strict"))
    writer.failing["strict"] = TOO_LARGE
    now_ms, doubts = NOW_MS, 0
    while len(writer.sent_to(LETTERS)) < 2:
        now_ms += 1000
        try:
            dispatch.tick(now_ms)
        except Refused:
            doubts += 1
        assert doubts < 9

    assert writer.sent_to("strict") == []


def test_the_number_of_suspects_per_tick_is_limited(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, client: Any
) -> None:
    pend(*(to(alone=True) for _ in range(ALONE_PER_TICK + 2)))

    did = dispatch.tick(NOW_MS)

    assert writer.calls.count("commit") == ALONE_PER_TICK
    assert did.retried == 2
    assert [due_ms > NOW_MS for due_ms, _ in held(client).due] == [True, True]


def test_a_suspect_whose_target_may_recover_is_postponed(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, client: Any
) -> None:
    pend(to("strict"), to())
    writer.failing["strict"] = (Reason.NOT_AUTHORIZED, "grant Write")

    with pytest.raises(Refused):
        dispatch.tick(NOW_MS)

    assert held(client).due == [(NOW_MS, 1), (NOW_MS + 1000, 0)]
    assert stored_entry(client, 0).attempts == 1


def test_a_message_that_the_broker_always_refuses_becomes_a_dead_letter(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter
) -> None:
    pend(to("odd"), to())
    writer.failing["odd"] = (Reason.BROKER_ERROR, "Broker: Invalid request")
    refusals = 0
    for now_ms in range(NOW_MS, NOW_MS + 120_000, 1000):
        try:
            dispatch.tick(now_ms)
        except Refused:
            refusals += 1

    assert [one.topic for one in writer.committed] == ["orders", LETTERS]
    assert told(letter(writer, 0)) == (
        Reason.BROKER_ERROR,
        "Broker: Invalid request, tried 6 times",
    )
    assert refusals == 6


def test_a_message_that_the_broker_always_refuses_does_not_block_its_batch(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter
) -> None:
    pend(to()._replace(message=b"odd"), to(), to())
    writer.fails = lambda _: (
        (Reason.BROKER_ERROR, "Broker: Invalid request")
        if any(one.value == b"odd" for one, _ in writer._queued)
        else None
    )
    for now_ms in range(NOW_MS, NOW_MS + 120_000, 1000):
        with suppress(Refused):
            dispatch.tick(now_ms)

    assert writer.sent_to("orders") == [1, 2]
    assert writer.sent_to(LETTERS) == [0]


def test_a_dead_letter_that_the_broker_always_refuses_is_sent_in_a_smaller_form(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter
) -> None:
    pend(invalid())
    writer.fails = lambda one: (
        (Reason.BROKER_ERROR, "Broker: Invalid request") if one.value is not None else None
    )
    for now_ms in range(NOW_MS, NOW_MS + 120_000, 1000):
        with suppress(Refused):
            dispatch.tick(now_ms)

    assert letter(writer, 0).value is None


LARGE = record(0, b"{" * (MOST_REFUSED_BYTES + 1))
NO_JSON = Invalid(Reason.NOT_JSON, "no JSON")
OVER_QUOTA = Invalid(Reason.QUOTA, "too many")


def test_a_large_invalid_record_is_complete_in_its_dead_letter_and_not_in_redis(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, journal: FakeJournal, client: Any
) -> None:
    pend(refused_entry(LARGE, NO_JSON, NOW_MS))
    journal.request_records[0] = LARGE
    assert held(client).payloads == {}

    dispatch.tick(NOW_MS)

    assert held(client).due == []
    assert letter(writer, 0).value == LARGE.value
    assert ("CALLER_SERVICE", b"shop") in letter(writer, 0).headers
    assert told(letter(writer, 0)) == (Reason.NOT_JSON, "no JSON")


def test_a_large_record_with_a_forged_header_is_dead_lettered_unchanged(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, journal: FakeJournal
) -> None:
    forged = LARGE._replace(headers=[*LARGE.headers, ("blackbox-carried", b"mine")])
    pend(refused_entry(forged, Invalid(Reason.BAD_HEADERS, "only blackbox may write it"), NOW_MS))
    journal.request_records[0] = forged

    dispatch.tick(NOW_MS)

    assert letter(writer, 0).value == LARGE.value


def test_a_large_request_over_a_quota_is_complete_in_its_dead_letter_and_not_in_redis(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, journal: FakeJournal, client: Any
) -> None:
    refusal = BROKEN_RULES["most_pending"]
    pend(refused_entry(LARGE, refusal, NOW_MS))
    journal.request_records[0] = LARGE
    assert held(client).payloads == {}

    dispatch.tick(NOW_MS)

    assert held(client).due == []
    assert letter(writer, 0).value == LARGE.value
    assert told(letter(writer, 0)) == (Reason.QUOTA, refusal.detail)
    assert writer.receipts[0].dead == [0]


def test_large_refused_requests_take_no_more_room_while_the_dead_letter_topic_is_missing(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any,
    journal: FakeJournal,
) -> None:  # fmt: skip
    pend(*(refused_entry(LARGE, BROKEN_RULES["most_pending"], NOW_MS) for _ in range(5)), to())
    journal.request_records[:5] = [LARGE._replace(offset=n) for n in range(5)]
    targets.refusals[LETTERS] = UNKNOWN

    dispatch.tick(NOW_MS)

    assert writer.sent_to("orders") == [5]
    assert [offset for _, offset in held(client).due] == [*range(5)]
    assert held(client).payloads == {}
    assert all(score >= parking.BAND_MS for score, _ in held(client).due)
    targets.refusals.clear()
    for _ in range(3):
        dispatch.tick(NOW_MS)
    assert [told(letter(writer, n))[0] for n in range(5)] == [Reason.QUOTA] * 5


def test_a_dead_letter_says_if_its_record_is_gone(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, journal: FakeJournal
) -> None:
    pend(refused_entry(LARGE, OVER_QUOTA, NOW_MS), refused_entry(LARGE, NO_JSON, NOW_MS))
    journal.request_records[:] = [None, None]

    dispatch.tick(NOW_MS)

    assert told(letter(writer, 0)) == (Reason.QUOTA, f"too many; {RECORD_GONE}")
    reason, detail = told(letter(writer, 1))
    assert reason == Reason.PAYLOAD_LOST
    assert "refused request is no longer in Kafka" in str(detail)


def test_a_dead_letter_asks_for_the_same_request_if_kafka_has_removed_its_record(
    make: Make, pend: Pend, writer: FakeWriter, journal: FakeJournal, targets: FakeTargets
) -> None:
    asks_for_another = b'{"topic": "bills", "message": "x", "countdown": 0}'
    sent = to(
        message=asks_for_another, key=b"\xff", caller_id="a", caller="shop", expires_ms=NOW_MS + 5000,
        headers=[("CALLER_SERVICE", "shop"), ("trace", b"\xff")],
    )  # fmt: skip
    pend(sent)
    journal.request_records[0] = None
    targets.refusals["orders"] = UNKNOWN

    make(retries=0, follow_ups=FollowUps(SHARD, COUNTDOWN, Log())).tick(NOW_MS)

    found = letter(writer, 0)
    headers: Any = found.headers[:-3]
    assert told(found)[0] == Reason.UNKNOWN_TOPIC
    assert COUNTDOWN.parse(Record(1, NOW_MS, found.key, found.value, headers), NOW_MS) == Request(
        "orders", asks_for_another, NOW_MS, b"\xff", headers, "shop", "a", NOW_MS + 5000
    )
    assert headers == [("CALLER_SERVICE", b"shop"), ("trace", b"\xff")]


def test_a_dead_letter_of_another_format_says_that_it_has_the_message_only(
    make: Make, pend: Pend, writer: FakeWriter, journal: FakeJournal, targets: FakeTargets
) -> None:
    pend(to(key=b"k", caller_id="a"))
    journal.request_records[0] = None
    targets.refusals["orders"] = UNKNOWN

    make(retries=0, follow_ups=FollowUps(SHARD, SCHEDULES, Log())).tick(NOW_MS)

    found = letter(writer, 0)
    assert (found.key, found.value) == (b"k", b"hello")
    reason, detail = told(found)
    assert reason == Reason.UNKNOWN_TOPIC
    assert detail == f"{MESSAGE_ONLY}; {UNKNOWN[1]}, tried 1 times"


def test_large_records_are_read_before_the_transaction_up_to_a_limit(
    dispatch: Dispatch,
    pend: Pend,
    writer: FakeWriter,
    journal: FakeJournal,
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = refused_entry(LARGE, OVER_QUOTA, NOW_MS)._replace(left_bytes=MOST_LETTER_BYTES * 2 // 5)
    pend(*[entry] * 5)
    journal.request_records[:] = [LARGE._replace(offset=offset) for offset in range(5)]
    read, records = list[tuple[int, ...]](), journal.records

    def watched(offsets: Any) -> Any:
        wanted = tuple(offsets)
        if wanted:
            assert writer.calls.count("begin") == len(read), "Kafka is read inside the transaction"
            read.append(wanted)
        return records(wanted)

    monkeypatch.setattr(journal, "records", watched)
    written = list[int]()
    for _ in range(3):
        dispatch.tick(NOW_MS)
        written.append(len(writer.committed))

    assert read == [(0, 1), (2, 3), (4,)]
    assert written == [2, 4, 5]
    assert held(client).due == []


def test_large_invalid_records_are_read_once_up_to_a_limit(
    dispatch: Dispatch,
    pend: Pend,
    writer: FakeWriter,
    journal: FakeJournal,
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = record(0, b"{" * (MOST_LETTER_BYTES * 2 // 5))
    pend(*[refused_entry(large, NO_JSON, NOW_MS)] * 5)
    journal.request_records[:] = [large._replace(offset=offset) for offset in range(5)]
    again, written = list[int](), list[int]()

    def read_again(offsets: Iterable[int]) -> dict[int, Record]:
        again.extend(offsets)
        return {}

    monkeypatch.setattr(journal, "records", read_again)
    for _ in range(2):
        dispatch.tick(NOW_MS)
        written.append(len(writer.committed))

    assert written == [3, 5]
    assert again == []
    assert held(client).due == []


def test_a_large_record_that_was_invalid_is_not_delivered_after_a_change_of_settings(
    make: Make, pend: Pend, writer: FakeWriter, journal: FakeJournal
) -> None:
    pend(refused_entry(LARGE, NO_JSON, NOW_MS))
    journal.request_records[0] = LARGE
    valid = FakeFormat({0: Request("orders", b"m", NOW_MS, None, [], None, None, None)})

    make(reread=partial(lost_payload.reread, valid)).tick(NOW_MS)

    reason, detail = told(letter(writer, 0))
    assert reason == Reason.REFUSED
    assert "is valid by the settings of now" in str(detail)
    assert writer.sent_to("orders") == []


def test_a_dead_letter_has_the_largest_form_that_its_topic_accepts(
    dispatch: Dispatch,
    pend: Pend,
    writer: FakeWriter,
    targets: FakeTargets,
    journal: FakeJournal,
) -> None:
    """A refusal by the broker would abort the transaction of the whole batch."""
    pend(refused_entry(LARGE, NO_JSON, NOW_MS), refused_entry(LARGE, NO_JSON, NOW_MS))
    journal.request_records[:] = [LARGE, LARGE._replace(offset=1, value=b"{" * 100_000)]
    targets.strict[LETTERS] = Limits(needs_key=False, most_bytes=2000)

    dispatch.tick(NOW_MS)

    assert letter(writer, 0).value == LARGE.value
    assert letter(writer, 1).value is None
    assert "value of 100000 bytes left out" in str(told(letter(writer, 1))[1])


def test_dead_letters_of_large_records_are_parked_while_their_topic_is_missing(
    dispatch: Dispatch,
    index: ShardIndex,
    targets: FakeTargets,
    journal: FakeJournal,
    client: Any,
) -> None:
    places = [n * 2 * MOST_LETTER_SPAN for n in range(3)]
    store(index, 0, places[-1] + 1, dict.fromkeys(places, refused_entry(LARGE, NO_JSON, NOW_MS)))
    journal.request_records[:] = [LARGE._replace(offset=o) for o in range(places[-1] + 1)]
    targets.refusals[LETTERS] = UNKNOWN

    for pause_ms in (0, 50, 100):
        dispatch.tick(NOW_MS + pause_ms)

    assert {band_at(score) for score, _ in held(client).due} == {next(bands_of(parking.LETTERS))}


def test_a_request_reread_with_a_later_due_time_does_not_delay_others(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, journal: FakeJournal, client: Any
) -> None:
    """Its caller's timestamp is ahead, and was capped by a clock only at the first read."""
    pend(to(), to())
    journal.request_records[0] = record(0, b"record 0", NOW_MS + 3_000_000)
    client.set(PREFIX + "msg:" + f"{0:016x}", b"no entry")

    did = dispatch.tick(NOW_MS)

    assert sorted(did.due_ms) == [NOW_MS, NOW_MS + 3_000_000]

    assert writer.not_before_ms == NOW_MS


@pytest.mark.parametrize("why", [NO_JSON, OVER_QUOTA], ids=["without payload", "with payload"])
def test_large_records_with_distant_offsets_are_read_one_at_a_time(
    why: Invalid,
    dispatch: Dispatch,
    index: ShardIndex,
    writer: FakeWriter,
    journal: FakeJournal,
    client: Any,
) -> None:
    """A thousand reads before a transaction would delay the other messages in it."""
    places = [0, MOST_LETTER_SPAN, MOST_LETTER_SPAN + 1, 3 * MOST_LETTER_SPAN]
    entry = refused_entry(LARGE, why, NOW_MS)
    good = places[-1] + 1
    store(index, 0, good + 1, dict.fromkeys(places, entry) | {good: to()})
    journal.request_records[:] = [LARGE._replace(offset=o) for o in range(good + 1)]

    dispatch.tick(NOW_MS)

    assert [o.topic for o in writer.committed] == ["orders", LETTERS, LETTERS]
    assert [at for at, _ in held(client).due] == [NOW_MS + 50, NOW_MS + 100]
    for _ in range(2):
        dispatch.tick(held(client).due[0][0])
    assert writer.sent_to(LETTERS) == places


@pytest.mark.parametrize(
    "entry",
    [to(expires_ms=NOW_MS - 1), to("nowhere", attempts=5), to("compacted")],
    ids=["expired", "unknown-topic", "refused"],
)
def test_messages_do_not_wait_for_dead_letters_with_distant_offsets(
    dispatch: Dispatch,
    index: ShardIndex,
    writer: FakeWriter,
    targets: FakeTargets,
    journal: FakeJournal,
    monkeypatch: pytest.MonkeyPatch,
    entry: Entry,
) -> None:
    targets.refusals["nowhere"] = UNKNOWN
    targets.strict["compacted"] = Limits(needs_key=True, most_bytes=None)
    places = [n * MOST_LETTER_SPAN for n in range(6)]
    good = places[-1] + 1
    store(index, 0, good + 1, dict.fromkeys(places, entry) | {good: to()})
    reads: list[list[int]] = []

    def gone(offsets: Iterable[int]) -> dict[int, Record]:
        reads.append(list(offsets))
        return {}

    monkeypatch.setattr(journal, "records", gone)

    now_ms = NOW_MS
    for _ in range(4):
        dispatch.tick(now_ms)
        assert writer.sent_to("orders") == [good]
        now_ms += ALONE_SPREAD_MS

    assert [read for read in reads if read] == [places[0:2], places[2:4], places[4:6]]
    assert writer.sent_to(LETTERS) == places


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("exactly_once", [True, False])
def test_a_dead_letter_is_made_smaller_until_the_broker_accepts_it(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, count: int, exactly_once: bool
) -> None:
    writer.exactly_once = exactly_once
    pend(*(invalid() for _ in range(count)), to())
    writer.fails = lambda o: TOO_LARGE if o.topic == LETTERS and o.value is not None else None
    now_ms, doubts = NOW_MS, 0
    while len(writer.sent_to(LETTERS)) < count:
        now_ms += 1000
        try:
            dispatch.tick(now_ms)
        except Refused:
            doubts += 1
        assert now_ms < NOW_MS + 20_000, "the shard is stuck"

    assert writer.sent_to("orders") == [count]
    for offset in range(count):
        found = letter(writer, offset)
        assert (found.key, found.value) == (b"key", None)
        reason, detail = told(found)
        assert reason == "not-json"
        assert "too-large" in str(detail)


def test_a_shortened_dead_letter_frees_the_caller_id_of_its_request(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, client: Any
) -> None:
    pend(to("huge", caller_id="a"))
    writer.refused["huge"] = TOO_LARGE
    writer.fails = lambda o: TOO_LARGE if o.value is not None else None

    with pytest.raises(Refused):
        dispatch.tick(NOW_MS)
    dispatch.tick(NOW_MS)

    assert writer.receipts[0].dead == [0]
    assert held(client).holders == {}


def test_a_recurring_request_continues_after_a_shortened_dead_letter(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, client: Any
) -> None:
    pend(to("huge", caller_id="a", recurs="every 60000"))
    writer.refused["huge"] = TOO_LARGE
    writer.fails = lambda o: TOO_LARGE if o.topic == LETTERS and o.value is not None else None

    with pytest.raises(Refused):
        dispatch.tick(NOW_MS)

    stored = stored_entry(client, 0)
    assert (stored.target, stored.message, stored.recurs) == ("huge", b"hello", "every 60000")
    dispatch.tick(NOW_MS)
    assert letter(writer, 0).value is None


@pytest.mark.parametrize("exactly_once", [True, False])
def test_a_dead_letter_keeps_its_reason_while_the_broker_cannot_take_it(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, exactly_once: bool
) -> None:
    writer.exactly_once = exactly_once
    pend(invalid())
    writer.failing[LETTERS] = (Reason.UNREACHABLE, "timed out")
    now_ms = NOW_MS
    for _ in range(9):
        now_ms += LONGEST_RETRY_MS
        try:
            dispatch.tick(now_ms)
        except Refused:
            continue
    writer.failing.clear()
    dispatch.tick(now_ms + LONGEST_RETRY_MS)

    assert told(letter(writer, 0)) == ("not-json", "no JSON")
    assert letter(writer, 0).value == b"{"


# at-least-once


def test_at_least_once_delivers_what_kafka_accepts_and_postpones_the_rest(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any
) -> None:
    writer.exactly_once = False
    writer.failing = {"slow": (Reason.UNREACHABLE, "timed out"), "strict": TOO_LARGE}
    pend(to(), to("slow"), to("strict"), to())

    did = dispatch.tick(NOW_MS)

    assert writer.receipts[0].delivered == {"orders/0": [(0, 0), (3, 1)]}
    assert sorted(writer.receipts[0].removals()) == [0, 3]
    assert (did.due_ms, did.retried) == ([NOW_MS, NOW_MS], 2)
    assert sorted(held(client).offsets()) == [1, 2]
    assert targets.strict["strict"].one_by_one


# failures that require recovery


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


# lost payloads


def lose_payload(client: Any, offset: int) -> None:
    client.delete(f"{PREFIX}msg:{offset:016x}")


def test_a_lost_payload_is_read_again_from_its_record(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, client: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    pend(to(), to())
    lose_payload(client, 1)

    with caplog.at_level(logging.WARNING):
        did = dispatch.tick(NOW_MS)

    assert [(o.offset, o.value) for o in writer.committed] == [(0, b"hello"), (1, b"read again")]
    assert did.due_ms == [NOW_MS, NOW_MS]
    assert "TB/3@1: no payload in Redis; reading it again" in caplog.text


def test_a_damaged_payload_is_read_from_its_record(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, client: Any
) -> None:
    pend(to(), to())
    client.set(f"{PREFIX}msg:{1:016x}", b"not what blackbox wrote")

    dispatch.tick(NOW_MS)

    assert [(o.offset, o.value) for o in writer.committed] == [(0, b"hello"), (1, b"read again")]


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


def test_a_payload_lost_together_with_its_record_becomes_a_dead_letter(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, journal: FakeJournal, client: Any
) -> None:
    pend(to(), to())
    lose_payload(client, 0)
    journal.request_records[0] = None

    did = dispatch.tick(NOW_MS)

    reason, detail = told(letter(writer, 0))
    assert reason == "payload-lost"
    assert "retention.ms" in str(detail)
    assert writer.receipts[0].dead == [0]
    assert did.dead == {"payload-lost": 1}
    assert held(client).due == []


# postponed requests


def test_postponing_requests_costs_no_extra_round_trips(
    dispatch: Dispatch, pend: Pend, targets: FakeTargets, index: ShardIndex, client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pend(to("gone"), to(), to("gone"))
    targets.refusals["gone"] = UNKNOWN
    monkeypatch.setattr(index, "defer", None)

    did = dispatch.tick(NOW_MS)

    assert held(client).due == [(NOW_MS + 1000, 0), (NOW_MS + 1000, 2)]
    assert (did.retried, did.due_ms, did.next_due_ms) == (2, [NOW_MS], NOW_MS + 1000)


def test_requests_being_postponed_are_not_read_ahead(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    dispatch.batch_limit = 3
    pend(to("gone"), to(), to(), to(), to(), to())
    targets.refusals["gone"] = UNKNOWN

    first, second = dispatch.tick(NOW_MS), dispatch.tick(NOW_MS)

    assert writer.sent_to("orders") == [1, 2, 3, 4, 5]
    assert (first.retried, second.retried) == (1, 0)
    assert (first.pending, second.pending) == (6, 4)


# a full Redis


def test_a_request_that_a_full_redis_cannot_postpone_is_retried_at_the_next_poll(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, index: ShardIndex,
    client: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def refuse(*_: Any) -> None:
        raise IndexFull("Redis has no memory left")

    pend(to("gone"))
    targets.refusals["gone"] = UNKNOWN
    monkeypatch.setattr(index, "defer", refuse)

    did = dispatch.tick(NOW_MS)

    assert held(client).due == [(NOW_MS, 0)]
    assert did.retried == 0


def test_a_target_that_is_lost_during_a_transaction_does_not_delay_others(
    make: Make, pend: Pend, targets: FakeTargets, writer: FakeWriter, client: Any
) -> None:
    pend(to("orders"), to("gone"))
    writer.meanwhile = lambda: targets.refusals.update(gone=UNKNOWN)

    with pytest.raises(Refused):
        make().tick(NOW_MS)

    assert writer.calls[-2:] == ["flush", "abort"]
    assert held(client).due == [(NOW_MS, 0), (NOW_MS + 1000, 1)]


def test_brokers_that_do_not_describe_a_target_do_not_stop_its_transaction(
    make: Make, pend: Pend, targets: FakeTargets, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    pend(to("orders"))
    dispatch = make()

    def silent(topics: Iterable[str], *, refresh: bool = False) -> dict[str, Refusal]:
        if refresh:
            raise JournalLost("no answer")
        return {}

    monkeypatch.setattr(targets, "unavailable", silent)
    writer.meanwhile = lambda: None

    dispatch.tick(NOW_MS)

    assert [outgoing.topic for outgoing in writer.committed] == ["orders"]


# follow-ups


class Log:
    """The request topic above the position, including uncommitted records."""

    def __init__(self, *records: Record) -> None:
        self._records = records

    def request_bounds(self) -> Bounds:
        return Bounds(0, max((record.offset + 1 for record in self._records), default=0))

    def requests(self, start: int, end: int) -> Iterator[Batch]:
        yield Batch(start, end, [r for r in self._records if start <= r.offset < end])


COUNTDOWN = make_format("countdown", Options(max_countdown_s=1000, own_topics=lambda topic: False))
RECURS = to(caller_id="a", recurs="every 60000")


def test_a_recurring_request_is_written_again_in_the_transaction_of_its_delivery(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    pend(RECURS, to("bills"))

    make(follow_ups=FollowUps(SHARD, COUNTDOWN, Log())).tick(NOW_MS)

    assert writer.calls[-5:] == [
        "send orders@0", "send TB@0", "send bills@1", "flush", "commit",
    ]  # fmt: skip
    [again] = [outgoing for outgoing in writer.committed if outgoing.topic == "TB"]
    assert f'"at":{NOW_MS + 60_000}'.encode() in (again.value or b"")
    [receipt] = writer.receipts
    assert list(receipt.delivered) == ["orders/0", "bills/0"]


@pytest.mark.parametrize("exactly_once", [True, False])
def test_follow_ups_too_large_for_one_batch_are_sent_one_by_one(
    make: Make, pend: Pend, writer: FakeWriter, exactly_once: bool
) -> None:
    writer.exactly_once = exactly_once
    pend(*(to(caller_id=f"a{n}", recurs="every 60000") for n in range(12)))
    writer.most_together["TB"] = 5
    dispatch = make(follow_ups=FollowUps(SHARD, COUNTDOWN, Log()))
    now_ms = NOW_MS
    while len(set(writer.sent_to("orders"))) < 12:
        with suppress(Refused):
            dispatch.tick(now_ms)
        now_ms += 1000
        assert now_ms < NOW_MS + 20_000, "the shard is stuck"

    assert writer.sent_to(LETTERS) == []


def test_a_follow_up_batch_that_is_too_large_repeats_messages_once_at_least_once(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    writer.exactly_once = False
    pend(RECURS, RECURS._replace(target="bills", caller_id="b"))
    writer.most_together["TB"] = 1
    dispatch = make(follow_ups=FollowUps(SHARD, COUNTDOWN, Log()))
    for second in range(20):
        dispatch.tick(NOW_MS + second * 1000)

    assert [writer.calls.count(f"send {to}") for to in ("orders@0", "bills@1")] == [2, 2]
    assert sorted(writer.sent_to("TB")) == [0, 1]


@pytest.mark.parametrize("exactly_once", [True, False])
@pytest.mark.parametrize("other", ["orders", "bills"])
def test_messages_with_follow_ups_that_are_too_large_for_their_targets_become_dead_letters(
    make: Make, pend: Pend, writer: FakeWriter, other: str, exactly_once: bool
) -> None:
    writer.exactly_once = exactly_once
    large = to(message=b"x" * 5000, recurs="every 60000")
    pend(large._replace(caller_id="a"), large._replace(caller_id="b", target=other), to("small"))
    writer.fails = lambda o: (
        TOO_LARGE if o.topic in ("orders", "bills") and len(o.value or b"") > 1000 else None
    )
    dispatch = make(follow_ups=FollowUps(SHARD, COUNTDOWN, Log()))
    for second in range(20):
        with suppress(Refused):
            dispatch.tick(NOW_MS + second * 1000)

    assert sorted(writer.sent_to(LETTERS)) == [0, 1]
    assert writer.sent_to("small") == [2]


def test_a_long_backlog_is_read_before_the_transaction_begins(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    reads: list[tuple[int, int, bool]] = []
    ends = iter([1_000_000, 1_050_000, 1_051_000])  # callers continue to write

    class Long(Log):
        def request_bounds(self) -> Bounds:
            return Bounds(0, next(ends))

        def requests(self, start: int, end: int) -> Iterator[Batch]:
            reads.append((start, end, "begin" in writer.calls))
            return super().requests(start, end)

    pend(RECURS)
    writer._ends["TB/3"] = 1_051_010

    make(follow_ups=FollowUps(SHARD, COUNTDOWN, Long())).tick(NOW_MS)

    assert reads == [
        (1, 1_000_000, False), (1_000_000, 1_050_000, False), (1_050_000, 1_051_011, True)
    ]  # fmt: skip
    assert [outgoing.topic for outgoing in writer.committed] == ["orders", "TB"]


def test_a_recurring_request_is_written_again_after_its_dead_letter(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    pend(RECURS._replace(expires_ms=NOW_MS - 1))

    make(follow_ups=FollowUps(SHARD, COUNTDOWN, Log())).tick(NOW_MS)

    assert [outgoing.topic for outgoing in writer.committed] == [LETTERS, "TB"]


def test_a_recurrence_whose_next_request_is_too_large_ends_and_its_message_is_delivered(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    headers = [("CALLER_SERVICE", b"shop"), ("trace", b"t")]
    pend(RECURS._replace(headers=headers, caller="shop"), to("bills"))
    writer.refuses = lambda o: TOO_LARGE if o.topic == "TB" and "trace" in dict(o.headers) else None

    make(follow_ups=FollowUps(SHARD, COUNTDOWN, Log())).tick(NOW_MS)

    assert [outgoing.topic for outgoing in writer.committed] == ["orders", "TB", "bills"]
    last = writer.committed[1]
    assert last.headers == [("CALLER_SERVICE", "shop"), ("blackbox-follows", "TB/3@0")]
    written = Record(9, NOW_MS, last.key, last.value, [("blackbox-follows", b"TB/3@0")])
    refused = COUNTDOWN.parse(written, NOW_MS)
    assert refused == Invalid(Reason.BAD_RECURRENCE, ENDS_TOO_LARGE)


def test_a_recurrence_ends_if_its_next_request_exceeds_the_limit_of_the_request_topic(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    pend(RECURS._replace(message=b"m" * 2000))
    targets.strict["TB"] = Limits(needs_key=True, most_bytes=1000)

    make(follow_ups=FollowUps(SHARD, COUNTDOWN, Log())).tick(NOW_MS)

    assert [outgoing.topic for outgoing in writer.committed] == ["orders", "TB"]
    assert b'"message"' not in (writer.committed[1].value or b"")


SCHEDULES = make_format(
    "scheduler", Options(max_countdown_s=1000, own_topics=lambda topic: False, topic="TB")
)


def schedules(count: int, due_ms: int = NOW_MS) -> list[Entry]:
    return [to(due_ms=due_ms, caller_id=f"{due_ms}-{n}") for n in range(count)]


def takes_together(writer: FakeWriter, count: int, topic: str = "history") -> Limits:
    """Let a topic take so many copies in one record batch; return its limits, which may be unknown."""
    writer.most_together[topic] = count
    one = batch_bytes(next(deliveries(SHARD, {9999: to()})))
    return Limits(needs_key=False, most_bytes=count * one)


def test_copies_too_large_for_one_batch_are_sent_in_parts_of_one_transaction(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    targets.strict["history"] = takes_together(writer, 5)
    pend(*schedules(12))

    make(follow_ups=FollowUps(SHARD, SCHEDULES, Log(), "history")).tick(NOW_MS)

    for topic in ("orders", "TB", "history"):
        assert writer.sent_to(topic) == list(range(12))
    assert (len(writer.receipts), writer.calls.count("flush")) == (1, 3)


def test_a_burst_of_schedules_in_each_second_is_delivered_without_a_refusal(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    targets.strict["history"] = takes_together(writer, 5)
    dispatch = make(follow_ups=FollowUps(SHARD, SCHEDULES, Log(), "history"))
    for second in range(5):
        start_ms = NOW_MS + second * 1000
        pend(*schedules(200, start_ms))
        for now_ms in range(start_ms, start_ms + 500, 20):
            dispatch.tick(now_ms)
        assert len(writer.sent_to("orders")) == 200 * (second + 1)

    assert writer.sent_to("history") == writer.sent_to("orders")


def test_a_burst_of_schedules_is_refused_once_if_the_limit_is_unknown(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    takes_together(writer, 5)
    dispatch = make(follow_ups=FollowUps(SHARD, SCHEDULES, Log(), "history"))
    refusals = 0
    for second in range(5):
        start_ms = NOW_MS + second * 1000
        pend(*schedules(200, start_ms))
        for now_ms in range(start_ms, start_ms + 1000, 20):
            try:
                dispatch.tick(now_ms)
            except Refused:
                refusals += 1
        assert len(writer.sent_to("orders")) == 200 * (second + 1)

    assert refusals == 1


def test_a_too_large_batch_of_a_target_leaves_the_batches_of_follow_ups_as_they_are(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    writer.most_together["orders"] = 5
    pend(*schedules(12))

    with pytest.raises(Refused):
        make(follow_ups=FollowUps(SHARD, SCHEDULES, Log(), "history")).tick(NOW_MS)

    assert [topic for topic, limits in targets.strict.items() if limits.one_by_one] == ["orders"]


def test_of_schedules_sent_one_by_one_only_that_with_the_too_large_copy_is_dead_lettered(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    first, second, third = schedules(3)
    pend(first, second._replace(message=b"x" * 5000), third)
    takes_together(writer, 1)
    writer.fails = lambda o: (
        TOO_LARGE if o.topic == "history" and len(o.value or b"") > 1000 else None
    )
    dispatch = make(follow_ups=FollowUps(SHARD, SCHEDULES, Log(), "history"))
    for second_ms in range(0, 10_000, 1000):
        with suppress(Refused):
            dispatch.tick(NOW_MS + second_ms)

    assert sorted(writer.sent_to("orders")) == [0, 2]
    assert writer.sent_to(LETTERS) == [1]
    assert sorted(writer.sent_to("TB")) == [0, 1, 2]


def test_no_message_overtakes_one_that_waits_for_a_place_for_its_follow_up(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    count = MOST_PARTS + 5
    pend(*(to(caller_id=f"a{n}", recurs="every 60000") for n in range(count)), to(), to("bills"))
    targets.strict["TB"] = NO_LIMITS._replace(one_by_one=True)
    dispatch = make(follow_ups=FollowUps(SHARD, COUNTDOWN, Log()))

    dispatch.tick(NOW_MS)

    assert writer.sent_to("bills") == [count + 1]
    assert writer.sent_to("orders") == list(range(MOST_PARTS + 1))
    dispatch.tick(NOW_MS + 1000)
    assert writer.sent_to("orders") == list(range(count + 1))


def test_a_tombstone_too_large_with_the_headers_of_its_schedule_is_written_without_them(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    pend(to(caller_id="a", headers=[("trace", b"t")]))
    writer.refuses = lambda o: TOO_LARGE if len(o.headers) > 3 and o.topic == "TB" else None

    make(follow_ups=FollowUps(SHARD, SCHEDULES, Log(), "history")).tick(NOW_MS)

    assert [outgoing.topic for outgoing in writer.committed] == ["orders", "TB", "history"]
    tombstone = writer.committed[1]
    assert (tombstone.key, tombstone.value) == (b"a", None)
    assert [name for name, _ in tombstone.headers] == [
        "blackbox-id", "blackbox-due-ms", "blackbox-source",
    ]  # fmt: skip


def test_a_message_is_delivered_although_the_history_topic_would_refuse_its_copy(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets
) -> None:
    pend(to(caller_id="a"))
    targets.strict["history"] = Limits(needs_key=True, most_bytes=None)

    make(follow_ups=FollowUps(SHARD, SCHEDULES, Log(), "history")).tick(NOW_MS)

    assert [outgoing.topic for outgoing in writer.committed] == ["orders", "TB"]


def test_a_request_waits_while_its_follow_up_is_refused_for_a_reason_that_may_pass(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    pend(RECURS)
    writer.refused["TB"] = UNKNOWN

    with pytest.raises(Refused):
        make(follow_ups=FollowUps(SHARD, COUNTDOWN, Log())).tick(NOW_MS)

    assert writer.committed == []


def test_a_request_ends_although_the_broker_always_refuses_its_follow_up(
    make: Make, pend: Pend, writer: FakeWriter, client: Any
) -> None:
    pend(RECURS, to("bills"))
    writer.fails = lambda o: TOO_LARGE if b'"message"' in (o.value or b"") else None
    dispatch, openings = make(follow_ups=FollowUps(SHARD, COUNTDOWN, Log())), 0
    for second in range(20):
        try:
            dispatch.tick(NOW_MS + second * 1000)
        except Refused:
            openings += 1

    assert writer.sent_to("bills") == [1]
    assert letter(writer, 0).value == b"record 0"
    assert writer.sent_to("TB") == [0]
    assert openings <= 5
    assert held(client).due == []


CANCEL_A = b'{"id": "a", "cancel": true}'


def test_a_superseded_follow_up_is_taken_back_and_the_others_are_delivered(
    make: Make, pend: Pend, writer: FakeWriter, client: Any
) -> None:
    pend(RECURS, to("bills"))
    writer._ends["TB/3"] = 5
    dispatch = make(
        follow_ups=FollowUps(SHARD, COUNTDOWN, Log(Record(4, NOW_MS, b"a", CANCEL_A, [])))
    )

    did = dispatch.tick(NOW_MS)

    assert "abort" in writer.calls
    assert (did.targets, did.retried) == ({"bills": 1}, 1)
    assert [outgoing.topic for outgoing in writer.committed] == ["bills"]
    assert held(client).due == [(NOW_MS + 1000, 0)]
    assert not client.exists(PREFIX + "in-flight")


def test_a_superseded_request_is_not_parked_in_a_band_that_its_batch_takes(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(parking, "bands_of", lambda target: iter([7]))
    away = Reason.UNREACHABLE, "no leader"
    targets.refusals["bills"] = away

    class Newer(Log):
        def requests(self, start: int, end: int) -> Iterator[Batch]:
            targets.refusals["orders"] = away
            return super().requests(start, end)

    pend(RECURS, to("bills"))
    writer._ends["TB/3"] = 5
    newer = Newer(Record(4, NOW_MS, b"a", CANCEL_A, []))
    make(follow_ups=FollowUps(SHARD, COUNTDOWN, newer)).tick(NOW_MS)

    assert [band_at(score) for score, _ in held(client).due] == [0, 7]


class Rewritten(Log):
    """A topic to which the id `a` is always written once more before the follow-ups."""

    def requests(self, start: int, end: int) -> Iterator[Batch]:
        yield Batch(start, end, [Record(end - 2, NOW_MS, b"a", CANCEL_A, [])])


def test_an_id_that_is_written_again_and_again_holds_up_no_other_request(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    pend(RECURS)
    writer._ends["TB/3"] = 1000
    dispatch = make(follow_ups=FollowUps(SHARD, COUNTDOWN, Rewritten()))
    dispatch.tick(NOW_MS)
    for _ in range(3):  # each replaces the one before, and comes with a neighbour
        pend(RECURS, to("bills"), to("letters", caller_id="b", recurs="every 60000"))

        assert dispatch.tick(NOW_MS).targets == {"bills": 1, "letters": 1}

    assert writer.sent_to("orders") == []


def cancel_of(caller_id: str, offset: int) -> Record:
    return Record(offset, NOW_MS, b"", b'{"id": "%s", "cancel": true}' % caller_id.encode(), [])


def test_ids_that_are_each_written_again_hold_up_no_other_request(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    writer._ends["TB/3"] = 1000
    behind = Log(*(cancel_of(f"a{n}", 900 + n) for n in range(3)))
    dispatch = make(follow_ups=FollowUps(SHARD, COUNTDOWN, behind))
    for n in range(3):
        others = to("bills"), to("letters", caller_id="b", recurs="every 60000")
        pend(RECURS._replace(caller_id=f"a{n}"), *others)

        assert dispatch.tick(NOW_MS).targets == {"bills": 1, "letters": 1}

    assert writer.sent_to("orders") == []


def test_after_an_id_was_overtaken_another_one_does_not_abort_requests_without_follow_ups(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    writer._ends["TB/3"] = 1000
    follow_ups = FollowUps(SHARD, COUNTDOWN, Log(cancel_of("a", 900)))
    follow_ups.note_contended([to(caller_id="another")], NOW_MS)
    pend(RECURS, to("bills"))

    make(follow_ups=follow_ups).tick(NOW_MS)

    assert writer.calls.count("send bills@1") == 1
    assert [outgoing.topic for outgoing in writer.committed] == ["bills"]


def test_an_id_that_was_overtaken_does_not_abort_the_others_again(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    writer._ends["TB/3"] = 1000
    follow_ups = FollowUps(SHARD, COUNTDOWN, Log(cancel_of("a", 900)))
    follow_ups.note_contended([RECURS], NOW_MS)
    pend(RECURS, to("letters", caller_id="b", recurs="every 60000"))

    make(follow_ups=follow_ups).tick(NOW_MS)

    assert writer.calls.count("send letters@1") == 1
    assert writer.sent_to("letters") == [1]


def test_while_each_transaction_is_overtaken_by_another_id_the_others_are_delivered(
    make: Make, pend: Pend, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, begin = [f"id{n}" for n in range(8)], writer.begin
    overtaking = iter(reversed(ids))

    class Busy(Log):
        def requests(self, start: int, end: int) -> Iterator[Batch]:
            yield Batch(start, end, [cancel_of(next(overtaking), start)])

    def begin_behind_another_record() -> None:
        begin()
        writer._ends["TB/3"] = writer._ends.get("TB/3", 8) + 1

    monkeypatch.setattr(writer, "begin", begin_behind_another_record)
    pend(*(to(caller_id=id, recurs="every 60000") for id in ids))

    make(follow_ups=FollowUps(SHARD, COUNTDOWN, Busy())).tick(NOW_MS)

    assert writer.sent_to("orders") == [0, 1, 2, 3]


def test_a_request_of_an_id_that_was_overtaken_is_delivered_once(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    follow_ups = FollowUps(SHARD, COUNTDOWN, Log())
    follow_ups.note_contended([RECURS], NOW_MS)
    dispatch = make(follow_ups=follow_ups, batch_limit=2)
    pend(to("bills"), RECURS, *[to("bills")] * 2)

    for _ in range(3):
        dispatch.tick(NOW_MS)

    assert (writer.sent_to("orders"), writer.sent_to("bills")) == ([1], [0, 2, 3])


def test_an_overtaken_id_goes_with_the_others_again_after_a_while(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    follow_ups = FollowUps(SHARD, COUNTDOWN, Log())
    follow_ups.note_contended([RECURS], NOW_MS - CONTENDED_MS)
    pend(RECURS, to("bills"))

    make(follow_ups=follow_ups).tick(NOW_MS)

    assert writer.calls.count("commit") == 1


def test_a_request_that_intake_does_not_end_in_time_requires_recovery(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    """Only recovery applies the later record if Redis is full of such requests."""
    pend(RECURS)
    writer._ends["TB/3"] = 1000
    dispatch = make(follow_ups=FollowUps(SHARD, COUNTDOWN, Rewritten()))
    for second in (0, 1, 3):
        dispatch.tick(NOW_MS + second * 1000)

    with pytest.raises(Refused, match="replaces or cancels it"):
        dispatch.tick(NOW_MS + 7000)

    assert writer.committed == []
