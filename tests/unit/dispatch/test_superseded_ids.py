"""Requests whose id is written again while dispatch delivers them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from blackbox.core import parking
from blackbox.core.follow_ups import CONTENDED_MS, FollowUps
from blackbox.core.parking import band_at
from blackbox.core.plan import Batch
from blackbox.records.errors import (
    Refused,
)
from blackbox.records.request import Reason, Record
from tests.contract.held import NOW_MS, PREFIX, SHARD, held
from tests.support.fakes import FakeTargets, FakeWriter
from tests.unit.dispatch.entries import Make, Pend, to
from tests.unit.dispatch.recurring import CANCEL_A, COUNTDOWN, RECURS, Log, cancel_of


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
    assert (did.targets, did.postponed) == ({"bills": 1}, 1)
    assert [outgoing.topic for outgoing in writer.committed] == ["bills"]
    assert held(client).due == [(NOW_MS + 1000, 0)]
    assert not client.exists(PREFIX + "in-flight")


def test_without_transactions_nothing_is_sent_twice_because_an_id_was_superseded(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    writer.exactly_once = False
    pend(RECURS, to("bills"))
    writer._ends["TB/3"] = 5
    dispatch = make(
        follow_ups=FollowUps(SHARD, COUNTDOWN, Log(Record(4, NOW_MS, b"a", CANCEL_A, [])))
    )

    dispatch.tick(NOW_MS)
    dispatch.tick(NOW_MS + 5000)

    assert [outgoing.topic for outgoing in writer.committed] == ["orders", SHARD.topic, "bills"]


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


def test_after_an_id_was_superseded_another_one_does_not_abort_requests_without_follow_ups(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    writer._ends["TB/3"] = 1000
    follow_ups = FollowUps(SHARD, COUNTDOWN, Log(cancel_of("a", 900)))
    follow_ups.note_contended([to(caller_id="another")], NOW_MS)
    pend(RECURS, to("bills"))

    make(follow_ups=follow_ups).tick(NOW_MS)

    assert writer.calls.count("send bills@1") == 1
    assert [outgoing.topic for outgoing in writer.committed] == ["bills"]


def test_an_id_that_was_superseded_does_not_abort_the_others_again(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    writer._ends["TB/3"] = 1000
    follow_ups = FollowUps(SHARD, COUNTDOWN, Log(cancel_of("a", 900)))
    follow_ups.note_contended([RECURS], NOW_MS)
    pend(RECURS, to("letters", caller_id="b", recurs="every 60000"))

    make(follow_ups=follow_ups).tick(NOW_MS)

    assert writer.calls.count("send letters@1") == 1
    assert writer.sent_to("letters") == [1]


def test_while_each_transaction_is_superseded_by_another_id_the_others_are_delivered(
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


def test_a_request_of_an_id_that_was_superseded_is_delivered_once(
    make: Make, pend: Pend, writer: FakeWriter
) -> None:
    follow_ups = FollowUps(SHARD, COUNTDOWN, Log())
    follow_ups.note_contended([RECURS], NOW_MS)
    dispatch = make(follow_ups=follow_ups, batch_limit=2)
    pend(to("bills"), RECURS, *[to("bills")] * 2)

    for _ in range(3):
        dispatch.tick(NOW_MS)

    assert (writer.sent_to("orders"), writer.sent_to("bills")) == ([1], [0, 2, 3])


def test_a_superseded_id_goes_with_the_others_again_after_a_while(
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
