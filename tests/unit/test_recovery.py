from __future__ import annotations

import logging
from typing import Any

import pytest

from blackbox.core.barrier import ATTEMPTS, FIRST_STRETCH
from blackbox.core.intake import Intake, Taken
from blackbox.core.plan import Batch, Positions
from blackbox.core.rebuild import Rebuild
from blackbox.core.recovery import Recovery
from blackbox.core.settlement import Settlement
from blackbox.index.shard_index import ShardIndex
from blackbox.records.entry import Entry
from blackbox.records.errors import (
    Fenced,
    ForeignIndex,
    IndexFull,
    JournalLost,
    PositionsMoved,
    RecoveryRequired,
)
from blackbox.records.receipt import Claim, Receipt, encode
from blackbox.records.request import Cancel
from tests.contract.held import NOW_MS, PREFIX, SHARD, held, store
from tests.support.fakes import FakeJournal, FakeWriter
from tests.unit.opening import Make, Written, barriers, counts, delivered, request


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock that recovery uses, set by the tests."""
    now_s = [0.0]
    monkeypatch.setattr("blackbox.core.recovery.time.monotonic", lambda: now_s[0])
    return now_s


# the usual case


def test_an_empty_shard_opens_with_a_barrier(
    recovery: Recovery, journal: FakeJournal, client: Any
) -> None:
    assert counts(recovery.open()) == (0, 0, 0)
    assert barriers(journal) == [Receipt(NOW_MS, barrier=True, topic_id="topic", group="blackbox")]
    assert held(client).positions == Positions(0, 1)


def test_a_lost_index_is_rebuilt_from_both_journals(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request("a"), request(), None, request("a"), request("b"), Cancel("b"), request())
    journal.append(delivered(1))

    assert counts(recovery.open()) == (1, 0, 0)
    assert held(client).offsets() == [3, 6]
    assert held(client).holders == {"a": 3}
    assert held(client).positions == Positions(7, 3)


def test_a_recovery_without_new_records_changes_no_entry(
    recovery: Recovery, write_records: Written, client: Any
) -> None:
    write_records(request(), request())
    recovery.open()
    before = held(client)

    recovery.open()

    assert (held(client).due, held(client).payloads) == (before.due, before.payloads)
    assert held(client).positions == Positions(2, 3)


def test_earlier_owners_are_fenced_before_any_receipt_is_read(
    recovery: Recovery, writer: FakeWriter, journal: FakeJournal
) -> None:
    journal.calls = writer.calls
    journal.receipt_records.append(encode(Receipt(at_ms=0)))

    recovery.open()

    assert writer.calls[:2] == ["confirm", "open"]
    assert writer.calls.index("open") < writer.calls.index("receipts 0 to 1")
    assert writer.calls.index("commit") < writer.calls.index("receipts 0 to 2")


def test_a_former_owner_fences_no_other_owner(make: Make, write_records: Written,
    writer: FakeWriter, journal: FakeJournal) -> None:  # fmt: skip
    def deny() -> None:
        raise Fenced("the shard was given to another owner")

    with pytest.raises(Fenced):
        make(confirm=deny).open()

    assert (writer.calls, journal.calls) == ([], [])


def test_a_rebuild_reads_requests_once_and_after_the_receipts(
    recovery: Recovery, write_records: Written, journal: FakeJournal
) -> None:
    write_records(request())

    recovery.open()

    assert journal.calls[-2:] == ["requests 0 to 1", "requests 1 to 1"]
    assert journal.calls[-3] == "receipts 0 to 1"
    assert len([call for call in journal.calls if call.startswith("requests")]) == 2


def test_a_cancel_lost_in_a_rollback_is_applied_again_before_the_shard_opens(
    recovery: Recovery, write_records: Written, empty_index: ShardIndex, client: Any
) -> None:
    write_records(request("a"), Cancel("a"))
    empty_index.begin(Positions(0, 0))
    store(empty_index, 0, 1, {0: Entry(*request("a"))})

    recovery.open()

    assert held(client).due == []


def test_a_cancel_written_during_a_long_recovery_applies_before_the_shard_opens(
    make: Make, write_records: Written, empty_index: ShardIndex, intake: Intake, client: Any,
    now_s: list[float],
) -> None:  # fmt: skip
    def apply_slowly(batch: Batch, opening: Rebuild | None) -> Taken:
        if not now_s[0]:
            now_s[0] = 4.0
            write_records(Cancel("unwanted"))
        return intake.parse_and_store(batch, NOW_MS, opening)

    write_records(request("unwanted"), request())
    make(apply=apply_slowly).open()

    assert held(client).due == [(NOW_MS, 1)]
    assert empty_index.positions.requests == 3


def test_a_shard_opens_although_requests_arrive_faster_than_they_are_read(
    make: Make, write_records: Written, empty_index: ShardIndex, intake: Intake, journal: FakeJournal,
    now_s: list[float],
) -> None:  # fmt: skip
    def apply_slowly(batch: Batch, opening: Rebuild | None) -> Taken:
        now_s[0] += 4.0
        write_records(request())
        return intake.parse_and_store(batch, NOW_MS, opening)

    write_records(request())
    make(apply=apply_slowly).open()

    assert empty_index.positions.requests == 3
    assert len(journal.request_records) == 4


# the check of the last receipt


def test_requests_whose_messages_are_missing_stay_pending(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(), request("a"), request())
    journal.append(delivered(0, 1))
    journal.absent = {1}

    assert counts(recovery.open()) == (1, 1, 0)
    assert [barrier.void for barrier in barriers(journal)] == [[1]]
    assert held(client).offsets() == [1, 2]
    assert held(client).holders == {"a": 1}


def test_every_later_rebuild_treats_a_torn_receipt_the_same(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(), request())
    journal.append(delivered(0, 1))
    journal.absent = {0}
    recovery.open()
    journal.absent = set()
    client.flushall()

    recovery.open()

    assert held(client).offsets() == [0]


def test_only_the_last_receipt_is_checked(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(), request())
    journal.append(delivered(0))
    journal.append(delivered(1))
    journal.absent = {0}

    assert recovery.open().missing == 0
    assert held(client).due == []


def test_a_receipt_below_the_position_is_not_checked(
    recovery: Recovery, write_records: Written, journal: FakeJournal, empty_index: ShardIndex
) -> None:
    write_records(request())
    journal.append(delivered(0))
    journal.absent = {0}
    empty_index.begin(Positions(0, 2))

    assert recovery.open().missing == 0
    assert barriers(journal)[0].void == []


def test_the_last_receipt_is_found_behind_any_number_of_aborted_ones(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request())
    journal.append(delivered(0))
    journal.absent = {0}
    journal.receipt_records += [None] * (3 * FIRST_STRETCH)

    assert recovery.open().missing == 1
    assert held(client).offsets() == [0]


def test_an_unreadable_message_delays_one_request_and_not_the_shard(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(), request("a"), request())
    journal.append(delivered(0, 1))
    journal.unreadable = {1}

    assert counts(recovery.open()) == (1, 0, 0)
    [barrier] = barriers(journal)
    assert (barrier.void, [claim.offset for claim in barrier.doubtful]) == ([1], [1])
    assert recovery.index.doubtful == {1: Claim(1, "delivered", "orders/0", 1, "")}
    assert held(client).offsets() == [1, 2]


def test_a_doubtful_request_stays_doubtful_if_redis_is_lost(
    make: Make, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(), request())
    journal.append(delivered(0, 1))
    journal.unreadable = {1}
    make().open()
    client.flushall()

    rebuilt = make()
    rebuilt.open()

    assert list(rebuilt.index.doubtful) == [1]
    assert held(client).offsets() == [1]


@pytest.mark.parametrize("ends", [Cancel("a"), request("a")])
def test_a_cancel_or_replacement_does_not_remove_a_doubtful_request(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any, ends: Any
) -> None:
    write_records(request("a"), ends)
    journal.append(delivered(0))
    journal.unreadable = {0}

    recovery.open()

    assert 0 in held(client).offsets()


# other owners write


def test_a_receipt_written_during_recovery_is_checked(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(request(), request(), request())
    journal.interlopers = [delivered(0, 1)]
    journal.absent = {1}

    assert counts(recovery.open()) == (1, 1, 0)
    assert [barrier.void for barrier in barriers(journal)] == [[], [1]]
    assert held(client).offsets() == [1, 2]


def test_owners_that_keep_writing_stop_the_recovery(
    recovery: Recovery, write_records: Written, journal: FakeJournal
) -> None:
    journal.interlopers = [delivered() for _ in range(ATTEMPTS)]

    with pytest.raises(RecoveryRequired, match="other owners kept writing receipts; starting over"):
        recovery.open()


def test_recovery_succeeds_in_its_last_attempt(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(*(request() for _ in range(ATTEMPTS)))
    journal.append(delivered(0))
    journal.interlopers = [delivered(n) for n in range(1, ATTEMPTS)]
    journal.absent = set(range(ATTEMPTS))

    assert counts(recovery.open()) == (0, ATTEMPTS, 0)
    assert held(client).offsets() == list(range(ATTEMPTS))


def test_a_position_that_another_owner_advances_is_never_written_back(
    make: Make, write_records: Written, journal: FakeJournal, writer: FakeWriter, client: Any
) -> None:
    recovery = make()
    recovery.open()
    commit = writer.commit

    def superseded(receipt: Receipt, not_before_ms: int = 0) -> int:
        position = commit(receipt)
        client.set(f"blackbox:{{{SHARD}}}:receipts", position + 10)
        return position

    writer.commit = superseded  # type: ignore[method-assign]

    with pytest.raises(PositionsMoved):
        recovery.open()

    assert held(client).positions == Positions(0, 13)


@pytest.mark.parametrize("step", ["open", "begin", "commit"])
def test_a_recovery_that_cannot_be_finished_changes_no_entry(
    recovery: Recovery, write_records: Written, journal: FakeJournal, writer: FakeWriter,
    empty_index: ShardIndex, client: Any, step: str,
) -> None:  # fmt: skip
    write_records(request())
    empty_index.begin(Positions(0, 0))
    store(empty_index, 0, 1, {0: Entry(*request())})
    journal.append(delivered(0))
    before = held(client)
    writer.before[step] = JournalLost("no answer")

    with pytest.raises(JournalLost):
        recovery.open()
    assert held(client) == before

    recovery.open()
    assert held(client).due == []


# positions and journals that do not fit


@pytest.mark.parametrize("positions", [Positions(3, 0), Positions(0, 3), Positions(9, 9)])
def test_an_index_beyond_the_journals_is_refused_with_the_remedy(
    recovery: Recovery, write_records: Written, journal: FakeJournal, writer: FakeWriter,
    empty_index: ShardIndex, positions: Positions,
) -> None:  # fmt: skip
    write_records(request(), request())
    journal.append(delivered(0))
    empty_index.begin(positions)

    with pytest.raises(
        ForeignIndex,
        match=r"but the journals end at \(2, 2\), .*: Kafka lost records .* run blackbox rebind TB ",
    ):
        recovery.open()

    assert barriers(journal) == []


def test_an_owner_that_finds_a_foreign_index_fences_no_rebind(
    recovery: Recovery, journal: FakeJournal, writer: FakeWriter, empty_index: ShardIndex
) -> None:
    empty_index.begin(Positions(0, 0), binding=journal.binding("blackbox")._replace(topic_id="old"))

    with pytest.raises(ForeignIndex):
        recovery.open()

    assert writer.calls == ["confirm"]


def test_requests_that_retention_removed_are_named_in_the_barrier(
    recovery: Recovery, write_records: Written, journal: FakeJournal, empty_index: ShardIndex,
    client: Any, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    write_records(*(request() for _ in range(10)))
    journal.first_request = 7
    empty_index.begin(Positions(4, 0))

    with caplog.at_level(logging.ERROR):
        recovered = recovery.open()

    assert recovered.gone == 3
    assert list(barriers(journal)[0].gone or []) == [4, 7]
    assert held(client).offsets() == [7, 8, 9]
    assert "retention removed requests 4 to 6 before they were read" in caplog.text


@pytest.mark.parametrize("step", ["begin", "commit"])
def test_requests_that_retention_removed_are_reported_if_the_first_opening_failed(
    make: Make, write_records: Written, journal: FakeJournal, writer: FakeWriter,
    empty_index: ShardIndex, others_index: ShardIndex, step: str,
) -> None:  # fmt: skip
    write_records(*(request() for _ in range(10)))
    journal.first_request = 7
    empty_index.begin(Positions(4, 0))
    writer.before[step] = JournalLost("no answer")
    with pytest.raises(JournalLost):
        make().open()

    assert make(others_index).open().gone == 3
    assert list(barriers(journal)[-1].gone or []) == [4, 7]
    others_index.forget_gone()
    assert make().open().gone == 0
    assert barriers(journal)[-1].gone is None


def test_requests_that_retention_removed_are_counted_by_the_opening_that_succeeds(
    make: Make, write_records: Written, journal: FakeJournal, empty_index: ShardIndex,
    others_index: ShardIndex, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def no_answer(*_: int) -> None:
        raise JournalLost("no answer")

    write_records(*(request() for _ in range(10)))
    journal.first_request = 7
    empty_index.begin(Positions(4, 0))
    with monkeypatch.context() as broken:
        broken.setattr(journal, "requests", no_answer)
        with pytest.raises(JournalLost):
            make().open()

    assert make(others_index).open().gone == 3
    others_index.forget_gone()
    assert make().open().gone == 0


def test_requests_that_retention_removed_are_reported_together_with_earlier_ones(
    make: Make, write_records: Written, journal: FakeJournal, writer: FakeWriter,
    empty_index: ShardIndex, others_index: ShardIndex,
) -> None:  # fmt: skip
    write_records(*(request() for _ in range(10)))
    journal.first_request = 7
    empty_index.begin(Positions(4, 0))
    writer.before["commit"] = JournalLost("no answer")
    with pytest.raises(JournalLost):
        make().open()
    journal.first_request = 9

    assert make(others_index).open().gone == 5
    assert list(barriers(journal)[0].gone or []) == [4, 9]


def test_a_rebuild_starts_where_the_journals_start(
    recovery: Recovery, write_records: Written, journal: FakeJournal, client: Any
) -> None:
    write_records(*(request() for _ in range(5)))
    journal.append(delivered(0))
    journal.append(delivered(4))
    journal.first_request, journal.first_receipt = 3, 2

    assert counts(recovery.open()) == (1, 0, 0)
    assert held(client).offsets() == [3]


def test_requests_removed_during_recovery_make_it_start_again_after_them(
    recovery: Recovery,
    write_records: Written,
    journal: FakeJournal,
    writer: FakeWriter,
    client: Any,
) -> None:
    write_records(*(request() for _ in range(5)))
    commit = writer.commit

    def retention_runs(receipt: Receipt, not_before_ms: int = 0) -> int:
        journal.first_request = 2
        return commit(receipt)

    writer.commit = retention_runs  # type: ignore[method-assign]

    with pytest.raises(JournalLost):
        recovery.open()
    recovery.open()

    assert held(client).offsets() == [2, 3, 4]


# long journals


def test_outcomes_are_applied_in_chunks_and_then_the_position_advances(
    recovery: Recovery, write_records: Written, journal: FakeJournal, empty_index: ShardIndex,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("blackbox.core.settling.CHUNK", 4)
    empty_index.begin(Positions(0, 0))
    for first in range(0, 12, 3):
        journal.append(delivered(first, first + 1, first + 2))
    settled: list[tuple[list[int], int]] = []
    settle = empty_index.settle

    def settle_noted(done: Settlement) -> None:
        settled.append((sorted(done.removals), done.receipts))
        settle(done)

    monkeypatch.setattr(empty_index, "settle", settle_noted)

    recovered = recovery.open()

    assert settled == [([0, 1, 2, 3], 0), ([4, 5, 6, 7], 0), ([8, 9, 10, 11], 0), ([], 9)]
    assert recovered.outcomes == 12


def test_an_interrupted_recovery_continues_where_it_stopped(
    make: Make, write_records: Written, journal: FakeJournal, intake: Intake, empty_index: ShardIndex,
    client: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("blackbox.core.settling.CHUNK", 2)
    empty_index.begin(Positions(0, 0))
    write_records(*(request() for _ in range(9)))
    for first in range(0, 8, 2):
        journal.append(delivered(first, first + 1))
    journal.read_at_once = 3
    batches = 0

    def apply_two(batch: Batch, opening: Rebuild | None) -> Taken:
        nonlocal batches
        batches += 1
        if batches == 3:
            raise JournalLost("no answer")
        return intake.parse_and_store(batch, NOW_MS, opening)

    with pytest.raises(JournalLost):
        make(apply=apply_two).open()
    assert held(client).positions == Positions(6, 9)

    assert make().open().outcomes == 0
    assert held(client).offsets() == [8]


def test_a_shard_opens_in_a_full_redis_with_requests_left_in_kafka(
    make: Make, write_records: Written, journal: FakeJournal, intake: Intake, client: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    write_records(*(request() for _ in range(6)))
    journal.read_at_once = 2

    def apply_until_full(batch: Batch, opening: Rebuild | None) -> Taken:
        if batch.start == 4:
            raise IndexFull("Redis has no memory left")
        return intake.parse_and_store(batch, NOW_MS, opening)

    with caplog.at_level(logging.WARNING):
        make(apply=apply_until_full).open()

    assert held(client).offsets() == [0, 1, 2, 3]
    assert held(client).positions == Positions(4, 1)
    assert "opening with a backlog still in Kafka" in caplog.text


def test_a_full_redis_that_was_rolled_back_delivers_no_cancelled_request(
    make: Make, write_records: Written, journal: FakeJournal, intake: Intake, client: Any
) -> None:
    write_records(request("a"), request("b"), request("c"), request(), Cancel("a"), request("b"))
    journal.read_at_once = 2

    def apply_until_full(batch: Batch, opening: Rebuild | None) -> Taken:
        if batch.start == 4:
            raise IndexFull("Redis has no memory left")
        return intake.parse_and_store(batch, NOW_MS, opening)

    make(apply=apply_until_full).open()

    assert held(client).offsets() == [2, 3]
    assert held(client).positions == Positions(4, 1)

    make().open()

    assert held(client).offsets() == [2, 3, 5]
    assert held(client).holders == {"b": 5, "c": 2}


def test_receipts_written_by_another_version_are_refused(
    recovery: Recovery, write_records: Written, journal: FakeJournal
) -> None:
    journal.receipt_records.append(encode(delivered(0)).replace(b'"v":1', b'"v":2'))

    with pytest.raises(
        ValueError, match="the receipt has version 2, but this blackbox reads version 1"
    ):
        recovery.open()


def test_a_redis_rolled_back_into_a_rebuild_delivers_nothing_twice(
    recovery: Recovery,
    write_records: Written,
    journal: FakeJournal,
    empty_index: ShardIndex,
    client: Any,
) -> None:
    write_records(request("a"), request(), request())
    recovery.open()
    journal.append(delivered(0, 1))
    state = f"{PREFIX}state"
    client.hset(state, "rebuild", "of another owner")  # as it was before the rebuild had ended
    client.set(f"{PREFIX}receipts", 0)
    empty_index.load()

    recovery.open()

    assert held(client).offsets() == [2]
    assert held(client).holders == {}
