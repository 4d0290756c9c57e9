from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from blackbox.core.intake import Intake, Taken
from blackbox.core.parsing import parse_batch
from blackbox.core.plan import Batch, Positions, Tail
from blackbox.core.receipt_history import Shortened, replaced
from blackbox.index.shard_index import ShardIndex
from blackbox.records import entry as entries
from blackbox.records.entry import Entry
from blackbox.records.errors import PositionsMoved
from blackbox.records.request import (
    Cancel,
    Headers,
    Invalid,
    Reason,
    Record,
    Request,
    Shard,
    request_id,
)
from tests.contract.held import held
from tests.support.fakes import FakeFormat, record

NOW_MS = 50_000
NOTHING = Taken(accepted=0, invalid=0, cancelled=0, replaced=0, first_due_ms=None)


def request(due_ms: int = NOW_MS, caller_id: str | None = None) -> Request:
    return Request("orders", b"hi", due_ms, b"k", [("h", b"v")], "shop", caller_id, None)


def intake(index: ShardIndex, **parsed: Request | Cancel | Invalid) -> Intake:
    """An intake whose format parses the record at offset 7 as the argument `at_7`."""
    return Intake(FakeFormat({int(name[3:]): value for name, value in parsed.items()}), index, None)


def batch(start: int, end: int, *offsets: int) -> Batch:
    return Batch(start, end, [record(offset) for offset in offsets])


def test_intake_reports_what_it_stored(index: ShardIndex) -> None:
    taking = intake(
        index,
        at_0=request(NOW_MS + 9, "a"),
        at_1=request(NOW_MS + 5),
        at_2=request(NOW_MS + 7, "a"),
        at_3=request(NOW_MS, "b"),
        at_4=Cancel("b"),
        at_5=Cancel("c"),
        at_9=Invalid(Reason.NOT_JSON, "no"),
    )

    taken = taking.parse_and_store(batch(0, 9, 0, 1, 2, 3, 4, 5), NOW_MS)
    also = taking.parse_and_store(batch(9, 10, 9), NOW_MS)

    assert taken == Taken(accepted=2, invalid=0, cancelled=1, replaced=1, first_due_ms=NOW_MS + 5)
    assert also == Taken(accepted=0, invalid=1, cancelled=0, replaced=0, first_due_ms=0)


def test_the_same_batch_again_stores_nothing_and_reports_nothing(
    index: ShardIndex, client: Any
) -> None:
    taking = intake(index, at_0=request(), at_1=Cancel("a"))
    taking.parse_and_store(batch(0, 2, 0, 1), NOW_MS)
    before = held(client)

    assert taking.parse_and_store(batch(0, 2, 0, 1), NOW_MS) == NOTHING
    assert held(client) == before


def test_a_batch_of_gaps_moves_the_position(index: ShardIndex) -> None:
    assert intake(index).parse_and_store(batch(0, 50), NOW_MS) == NOTHING
    assert index.positions == Positions(50, 0)


def test_a_batch_beyond_the_position_is_not_stored(index: ShardIndex) -> None:
    with pytest.raises(PositionsMoved):
        intake(index, at_5=request()).parse_and_store(batch(5, 6, 5), NOW_MS)


def of_epochs(first: int, last: int, *offsets: int) -> Batch:
    return batch(offsets[0], offsets[-1] + 1, *offsets)._replace(epochs=(first, last))


def test_the_log_is_checked_only_after_a_change_of_leader(
    index: ShardIndex,
) -> None:
    checked = list[Tail]()
    taking = replace(
        intake(index, **{f"at_{n}": request() for n in range(4)}), check_log=checked.append
    )

    taking.parse_and_store(of_epochs(5, 6, 0, 1), NOW_MS)
    taking.parse_and_store(of_epochs(6, 6, 2), NOW_MS)
    assert checked == []

    taking.parse_and_store(of_epochs(7, 7, 3), NOW_MS)
    assert [(tail.offset, tail.epoch) for tail in checked] == [(2, 6)]


@pytest.mark.parametrize(("epoch", "first"), [(3, 1), (2, 0)], ids=["another leader", "read again"])
def test_nothing_is_stored_after_a_record_that_the_log_lost(
    index: ShardIndex, client: Any, epoch: int, first: int
) -> None:
    def check_log(tail: Tail) -> None:
        raise replaced(Shard("TB", 0), tail)

    taking = replace(intake(index, at_0=request(), at_1=request()), check_log=check_log)
    taking.parse_and_store(of_epochs(2, 2, 0), NOW_MS)
    before = held(client)

    with pytest.raises(Shortened, match="the record at 0 is not the one that was read there"):
        taking.parse_and_store(of_epochs(epoch, 3, *range(first, 2)), NOW_MS)

    assert held(client) == before


