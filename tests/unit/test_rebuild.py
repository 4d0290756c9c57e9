"""How a new owner opens an index that is lost, or that is behind or ahead of the journals."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from blackbox.core.bits import SEGMENT
from blackbox.core.intake import Intake, Taken
from blackbox.core.plan import Batch, Binding, Positions
from blackbox.core.rebuild import Rebuild
from blackbox.core.receipt_history import Shortened
from blackbox.core.recovery import Recovery
from blackbox.core.settlement import Settlement
from blackbox.index.shard_index import ShardIndex
from blackbox.index.stored_fields import OLDER
from blackbox.records import entry as entries
from blackbox.records.cancel import REPLACES
from blackbox.records.carried import HEADER
from blackbox.records.clock import CLOCKS_APART_MS
from blackbox.records.entry import Entry
from blackbox.records.errors import ForeignIndex, JournalLost, PositionsMoved, RecoveryRequired
from blackbox.records.receipt import Checked, Claim, Mark, Receipt
from blackbox.records.request import Cancel, Headers, Reason, Request, request_id
from tests.contract.held import NOW_MS, PREFIX, SHARD, entry, held, store
from tests.support.fakes import FakeJournal, FakeWriter
from tests.unit.opening import Make, Written, barriers, counts, delivered, request

OURS = Binding("cluster", "topic", "receipts", "blackbox")
RECEIPT_MS = NOW_MS - 10 * CLOCKS_APART_MS
BEFORE_MS = RECEIPT_MS + CLOCKS_APART_MS
"""Requests due by then may have had an outcome before a receipt of RECEIPT_MS."""


def mark(requests: int, receipts: int, *, read: int = 0) -> Receipt:
    return Receipt(1, read=read, mark=Mark(requests, receipts))


def replaces(offset: int) -> Headers:
    return [(REPLACES, request_id(SHARD, offset).encode())]


def carries(previous: int, origin: int | None = None) -> Headers:
    origin = previous if origin is None else origin
    return [(HEADER, f"[{previous},{origin},0,false]".encode())]


def reads(journal: FakeJournal) -> list[str]:
    return [call for call in journal.calls if call.startswith("requests")]


def reasons(client: Any) -> dict[int, str | None]:
    """Why a pending request becomes a dead letter, if it does."""
    found = held(client)
    return {o: entries.decode(found.payloads[o]).reason for o in sorted(found.offsets())}


# the low-water mark


def test_a_rebuild_starts_at_the_low_water_mark(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(*(request() for _ in range(7)))
    journal.append(delivered(0, 1, 2))
    start = journal.append(delivered(3, 5)) + 1
    journal.append(mark(4, start - 1))

    recovered = recovery.open()

    assert reads(journal) == ["requests 4 to 7", "requests 7 to 7"]
    assert (recovered.outcomes, recovered.mark) == (2, Mark(4, 2, []))
    assert held(client).offsets() == [4, 6]
    assert held(client).positions == Positions(7, 7)


def test_receipts_below_the_mark_are_not_applied(
    recovery: Recovery, write_records: Written, journal: FakeJournal
) -> None:
    write_records(*(request() for _ in range(4)))
    for offset in range(3):
        journal.append(delivered(offset))
    journal.append(mark(2, 4))

    assert recovery.open().outcomes == 1
    assert "receipts 4 to 9" in journal.calls


def test_the_newest_mark_is_used(
    recovery: Recovery, write_records: Written, journal: FakeJournal
) -> None:
    write_records(*(request() for _ in range(5)))
    journal.append(mark(1, 0))
    journal.append(mark(3, 0))
    journal.append(delivered(0))

    recovery.open()

    assert reads(journal)[0] == "requests 3 to 5"


def test_a_mark_is_found_however_many_receipts_came_after_it(
    recovery: Recovery,
    write_records: Written,
    journal: FakeJournal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("blackbox.core.receipt_history.FIRST_STRETCH", 2)
    write_records(*(request() for _ in range(50)))
    journal.append(mark(45, 0))
    for offset in range(45):
        journal.append(delivered(offset))

    recovery.open()

    assert reads(journal)[0] == "requests 45 to 50"


@pytest.mark.parametrize("newest", [mark(2, 4), mark(5, 0)], ids=["requests", "receipts"])
def test_an_unusable_mark_is_replaced_by_an_older_usable_one(
    recovery: Recovery, write_records: Written, journal: FakeJournal, newest: Receipt
) -> None:
    write_records(*(request() for _ in range(6)))
    journal.receipt_records += [None, None]
    journal.append(mark(4, 2))
    journal.append(newest)
    journal.first_request, journal.first_receipt = 3, 2

    assert recovery.open().gone == 0
    assert reads(journal)[0] == "requests 4 to 6"


def test_a_rebuild_uses_a_mark_whose_requests_were_partly_removed(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    write_records(*(request() for _ in range(6)))
    journal.append(delivered(4))
    journal.append(mark(2, 0))
    journal.first_request = 3

    with caplog.at_level(logging.ERROR):
        assert counts(recovery.open()) == (1, 0, 1)

    assert held(client).offsets() == [3, 5]
    assert "retention removed requests 2 to 2 while some of them were pending" in caplog.text


def test_an_index_within_the_journals_is_kept_despite_a_mark(
    recovery: Recovery,
    write_records: Written,
    journal: FakeJournal,
    empty_index: ShardIndex,
    client: Any,
) -> None:
    write_records(request(), request())
    empty_index.begin(Positions(0, 0), binding=OURS)
    store(empty_index, 0, 1, {0: entry()})
    journal.append(mark(1, 0))

    recovery.open()

    assert held(client).offsets() == [0, 1]
    assert reads(journal)[0] == "requests 1 to 2"


def test_an_index_older_than_the_journals_is_rebuilt_from_the_mark(
    recovery: Recovery,
    write_records: Written,
    journal: FakeJournal,
    empty_index: ShardIndex,
    client: Any,
) -> None:
    write_records(*(request("a") for _ in range(2)), *(request() for _ in range(6)))
    empty_index.begin(Positions(0, 0), binding=OURS)
    store(empty_index, 0, 2, {0: entry(), 1: entry(caller_id="a")})
    client.zadd(PREFIX + "ignored", {"0" * 16: 0})
    empty_index.settle(Settlement({6: None}, 1))
    journal.receipt_records += [None, None]
    journal.append(mark(5, 2, read=8))
    journal.first_request, journal.first_receipt = 5, 2

    recovered = recovery.open()

    found = held(client)
    assert (found.offsets(), found.holders, found.skip) == ([5, 6, 7], {}, set())
    assert empty_index.unrecorded(10) == (8, [])
    assert recovered.gone == 0


def test_a_kept_index_returns_its_stored_mark(
    recovery: Recovery, empty_index: ShardIndex, journal: FakeJournal
) -> None:
    journal.receipt_records += [None] * 4
    empty_index.begin(Positions(0, 0), binding=OURS)
    empty_index.settle(Settlement({}, 3, mark=Mark(0, 2, [(0, 3)])))

    found = recovery.open().mark

    assert found is not None
    assert (found.requests, found.receipts, [*map(tuple, found.pairs)]) == (0, 2, [(0, 3)])


@pytest.mark.parametrize("older", OLDER)
def test_an_index_of_an_earlier_version_is_rebuilt_from_the_journals(
    recovery: Recovery, write_records: Written, journal: FakeJournal, empty_index: ShardIndex, client: Any,
    older: bytes,
) -> None:  # fmt: skip
    write_records(request(), request())
    empty_index.begin(Positions(0, 0))
    store(empty_index, 0, 2, {0: entry(), 1: entry()})
    journal.append(delivered(0))
    client.hset(PREFIX + "state", "format", older)

    recovery.open()

    assert held(client).offsets() == [1]


@pytest.mark.parametrize(
    "theirs",
    [
        OURS._replace(topic_id="another"),
        OURS._replace(receipts_id="another"),
        OURS._replace(group="another"),
    ],
    ids=["topic", "receipts", "group"],
)
def test_an_index_of_an_earlier_version_is_not_emptied_if_it_belongs_to_another(
    recovery: Recovery, empty_index: ShardIndex, client: Any, theirs: Binding
) -> None:
    empty_index.begin(Positions(0, 0), binding=theirs)
    store(empty_index, 0, 2, {0: entry(), 1: entry()})
    client.hset(PREFIX + "state", "format", OLDER[-1])

    with pytest.raises(
        ForeignIndex,
        match=r"another.*rebind it with that version",
    ):
        recovery.open()

    assert held(client).offsets() == [0, 1]


# unknown outcomes


def test_without_a_mark_requests_due_before_the_first_receipt_are_dead_lettered(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    write_records(request(due_ms=BEFORE_MS), request("a", BEFORE_MS), request(due_ms=BEFORE_MS + 1))
    write_records(request(due_ms=0))
    journal.receipt_records += [None, None]
    journal.append(delivered(3, at_ms=RECEIPT_MS))
    journal.first_receipt = 2

    with caplog.at_level(logging.ERROR):
        recovery.open()

    unknown = "outcome-unknown"
    assert reasons(client) == {0: unknown, 1: unknown, 2: None}
    assert held(client).holders == {"a": 1}
    letter = entries.decode(held(client).payloads[0])
    assert (letter.message, "replay it if it was not delivered" in (letter.detail or "")) == (
        b"{}",
        True,
    )
    assert "receipts begin at 2, and no low-water mark is known" in caplog.text


def test_a_recurring_request_of_unknown_outcome_keeps_its_recurrence(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request("a", BEFORE_MS)._replace(recurs="every 60000"))
    journal.receipt_records += [None, None]
    journal.append(delivered(3, at_ms=RECEIPT_MS))
    journal.first_receipt = 2

    recovery.open()

    assert reasons(client) == {0: "outcome-unknown"}
    letter = entries.decode(held(client).payloads[0])
    assert (letter.target, letter.message, letter.recurs) == ("orders", b"hi", "every 60000")


def test_the_dead_letter_of_a_promoted_request_is_the_record_of_its_caller(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(due_ms=BEFORE_MS), request(due_ms=BEFORE_MS))
    write_records(request(due_ms=BEFORE_MS), headers=[("trace", b"1"), *carries(0)])
    write_records(request(due_ms=BEFORE_MS), headers=[*replaces(9), *carries(1)])
    journal.receipt_records += [None, None]
    journal.append(delivered(0, 1, at_ms=RECEIPT_MS))
    journal.first_receipt, journal.first_request = 2, 2

    recovery.open()

    assert reasons(client) == {2: "outcome-unknown", 3: "outcome-unknown"}
    letters = [entries.decode(held(client).payloads[offset]) for offset in (2, 3)]
    caller = ("CALLER_SERVICE", "shop")
    assert [letter.headers for letter in letters] == [[caller, ("trace", "1")], [caller]]


def test_receipts_from_offset_0_leave_no_outcome_unknown(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(due_ms=0), request(due_ms=BEFORE_MS))
    journal.append(delivered(at_ms=RECEIPT_MS))

    recovery.open()

    assert reasons(client) == {0: None, 1: None}


def test_a_mark_leaves_no_outcome_unknown(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(due_ms=0), request(due_ms=0))
    journal.receipt_records += [None, None]
    journal.append(Receipt(RECEIPT_MS, mark=Mark(1, 2)))
    journal.first_receipt = 2

    recovery.open()

    assert reasons(client) == {1: None}


def test_a_replacement_by_id_that_may_have_been_too_late_becomes_a_dead_letter(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    later = request(due_ms=BEFORE_MS + 1)
    write_records(later, at_ms=RECEIPT_MS)
    write_records(later, headers=replaces(0), at_ms=BEFORE_MS)
    write_records(later, at_ms=BEFORE_MS + 1)
    write_records(later, headers=replaces(2), at_ms=BEFORE_MS + 1)
    journal.receipt_records += [None, None]
    journal.append(delivered(at_ms=RECEIPT_MS))
    journal.first_receipt = 2

    recovery.open()

    assert reasons(client) == {1: "outcome-unknown", 3: None}


def test_a_kept_index_without_its_receipts_dead_letters_earlier_requests(
    recovery: Recovery, write_records: Written, journal: FakeJournal, empty_index: ShardIndex,
    client: Any, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    due_ms = [BEFORE_MS, 0, BEFORE_MS + 1, NOW_MS, 0]
    write_records(*(request(due_ms=at_ms) for at_ms in due_ms))
    empty_index.begin(Positions(0, 0), binding=OURS)
    store(empty_index, 0, 5, {o: Entry(*request(due_ms=at)) for o, at in enumerate(due_ms)})
    before = held(client).due
    journal.append(delivered(0, 1))
    journal.append(delivered(4, at_ms=RECEIPT_MS))
    journal.first_receipt = 2

    with caplog.at_level(logging.ERROR):
        assert counts(recovery.open()) == (1, 0, 0)

    unknown = "outcome-unknown"
    assert reasons(client) == {0: unknown, 1: unknown, 2: None, 3: None}
    assert held(client).due == [one for one in before if one[1] != 4]
    assert held(client).positions == Positions(5, 5)
    assert "3 pending requests that may have been delivered become dead letters" in caplog.text


@pytest.mark.parametrize("exactly_once", [True, False], ids=["exactly-once", "at-least-once"])
def test_a_quiet_shard_whose_receipts_have_all_been_read_and_removed_delivers_what_is_due(
    make: Make, recovery: Recovery, write_records: Written, journal: FakeJournal, writer: FakeWriter,
    others_index: ShardIndex, client: Any, exactly_once: bool,
) -> None:  # fmt: skip
    write_records(request(due_ms=NOW_MS - 1), request(due_ms=NOW_MS + CLOCKS_APART_MS))
    recovery.open()
    writer.exactly_once = exactly_once
    # with at-least-once, no marker follows the last receipt
    journal.first_receipt = len(journal.receipt_records) - (not exactly_once)
    del journal.receipt_records[journal.first_receipt :]

    make(others_index).open()

    assert reasons(client) == {0: None, 1: None}
    assert held(client).positions == Positions(2, journal.first_receipt + 1)


@pytest.mark.parametrize("exactly_once", [True, False], ids=["exactly-once", "at-least-once"])
def test_one_removed_receipt_that_was_not_read_leaves_outcomes_unknown(
    make: Make, recovery: Recovery, write_records: Written, journal: FakeJournal, writer: FakeWriter,
    others_index: ShardIndex, client: Any, exactly_once: bool,
) -> None:  # fmt: skip
    write_records(request(due_ms=NOW_MS - 1))
    recovery.open()
    writer.exactly_once = exactly_once
    if not exactly_once:
        journal.receipt_records.pop()
    journal.append(delivered(0))
    journal.first_receipt = len(journal.receipt_records) - (not exactly_once)

    make(others_index).open()

    assert reasons(client) == {0: "outcome-unknown"}


def test_many_requests_of_unknown_outcome_are_processed_in_chunks(
    index: ShardIndex, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("command_builder", "postponing"):
        monkeypatch.setattr(f"blackbox.index.{module}.CHUNK", 3)
    store(index, 0, 20, {offset: entry(100 * (offset % 4)) for offset in range(20)})

    assert index.outcome_unknown(100, NOW_MS) == 10
    assert index.outcome_unknown(100, NOW_MS) == 0
    assert {o for o, reason in reasons(client).items() if reason} == {
        offset for offset in range(20) if offset % 4 < 2
    }


# requests lost to retention


def test_a_replacement_after_removed_records_replaces_a_pending_request(
    recovery: Recovery,
    write_records: Written,
    journal: FakeJournal,
    empty_index: ShardIndex,
    client: Any,
) -> None:
    write_records(*(request() for _ in range(6)))
    write_records(request(), headers=replaces(1))
    write_records(request(), headers=replaces(1))
    empty_index.begin(Positions(0, 0), binding=OURS)
    store(empty_index, 0, 2, {0: entry(), 1: entry()})
    journal.first_request = 6

    recovery.open()

    assert reasons(client) == {0: None, 6: None, 7: "too-late"}


# interrupted rebuilds


def dies_at(start: int, journal: FakeJournal, index: ShardIndex) -> Any:
    intake = Intake(journal.format, index, None)

    def apply(batch: Batch, opening: Rebuild | None) -> Taken:
        if batch.start == start:
            raise JournalLost("no answer")
        return intake.parse_and_store(batch, NOW_MS, opening)

    return apply


@pytest.mark.parametrize("start", [2, 4, 6])
def test_an_interrupted_rebuild_continues_to_the_same_result(
    make: Make, write_records: Written, journal: FakeJournal, empty_index: ShardIndex,
    others_index: ShardIndex, client: Any, start: int,
) -> None:  # fmt: skip
    write_records(
        *(request() for _ in range(5)), request("a"), request("a"), Cancel("b"), request()
    )
    journal.read_at_once = 2
    journal.append(delivered(2))
    journal.append(delivered(4, 8))
    journal.append(mark(2, 0))

    with pytest.raises(JournalLost):
        make(apply=dies_at(start, journal, empty_index)).open()
    journal.calls.clear()
    recovered = make(others_index).open()

    assert reads(journal)[0] == f"requests {start} to 9"
    assert (recovered.outcomes, recovered.mark) == (3, Mark(2, 0, []))
    assert (held(client).offsets(), held(client).holders) == ([3, 6], {"a": 6})
    assert (held(client).skip, client.hexists(PREFIX + "state", "rebuild")) == (set(), False)


def test_an_interrupted_rebuild_keeps_unknown_outcomes(
    make: Make, write_records: Written, journal: FakeJournal, empty_index: ShardIndex,
    others_index: ShardIndex, client: Any,
) -> None:  # fmt: skip
    write_records(*(request(due_ms=BEFORE_MS) for _ in range(4)))
    journal.read_at_once = 2
    journal.receipt_records += [None, None]
    journal.append(delivered(3, at_ms=RECEIPT_MS))
    journal.first_receipt = 2

    with pytest.raises(JournalLost):
        make(apply=dies_at(2, journal, empty_index)).open()
    make(others_index).open()

    assert reasons(client) == dict.fromkeys([0, 1, 2], "outcome-unknown")


def test_an_interrupted_rebuild_reports_requests_that_retention_removed(
    make: Make, write_records: Written, journal: FakeJournal, writer: FakeWriter,
    others_index: ShardIndex, client: Any,
) -> None:  # fmt: skip
    write_records(*(request() for _ in range(6)))
    journal.append(delivered(4))
    journal.append(mark(2, 0))
    journal.first_request = 3
    writer.before["commit"] = JournalLost("no answer")
    with pytest.raises(JournalLost):
        make().open()

    assert counts(make(others_index).open()) == (1, 0, 1)
    assert list(barriers(journal)[0].gone or []) == [2, 3]
    assert held(client).offsets() == [3, 5]
    others_index.forget_gone()
    assert make().open().gone == 0


def test_requests_that_retention_removed_are_reported_if_redis_then_loses_a_key(
    make: Make, write_records: Written, journal: FakeJournal, writer: FakeWriter,
    empty_index: ShardIndex, others_index: ShardIndex, client: Any,
) -> None:  # fmt: skip
    write_records(*(request() for _ in range(10)))
    journal.first_request = 7
    empty_index.begin(Positions(4, 0))
    writer.before["commit"] = JournalLost("no answer")
    with pytest.raises(JournalLost):
        make().open()
    client.delete(PREFIX + "due")

    assert make(others_index).open().gone == 3
    assert list(barriers(journal)[0].gone or []) == [4, 7]


def test_an_interrupted_rebuild_starts_over_if_its_journals_were_trimmed(
    make: Make, write_records: Written, journal: FakeJournal, empty_index: ShardIndex,
    others_index: ShardIndex, client: Any,
) -> None:  # fmt: skip
    write_records(*(request() for _ in range(8)))
    journal.read_at_once = 2

    with pytest.raises(JournalLost):
        make(apply=dies_at(2, journal, empty_index)).open()
    receipts = journal.append(delivered(6))
    journal.append(mark(5, receipts))
    journal.first_request, journal.first_receipt = 5, receipts
    make(others_index).open()

    assert held(client).offsets() == [5, 7]


def test_only_the_rebuilding_owner_stores_requests(
    make: Make, write_records: Written, journal: FakeJournal, intake: Intake, others_index: ShardIndex,
    client: Any,
) -> None:  # fmt: skip
    write_records(request(), request())
    refusals: list[str] = []

    def apply(batch: Batch, opening: Rebuild | None) -> Taken:
        if opening is not None:
            others_index.load()
            with pytest.raises(
                RecoveryRequired, match="rebuilds the index; requests wait in Kafka"
            ) as refusal:
                store(others_index, 0, 2, {0: entry(), 1: entry()})
            refusals.append(str(refusal.value))
        return intake.parse_and_store(batch, NOW_MS, opening)

    make(apply=apply).open()

    assert len(refusals) == 1
    assert held(client).offsets() == [0, 1]
    others_index.load()
    store(others_index, 2, 3, {2: entry()})


def test_an_owner_whose_rebuild_another_continues_stores_nothing(
    make: Make, write_records: Written, journal: FakeJournal, empty_index: ShardIndex,
    others_index: ShardIndex,
) -> None:  # fmt: skip
    write_records(*(request() for _ in range(4)))
    journal.read_at_once = 2
    for index in (empty_index, others_index):
        with pytest.raises(JournalLost):
            make(index, apply=dies_at(2, journal, index)).open()

    late = Intake(journal.format, empty_index, None)
    kept = [one for one in journal.request_records if one is not None]
    with pytest.raises(RecoveryRequired):
        late.parse_and_store(Batch(2, 4, kept[2:]), NOW_MS, Rebuild(frozenset()))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["due", "ids", "cold"])
def test_the_loss_of_a_single_key_causes_a_rebuild(
    make: Make, write_records: Written, journal: FakeJournal, empty_index: ShardIndex, client: Any,
    caplog: pytest.LogCaptureFixture, key: str,
) -> None:  # fmt: skip
    write_records(request(), request("a"), request(), request("b", due_ms=NOW_MS + 1000))
    journal.append(delivered(0))
    intake = Intake(journal.format, empty_index, 500)
    recovery = make(apply=lambda batch, opening: intake.parse_and_store(batch, NOW_MS, opening))
    recovery.open()
    before = held(client)
    client.delete(PREFIX + key)

    with pytest.raises(PositionsMoved, match=rf"Redis lost a single key, .*{key};"):
        empty_index.due(NOW_MS, 10)
    with caplog.at_level(logging.ERROR):
        recovery.open()

    after = held(client)
    assert (after.offsets(), after.holders) == (before.offsets(), before.holders)
    assert client.exists(PREFIX + "cold")
    assert (
        "Redis lost a single key of the index; check that maxmemory-policy is noeviction"
        in caplog.text
    )


def test_a_request_delivered_by_its_first_record_is_not_delivered_when_carried(
    make: Make, write_records: Written, journal: FakeJournal, empty_index: ShardIndex, client: Any
) -> None:
    write_records(request("a", due_ms=NOW_MS + 1000), request("b", due_ms=NOW_MS + 1000))
    write_records(request("a"), headers=carries(0))
    write_records(request("b"), headers=carries(1))
    intake = Intake(journal.format, empty_index, 500)
    recovery = make(apply=lambda batch, opening: intake.parse_and_store(batch, NOW_MS, opening))
    recovery.open()
    assert held(client).offsets() == [2, 3]
    journal.append(delivered(0))  # as an index with a longer horizon had it

    recovery.open()

    assert (held(client).offsets(), held(client).holders) == ([3], {"b": 3})


@pytest.mark.parametrize(("read", "is_known"), [(0, True), (3, False)])
def test_requests_read_before_all_receipts_were_deleted_become_dead_letters(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any, read: int, is_known: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    write_records(request(), request(), request(due_ms=NOW_MS + 2 * CLOCKS_APART_MS))
    journal.read_before = read

    recovery.open()

    due = None if is_known else "outcome-unknown"
    assert reasons(client) == {0: due, 1: due, 2: None}
    assert ("TB.receipts is empty" in caplog.text) is not is_known


@pytest.mark.parametrize("is_emptied", [False, True], ids=["killed", "redis lost again"])
def test_unknown_outcomes_stay_unknown_in_later_rebuilds(
    make: Make, write_records: Written, journal: FakeJournal, empty_index: ShardIndex,
    others_index: ShardIndex, client: Any, is_emptied: bool,
) -> None:  # fmt: skip
    write_records(*(request(due_ms=1) for _ in range(4)))
    journal.read_at_once, journal.read_before = 2, 4
    with pytest.raises(JournalLost):
        make(apply=dies_at(2, journal, empty_index)).open()
    if is_emptied:
        client.flushall()

    make(others_index).open()

    assert set(reasons(client).values()) == {Reason.OUTCOME_UNKNOWN}
    assert len(reasons(client)) == 4


def test_a_shortened_log_with_new_records_keeps_the_shard_closed(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(), request())
    recovery.open()
    before = held(client)
    recovery.open()
    journal.request_records[1:] = []
    write_records(request(), request(), at_ms=5)
    before = held(client)

    with pytest.raises(Shortened, match=r"the record at 1 .* blackbox rebind TB --pending deliver"):
        recovery.open()

    assert held(client) == before


# a full Redis


def fills_up(count: int) -> Any:
    """Redis has room for this number of batches."""
    left = iter([True] * count)
    return lambda: next(left, False)


def test_a_shard_opens_in_a_nearly_full_redis_with_requests_left_in_kafka(
    make: Make, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(*(request() for _ in range(6)))
    journal.append(delivered(1, 4))
    journal.read_at_once = 2

    make(has_room=fills_up(1)).open()

    assert held(client).offsets() == [0]
    assert held(client).positions == Positions(2, 3)
    make().open()
    assert held(client).offsets() == [0, 2, 3, 5]


def test_removals_are_stored_only_for_requests_not_yet_read(
    make: Make, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(*(request() for _ in range(6)))
    journal.append(delivered(0, 1, 2, 3, 5))
    journal.append(delivered(SEGMENT + 7))
    journal.read_at_once = 3

    make(has_room=fills_up(1)).open()

    assert held(client).skip == {3, 5, SEGMENT + 7}
    assert held(client).positions == Positions(3, 5)


def test_a_delivered_request_left_in_kafka_ends_the_one_it_carried(
    make: Make, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(), request())
    write_records(request(), headers=carries(0))
    write_records(request(), headers=carries(1))
    write_records(request(), headers=carries(2, origin=0))
    journal.append(delivered(4))
    journal.read_at_once = 2

    make(has_room=fills_up(1)).open()

    assert held(client).offsets() == [1]


@pytest.mark.parametrize("ended", [(), (3,)], ids=["still to come", "delivered"])
def test_a_replacement_left_in_kafka_ends_its_request_at_once(
    make: Make, write_records: Written, journal: FakeJournal, client: Any, ended: tuple[int, ...]
) -> None:
    write_records(request("a"), request())
    write_records(request(), headers=replaces(1))
    write_records(request(), headers=replaces(0))
    write_records(request(), headers=replaces(0))
    journal.append(delivered(*ended))
    journal.read_at_once = 2

    make(has_room=fills_up(1)).open()

    assert held(client).offsets() == []
    make(has_room=fills_up(0)).open()
    assert held(client).offsets() == []
    make().open()
    assert reasons(client) == {2: None, **({} if ended else {3: None}), 4: "too-late"}
    assert not client.exists(f"{PREFIX}early")


@pytest.mark.parametrize("is_lost", [True, False], ids=["Redis is lost", "Redis went back"])
@pytest.mark.parametrize("is_full", [True, False], ids=["full", "room"])
def test_a_dead_lettered_replacement_ends_no_pending_request(
    make: Make,
    write_records: Written,
    journal: FakeJournal,
    client: Any,
    is_full: bool,
    is_lost: bool,
) -> None:
    write_records(request("a"))
    if not is_lost:
        make().open()
    write_records(request())
    write_records(request(), headers=replaces(0))
    journal.append(Receipt(1, invalid=[2]))
    journal.read_at_once = 1

    if is_full:
        make(has_room=fills_up(1 if is_lost else 0)).open()
        assert reasons(client) == {0: None}
    make().open()

    assert reasons(client) == {0: None, 1: None}
    assert held(client).holders == {"a": 0}


@pytest.mark.parametrize("is_lost", [True, False], ids=["Redis is lost", "Redis went back"])
@pytest.mark.parametrize("is_full", [True, False], ids=["full", "room"])
@pytest.mark.parametrize("later", [request("a"), Cancel("a")], ids=["request", "cancel"])
def test_an_invalid_record_that_would_be_valid_by_now_ends_nothing(
    make: Make,
    write_records: Written,
    journal: FakeJournal,
    client: Any,
    later: Request | Cancel,
    is_full: bool,
    is_lost: bool,
) -> None:
    """A setting was changed, or a later version accepts more."""
    write_records(request("a"))
    if not is_lost:
        make().open()
    write_records(later, request())
    journal.append(Receipt(1, invalid=[1], read=2))
    journal.read_at_once = 1

    if is_full:
        make(has_room=fills_up(1 if is_lost else 0)).open()
        make(has_room=fills_up(0)).open()
        assert reasons(client) == {0: None}
    make().open()

    assert reasons(client) == {0: None, 2: None}
    assert held(client).holders == {"a": 0}


@pytest.mark.parametrize("is_pending", [True, False], ids=["in time", "too late"])
def test_a_replacement_left_in_kafka_ends_its_caller_ids_request_if_in_time(
    make: Make, write_records: Written, journal: FakeJournal, client: Any, is_pending: bool
) -> None:
    write_records(request(), request("a"))
    write_records(request("a"), headers=replaces(0))
    if not is_pending:
        journal.append(delivered(0))
    journal.read_at_once = 2

    make(has_room=fills_up(1)).open()

    assert held(client).offsets() == ([] if is_pending else [1])
    assert held(client).holders == ({} if is_pending else {"a": 1})
    make().open()
    assert reasons(client) == ({2: None} if is_pending else {1: None, 2: "too-late"})
    assert held(client).holders == {"a": 2 if is_pending else 1}


def test_a_request_that_an_unread_cancel_ends_is_not_replaced_by_id(
    make: Make, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request("a"), request("b"))
    write_records(Cancel("a"))
    write_records(request(), headers=replaces(0))
    write_records(request(), headers=replaces(1))
    write_records(Cancel("b"))
    journal.read_at_once = 2

    make(has_room=fills_up(1)).open()
    make().open()

    assert reasons(client) == {3: "too-late", 4: None}


# the owner of an index


OTHERS = {
    "another topic": (
        OURS._replace(topic_id="old"),
        "blackbox knows the topic id old, but Kafka has topic: .* run blackbox rebind TB --pending",
    ),
    "another cluster": (
        OURS._replace(cluster_id="north", topic_id="old"),
        "cluster north, topic id old; these brokers are cluster cluster, topic id topic.* rebind TB",
    ),
    "other receipts": (
        OURS._replace(receipts_id="old"),
        "belongs to the receipts topic old, .* to keep its index, run blackbox rebind TB",
    ),
    "another group": (
        OURS._replace(group="theirs"),
        "belongs to the group 'theirs', but BLACKBOX_GROUP_ID is 'blackbox'.* blackbox rebind TB",
    ),
}


@pytest.mark.parametrize(("theirs", "refusal"), OTHERS.values(), ids=OTHERS)
def test_a_foreign_index_is_not_changed_and_the_error_names_the_remedy(
    recovery: Recovery, write_records: Written, journal: FakeJournal, empty_index: ShardIndex, client: Any,
    theirs: Binding, refusal: str,
) -> None:  # fmt: skip
    write_records(request())
    empty_index.begin(Positions(0, 0), binding=theirs)
    store(empty_index, 0, 1, {0: entry()})
    before = held(client)

    with pytest.raises(ForeignIndex, match=refusal):
        recovery.open()

    assert held(client) == before
    assert journal.receipt_records == []


def test_receipts_of_a_recreated_topic_end_no_requests_of_the_new_one(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request())
    recovery.open()
    journal.append(delivered(0))
    client.flushall()
    journal.topic_id = "anew"

    with pytest.raises(ForeignIndex, match="knows the topic id topic, but Kafka has anew"):
        recovery.open()

    assert held(client).positions is None


OLD = Receipt(1, barrier=True, topic_id="old", group="blackbox")
NEW = Receipt(1, barrier=True, topic_id="topic", group="blackbox", mark=Mark(0, 4))


def test_outcomes_before_the_first_barrier_of_a_new_topic_end_nothing(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(), request(), request())
    for receipt in (OLD, delivered(0, 1, 2), NEW, delivered(1)):
        journal.append(receipt)

    recovered = recovery.open()

    assert held(client).offsets() == [0, 2]
    assert recovered.mark is not None
    assert recovered.mark[:2] == (0, 4)


THEIRS = Receipt(1, barrier=True, topic_id="topic", group="theirs")
OF_AN_OLDER_VERSION = Receipt(1, barrier=True, topic_id="topic")


@pytest.mark.parametrize("newest", [THEIRS, replace(THEIRS, barrier=False, mark=Mark(0, 0))])
def test_a_shard_that_another_group_opened_last_stays_closed(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any, newest: Receipt
) -> None:
    write_records(request(), request())
    journal.append(newest)
    journal.append(delivered(0))
    before = list(journal.receipt_records)

    with pytest.raises(ForeignIndex, match="group 'theirs', but BLACKBOX_GROUP_ID is 'blackbox'"):
        recovery.open()

    assert held(client).positions is None
    assert journal.receipt_records == before


def test_an_index_stays_closed_after_another_group_opened_the_shard(
    recovery: Recovery, write_records: Written, journal: FakeJournal
) -> None:
    write_records(request())
    recovery.open()
    journal.append(THEIRS)

    with pytest.raises(
        ForeignIndex, match=r"of the other group and run blackbox rebind TB --pending"
    ):
        recovery.open()


@pytest.mark.parametrize("last", [replace(THEIRS, group="blackbox"), OF_AN_OLDER_VERSION])
def test_the_newest_barrier_or_mark_decides_which_group_owns_the_receipts(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any, last: Receipt
) -> None:
    write_records(request(), request())
    journal.append(THEIRS)
    journal.append(delivered(0))
    journal.append(last)

    recovery.open()

    assert held(client).offsets() == [1]


def test_the_first_of_two_groups_that_open_a_shard_keeps_it(
    make: Make, write_records: Written, journal: FakeJournal
) -> None:
    write_records(request())
    journal.interlopers = [THEIRS]

    for _ in range(2):
        with pytest.raises(ForeignIndex, match="belong to the group 'theirs'"):
            make().open()

    assert [barrier.group for barrier in barriers(journal)] == ["theirs", "blackbox", "theirs"]


def test_a_group_that_opens_a_shard_during_its_recovery_keeps_it_however_much_it_writes(
    recovery: Recovery, write_records: Written, journal: FakeJournal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write_records(request())
    journal.append(delivered())
    others = [THEIRS, *(delivered() for _ in range(200))]
    check = journal.check

    def check_slowly(claims: Iterable[Claim], patience_s: float) -> Checked:
        while others:
            journal.append(others.pop(0))
        return check(claims, patience_s)

    monkeypatch.setattr(journal, "check", check_slowly)

    with pytest.raises(ForeignIndex, match="belong to the group 'theirs'"):
        recovery.open()


def test_a_rebuild_does_not_start_at_a_mark_beyond_the_end_of_the_requests(
    recovery: Recovery, write_records: Written, journal: FakeJournal
) -> None:
    write_records(request())
    journal.append(mark(5, 0))

    with pytest.raises(ForeignIndex, match=r"Kafka lost records .* blackbox rebind TB"):
        recovery.open()


# conditional records with recorded verdicts


def test_a_replacement_of_a_request_below_the_mark_counts_unless_ignored(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(), request(), request())
    write_records(request(), headers=replaces(0))
    write_records(request(), headers=replaces(1))
    journal.append(Receipt(1, ignored=[4], mark=Mark(2, 0), read=5))
    write_records(request(), headers=replaces(1))

    recovery.open()

    assert reasons(client) == {2: None, 3: None, 4: "too-late", 5: "too-late"}


def test_a_carried_record_of_a_request_below_the_mark_counts_unless_ignored(
    recovery: Recovery,
    write_records: Written,
    journal: FakeJournal,
    client: Any,
    empty_index: ShardIndex,
) -> None:
    write_records(request(), request(), request())
    write_records(request("a"), headers=carries(0))
    write_records(request(), headers=carries(1))
    journal.append(Receipt(1, ignored=[4]))
    journal.append(Receipt(1, mark=Mark(2, 0), read=5))
    write_records(request(), headers=carries(1))

    recovery.open()

    assert (reasons(client), held(client).holders) == ({2: None, 3: None}, {"a": 3})
    assert empty_index.unrecorded(10) == (6, [4, 5])


def test_without_a_mark_carried_records_of_removed_requests_count(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(), request(), request())
    write_records(request(), headers=carries(0))
    journal.first_request = 2

    recovery.open()

    assert reasons(client) == {2: None, 3: None}
