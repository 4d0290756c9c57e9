"""Lookups in the journals alone, in cases that a real service causes only by chance."""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson
import pytest

from blackbox.core.journal_lookup import JournalLookup
from blackbox.core.journal_search import LimitReached, ReadLimit
from blackbox.core.request_status import Place, RequestStatus
from blackbox.formats import Options
from blackbox.formats.countdown import Countdown
from blackbox.records.cancel import HEADER as CANCEL
from blackbox.records.cancel import REPLACES
from blackbox.records.carried import carry_on
from blackbox.records.clock import CLOCKS_APART_MS
from blackbox.records.receipt import DOUBTFUL, Receipt
from blackbox.records.recurrence import next_request_headers
from blackbox.records.request import Headers, Record, Shard, request_id
from tests.support.fakes import FakeJournal

SHARD = Shard("TB", 3)
BEGAN_MS = 1_767_225_600_000
HOUR_MS = 3_600_000


@dataclass
class Scenario:
    """A shard's journals, written one record after the other, a second apart."""

    journal: FakeJournal = field(default_factory=FakeJournal)

    def write(self, value: bytes | None, headers: Headers | None = None) -> int:
        offset = len(self.journal.request_records)
        written_ms = BEGAN_MS + 1000 * offset
        self.journal.request_records.append(Record(offset, written_ms, None, value, headers or []))
        return offset

    def ask(self, countdown_s: float, id: str | None = None, headers: Headers | None = None) -> int:
        asked = {"topic": "orders", "message": "hi", "countdown": countdown_s, "id": id}
        return self.write(orjson.dumps(asked), headers)

    def carry(self, offset: int, *, is_cold: bool = False) -> int:
        record = self.journal.record(offset)
        assert record is not None
        return self.write(record.value, carry_on(record, is_cold=is_cold))

    def cancel(self, offset: int) -> int:
        return self.write(None, [(CANCEL, request_id(SHARD, offset).encode())])

    def deliver(self, offset: int, at_ms: int = BEGAN_MS) -> None:
        self.journal.append(Receipt(at_ms, delivered={"orders/0": [(offset, 7)]}))

    def status(self, offset: int) -> RequestStatus:
        return self.lookup().status(offset)

    def lookup(self, limit: ReadLimit | None = None) -> JournalLookup:
        format = Countdown(Options(max_countdown_s=10**8, own_topics=lambda name: False))
        now_ms = BEGAN_MS + HOUR_MS
        return JournalLookup(SHARD, self.journal, format, now_ms, limit=limit or ReadLimit())


def test_the_lookup_of_a_delivered_request_reads_no_later_requests() -> None:
    scenario = Scenario()
    offset = scenario.ask(0, id="a")
    scenario.ask(60, id="a")
    scenario.deliver(offset)
    assert scenario.status(offset).place == Place("orders", 0, 7)
    assert not [call for call in scenario.journal.calls if call.startswith("requests")]


