"""The next request of a recurring one, a tombstone, a copy in the history: all in the transaction of the delivery."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from blackbox.core.follow_ups import FollowUps
from blackbox.core.plan import Batch, Bounds
from blackbox.records.entry import Entry
from blackbox.records.errors import (
    Refused,
)
from blackbox.records.outgoing import deliveries
from blackbox.records.recurrence import ENDS_TOO_LARGE
from blackbox.records.request import Invalid, Reason, Record
from blackbox.records.topic_limits import MOST_PARTS, NO_LIMITS, Limits, batch_bytes
from tests.contract.held import NOW_MS, SHARD, held
from tests.support.fakes import FakeTargets, FakeWriter
from tests.unit.dispatch.entries import LETTERS, TOO_LARGE, UNKNOWN, Make, Pend, letter, to
from tests.unit.dispatch.recurring import COUNTDOWN, RECURS, SCHEDULES, Log


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