def test_a_request_is_stored_with_all_its_fields(index: ShardIndex, client: Any) -> None:
    asked = Request(
        "orders", None, NOW_MS, b"\xff", [("h", None), ("i", b"\xfe")], "shop", "a", NOW_MS + 1
    )

    intake(index, at_0=asked).parse_and_store(batch(0, 1, 0), NOW_MS)

    assert entries.decode(held(client).payloads[0]) == Entry(
        "orders", None, NOW_MS, b"\xff", [("h", None), ("i", b"\xfe")], "shop", "a", NOW_MS + 1
    )


@pytest.mark.parametrize(("written_ms", "due_ms"), [(10, 10), (NOW_MS + 99, NOW_MS)])
def test_an_invalid_record_is_stored_unchanged_and_is_due_at_once(
    index: ShardIndex, client: Any, written_ms: int, due_ms: int
) -> None:
    original = Record(0, written_ms, b"k", b"{not json", [("h", b"v")])
    taking = intake(index, at_0=Invalid(Reason.NOT_JSON, "see byte 1"))

    taking.parse_and_store(Batch(0, 1, [original]), NOW_MS)

    assert entries.decode(held(client).payloads[0]) == Entry(
        "", b"{not json", due_ms, b"k", [("h", "v")], reason="not-json", detail="see byte 1"
    )
    assert held(client).due == [(due_ms, 0)]


def test_a_record_that_the_client_cannot_read_completely_is_invalid(
    index: ShardIndex, client: Any
) -> None:
    why = Invalid(Reason.BAD_HEADERS, "a header name is no UTF-8")
    unreadable = Record(0, 10, b"k", b"{}", [], why)

    taken = intake(index).parse_and_store(Batch(0, 1, [unreadable]), NOW_MS)

    stored = entries.decode(held(client).payloads[0])
    assert (taken.invalid, taken.accepted) == (1, 0)
    assert (stored.reason, stored.detail) == ("bad-headers", "a header name is no UTF-8")


def test_a_cancel_header_cancels_a_request_of_any_format(
    index: ShardIndex,
) -> None:
    taking = intake(index, at_0=request())
    taking.parse_and_store(batch(0, 1, 0), NOW_MS)
    headers: Headers = [("x", b""), ("blackbox-cancel", request_id(index.shard, 0).encode())]
    cancel = Record(1, NOW_MS, None, None, headers)

    assert taking.parse_and_store(Batch(1, 2, [cancel]), NOW_MS) == replace(NOTHING, cancelled=1)


@pytest.mark.parametrize("id", [None, b"", b"o-17", b"6b1b36cb-8e6f-4b0e-9d5a-0d6e0f4a4d3a"])
def test_a_cancel_header_without_a_valid_id_becomes_a_dead_letter(
    index: ShardIndex, client: Any, id: bytes | None
) -> None:
    cancel = Record(0, NOW_MS, None, None, [("blackbox-cancel", id)])

    assert intake(index).parse_and_store(Batch(0, 1, [cancel]), NOW_MS).invalid == 1
    assert entries.decode(held(client).payloads[0]).reason == Reason.BAD_CANCEL


def test_a_request_carried_and_cancelled_in_one_batch_is_accepted_once(
    index: ShardIndex,
) -> None:
    far = request(NOW_MS + 9_000_000, "a")
    taking = Intake(FakeFormat({0: far, 1: far, 2: Cancel("a")}), index, 1000)
    carried = record(1)._replace(headers=[("blackbox-carried", b"[0,0,1,false]")])

    cold = taking.parse_and_store(Batch(0, 1, [record(0)]), NOW_MS)
    both = taking.parse_and_store(Batch(1, 3, [carried, record(2)]), NOW_MS)

    assert (cold.accepted, both.accepted, both.carried, both.cancelled) == (1, 0, 0, 1)


@pytest.mark.parametrize(
    ("is_stamped", "by_ms", "told"), [(True, 3000, 3000), (True, -50, 0), (False, 3000, None)]
)
def test_intake_reports_a_broker_timestamp_ahead_of_its_clocks(
    is_stamped: bool, by_ms: int, told: int | None
) -> None:
    last = Record(0, NOW_MS + by_ms, None, b"{}", [], has_broker_time=is_stamped)
    assert (
        parse_batch(FakeFormat({0: Cancel("a")}), Batch(0, 1, [last]), NOW_MS, None).kafka_ahead_ms
        == told
    )