def test_receipts_from_before_a_request_was_written_are_not_read() -> None:
    scenario = Scenario()
    for hours in range(5, 0, -1):
        scenario.deliver(1000 + hours, BEGAN_MS - hours * HOUR_MS)
    offset = scenario.ask(3600)
    scenario.deliver(1000, BEGAN_MS - CLOCKS_APART_MS // 2)
    assert scenario.status(offset).state == "pending"
    assert [call for call in scenario.journal.calls if call.startswith("receipts")] == [
        "receipts 10 to 12"
    ]


def test_a_request_is_pending_if_a_later_receipt_voids_its_outcome() -> None:
    scenario = Scenario()
    offset = scenario.ask(0)
    scenario.deliver(offset)
    scenario.journal.append(Receipt(BEGAN_MS, void=[offset], barrier=True))
    assert scenario.status(offset).state == "pending"
    scenario.deliver(offset, BEGAN_MS + HOUR_MS)
    assert scenario.status(offset).at_ms == BEGAN_MS + HOUR_MS


def test_a_receipt_after_the_due_time_voids_an_outcome_before_it() -> None:
    scenario = Scenario()
    offset = scenario.ask(60)
    scenario.journal.append(Receipt(BEGAN_MS, dead=[offset]))
    assert scenario.status(offset).state == "dead"
    scenario.journal.append(Receipt(BEGAN_MS + HOUR_MS, void=[offset], barrier=True))
    assert scenario.status(offset).state == "pending"


def test_a_receipt_of_a_rebind_names_the_earlier_request_at_that_offset() -> None:
    scenario = Scenario()
    offset = scenario.ask(60)
    asked_again = {"TB/0": [(offset, offset)]}
    scenario.journal.append(Receipt(BEGAN_MS, delivered=asked_again, cut=[offset]))
    assert scenario.status(offset).state == "pending"
    scenario.deliver(offset, BEGAN_MS + HOUR_MS)
    assert scenario.status(offset).at_ms == BEGAN_MS + HOUR_MS


def test_reading_ends_once_an_outcome_can_no_longer_be_void() -> None:
    scenario = Scenario()
    offset = scenario.ask(0)
    scenario.deliver(offset)
    for _ in range(DOUBTFUL):
        scenario.deliver(1000)
    scenario.journal.receipt_records.append(b"not to be read")
    assert scenario.status(offset).state == "delivered"


def test_the_next_time_of_a_recurring_request_does_not_replace_it() -> None:
    scenario = Scenario()
    offset = scenario.ask(0, id="daily")
    scenario.ask(60, id="daily", headers=_marked(offset))
    assert scenario.status(offset).state == "pending", "its receipt is about to be visible"
    scenario.deliver(offset)
    assert scenario.status(offset).state == "delivered"


def test_the_next_time_of_another_request_replaces_this_one() -> None:
    scenario = Scenario()
    offset = scenario.ask(0, id="daily")
    scenario.ask(60, id="daily", headers=_marked(offset + 7))
    assert scenario.status(offset).state == "ended"


def test_a_request_that_was_replaced_by_id_has_ended() -> None:
    scenario = Scenario()
    offset, other = scenario.ask(60), scenario.ask(60)
    scenario.ask(90, headers=_replaces(offset))
    assert (scenario.status(offset).state, scenario.status(other).state) == ("ended", "pending")


def test_a_late_replacement_replaces_nothing_with_its_caller_id() -> None:
    scenario = Scenario()
    delivered, offset = scenario.ask(0), scenario.ask(60, id="a")
    scenario.deliver(delivered)
    late = scenario.ask(90, id="a", headers=_replaces(delivered))
    scenario.journal.append(Receipt(BEGAN_MS, invalid=[late]))
    assert (scenario.status(offset).state, scenario.status(late).state) == ("pending", "invalid")


def test_a_replacement_also_ends_the_request_with_its_caller_id() -> None:
    scenario = Scenario()
    other, offset = scenario.ask(60), scenario.ask(60, id="a")
    scenario.ask(90, id="a", headers=_replaces(other))
    assert [scenario.status(one).state for one in (other, offset)] == ["ended", "ended"]


def test_the_replacement_of_an_ended_request_is_found() -> None:
    scenario = Scenario()
    by_id, by_name, cancelled, carried = (scenario.ask(3600, id=id) for id in ("a", "b", "c", "d"))
    there = scenario.carry(carried)
    since = len(scenario.journal.request_records)
    moved = scenario.ask(60, headers=[(REPLACES, request_id(SHARD, by_id).encode())])
    again = scenario.ask(60, id="b")
    refused = scenario.ask(60, id="c")
    scenario.journal.append(Receipt(BEGAN_MS, invalid=[refused]))
    for offset in (by_id, by_name, cancelled):
        scenario.cancel(offset)
    last = scenario.ask(60, id="d")
    lookup = scenario.lookup()
    found = [
        lookup.replaced_by(lookup.own_record(one), since) for one in (by_id, by_name, cancelled)
    ]
    assert found == [moved, again, None]
    assert lookup.replaced_by(lookup.own_record(there), since) == last
    assert lookup.replaced_by(lookup.own_record(carried), 0) == last


def test_a_cold_request_is_followed_through_all_its_records() -> None:
    scenario = Scenario()
    offset = scenario.ask(3600, id="far")
    renewed = scenario.carry(offset, is_cold=True)
    assert scenario.status(offset).state == "pending"
    near = scenario.carry(renewed)
    assert (scenario.status(offset).state, scenario.status(offset).carried) == (
        "pending",
        SHARD.source(near),
    )
    scenario.deliver(near, BEGAN_MS + HOUR_MS)
    status = scenario.status(offset)
    assert (status.id, status.source) == (request_id(SHARD, offset), SHARD.source(offset))
    assert (status.state, status.carried) == ("delivered", SHARD.source(near))


def test_a_request_without_its_record_is_found_by_its_carried_record() -> None:
    scenario = Scenario()
    offset, ended = scenario.ask(3600), scenario.ask(3600)
    renewed = scenario.carry(offset, is_cold=True)
    near = scenario.carry(renewed)
    scenario.journal.first_request = renewed
    scenario.journal.request_records[:renewed] = [None] * renewed
    status = scenario.status(offset)
    assert (status.state, status.carried) == ("pending", SHARD.source(near))
    assert (status.id, status.target) == (request_id(SHARD, offset), "orders")
    assert scenario.status(ended).state == "unknown"
    with pytest.raises(LimitReached):
        scenario.lookup(ReadLimit(records=0)).status(ended)


def test_a_carried_record_does_not_restore_a_cancelled_request() -> None:
    scenario = Scenario()
    offset = scenario.ask(3600)
    scenario.cancel(offset)
    scenario.carry(offset)
    assert scenario.status(offset).state == "ended"


def test_a_cancel_by_the_first_id_ends_a_carried_request() -> None:
    scenario = Scenario()
    offset = scenario.ask(3600)
    near = scenario.carry(offset)
    assert scenario.status(offset).state == "pending"
    scenario.cancel(offset)
    assert (scenario.status(offset).state, scenario.status(near).state) == ("ended", "ended")


def test_a_cancel_does_not_end_a_future_dead_letter() -> None:
    scenario = Scenario()
    offset = scenario.write(b"no request")
    scenario.cancel(offset)
    assert scenario.status(offset).state == "pending"


def _marked(offset: int) -> Headers:
    return [
        (name, str(value).encode())
        for name, value in next_request_headers([], SHARD.source(offset))
    ]


def _replaces(offset: int) -> Headers:
    return [(REPLACES, request_id(SHARD, offset).encode())]


def test_a_lookup_ends_at_its_limit_of_records_or_of_time() -> None:
    scenario = Scenario()
    offset = scenario.ask(3600)
    for _ in range(10):
        scenario.deliver(1000)
    asked = scenario.lookup().own_record(offset)
    with pytest.raises(LimitReached):
        scenario.lookup(ReadLimit(records=5)).outcome(asked)
    ticks = iter(range(100))
    with pytest.raises(LimitReached):
        scenario.lookup(ReadLimit(seconds=5, clock=lambda: next(ticks))).outcome(asked)
    assert scenario.lookup(ReadLimit(records=10)).outcome(asked) is None


def test_without_its_record_an_outcome_is_found_by_the_read_offsets_of_receipts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("blackbox.core.journal_search.NEAR", 50)
    scenario = Scenario()
    for number in range(1000):
        scenario.journal.append(
            Receipt(BEGAN_MS, delivered={"orders/0": [(number, 7)]}, read=number + 1)
        )
    scenario.journal.first_request = 1000
    limit = ReadLimit(records=100)
    lookup = scenario.lookup(limit)
    outcome = lookup.outcome(lookup.own_record(700))
    assert outcome is not None
    assert outcome.state == "delivered"


def test_a_barrier_with_a_lower_read_offset_hides_no_outcome() -> None:
    scenario = Scenario()
    for number in range(100):
        scenario.journal.append(
            Receipt(BEGAN_MS, delivered={"orders/0": [(number, 7)]}, read=number + 1)
        )
        scenario.journal.append(Receipt(BEGAN_MS, barrier=True, read=1))
    scenario.journal.first_request = 1000
    lookup = scenario.lookup()
    assert [lookup.outcome(lookup.own_record(number)) is not None for number in range(100)] == [
        True
    ] * 100


def test_a_carried_record_is_searched_near_the_time_of_its_promotion() -> None:
    scenario = Scenario()
    offset = scenario.ask(2 * 3600)
    for _ in range(2 * 3600):
        scenario.journal.request_records.append(None)
    near = scenario.carry(offset)
    lookup = scenario.lookup(ReadLimit(records=10))
    scenario.journal.calls.clear()
    assert lookup.carried_nearby(lookup.own_record(offset), CLOCKS_APART_MS) == near
    assert scenario.journal.calls == [f"requests {near} to {near + 1}"]
