"""Messages that the client or the brokers refuse, alone or because of their batch."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import count as numbers
from types import SimpleNamespace
from typing import Any

import pytest

from blackbox.core.dispatch import Dispatch
from blackbox.core.triage import ALONE_PER_TICK, LETTER_LATER_MS
from blackbox.records import topic_limits
from blackbox.records.errors import (
    JournalLost,
    Refused,
)
from blackbox.records.outgoing import Outgoing, Refusal, deliveries
from blackbox.records.request import Reason
from blackbox.records.topic_limits import MOST_PARTS, NO_LIMITS, PARTS_S, Limits, batch_bytes
from tests.contract.held import NOW_MS, SHARD, held
from tests.support.fakes import FakeTargets, FakeWriter
from tests.unit.dispatch.entries import (
    LETTERS,
    TOO_LARGE,
    UNKNOWN,
    Make,
    Pend,
    invalid,
    letter,
    stored_entry,
    to,
    told,
)


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
    assert (len(did.due_ms), did.postponed) == (MOST_PARTS + 2, 10)
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
    assert did.postponed == 2
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


def test_at_least_once_delivers_what_kafka_accepts_and_postpones_the_rest(
    dispatch: Dispatch, pend: Pend, writer: FakeWriter, targets: FakeTargets, client: Any
) -> None:
    writer.exactly_once = False
    writer.failing = {"slow": (Reason.UNREACHABLE, "timed out"), "strict": TOO_LARGE}
    pend(to(), to("slow"), to("strict"), to())

    did = dispatch.tick(NOW_MS)

    assert writer.receipts[0].delivered == {"orders/0": [(0, 0), (3, 1)]}
    assert sorted(writer.receipts[0].removals()) == [0, 3]
    assert (did.due_ms, did.postponed) == ([NOW_MS, NOW_MS], 2)
    assert sorted(held(client).offsets()) == [1, 2]
    assert targets.strict["strict"].one_by_one


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
