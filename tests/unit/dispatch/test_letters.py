"""The dead letters of dispatch: what they contain, and what happens if their topic does not take them."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from blackbox.core import parking
from blackbox.core.dispatch import Dispatch
from blackbox.core.due_batch import (
    LONGEST_RETRY_MS,
    MOST_LETTER_SPAN,
)  # fmt: skip
from blackbox.core.follow_ups import FollowUps
from blackbox.core.interpret import refused_entry
from blackbox.core.letter_record import RECORD_GONE
from blackbox.core.parking import band_at, bands_of
from blackbox.index.inspector import Inspector
from blackbox.index.shard_index import ShardIndex
from blackbox.index.shared_state import SharedState
from blackbox.records.errors import (
    RecoveryRequired,
    Refused,
)
from blackbox.records.outgoing import MESSAGE_ONLY
from blackbox.records.request import Invalid, Reason, Record, Request
from blackbox.records.topic_limits import NO_LIMITS, Limits
from tests.contract.held import GRACE_S, NOW_MS, PREFIX, SHARD, held, store
from tests.support.fakes import FakeJournal, FakeTargets, FakeWriter
from tests.unit.dispatch.entries import (
    LARGE,
    LETTERS,
    NO_JSON,
    OVER_QUOTA,
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
from tests.unit.dispatch.recurring import COUNTDOWN, SCHEDULES, Log


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
    assert (did.dead, did.postponed) == ({}, 1)
    [(score, offset)] = held(client).due
    assert (band_at(score), offset) == (next(bands_of(parking.LETTERS)), 0)
    for second in range(10):
        assert dispatch.tick(NOW_MS + 1000 * second).postponed == 0, "it is not touched again"
    targets.refusals.clear()
    dispatch.tick(NOW_MS + 10_000)
    assert told(letter(writer, 0)) == ("not-json", "no JSON")


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
    assert (did.due_ms, did.postponed) == ([NOW_MS], 3)
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
    assert dispatch.tick(NOW_MS).postponed == 3
    for _ in range(3):
        assert dispatch.tick(NOW_MS).postponed == 0
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
