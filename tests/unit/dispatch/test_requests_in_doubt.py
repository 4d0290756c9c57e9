"""Requests of which the index cannot say if they were delivered."""

from __future__ import annotations

from typing import Any

from blackbox.core.dispatch import Dispatch
from blackbox.index.shard_index import ShardIndex
from blackbox.records.receipt import (
    Claim,
)
from tests.contract.held import NOW_MS, held
from tests.support.fakes import FakeJournal, FakeWriter
from tests.unit.dispatch.entries import Pend, stored_entry, to


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
