"""What the journals alone say of a request, in the cases that a real service makes only by chance."""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson
import pytest

from blackbox.core.journal_lookup import JournalLookup
from blackbox.core.journal_search import CLOCKS_APART_MS, LimitReached, ReadLimit
from blackbox.core.request_status import Place, RequestStatus
from blackbox.formats import Options
from blackbox.formats.countdown import Countdown
from blackbox.records.cancel import HEADER as CANCEL
from blackbox.records.cancel import REPLACES
from blackbox.records.carried import carry_on
from blackbox.records.receipt import DOUBTFUL, Receipt
from blackbox.records.recurrence import next_request_headers
from blackbox.records.request import Headers, Record, Shard, request_id
from tests.fakes import FakeJournal

SHARD = Shard("TB", 3)
BEGAN_MS = 1_767_225_600_000
HOUR_MS = 3_600_000


@dataclass
class Town:
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
    town = Town()
    offset = town.ask(0, id="a")
    town.ask(60, id="a")
    town.deliver(offset)
    assert town.status(offset).place == Place("orders", 0, 7)
    assert not [call for call in town.journal.calls if call.startswith("requests")]


def test_receipts_from_before_a_request_was_written_are_not_read() -> None:
    town = Town()
    for hours in range(5, 0, -1):
        town.deliver(1000 + hours, BEGAN_MS - hours * HOUR_MS)
    offset = town.ask(3600)
    town.deliver(1000, BEGAN_MS - CLOCKS_APART_MS // 2)
    assert town.status(offset).state == "pending"
    assert [call for call in town.journal.calls if call.startswith("receipts")] == [
        "receipts 10 to 12"
    ]


def test_a_request_is_pending_if_a_later_receipt_voids_its_outcome() -> None:
    town = Town()
    offset = town.ask(0)
    town.deliver(offset)
    town.journal.append(Receipt(BEGAN_MS, void=[offset], barrier=True))
    assert town.status(offset).state == "pending"
    town.deliver(offset, BEGAN_MS + HOUR_MS)
    assert town.status(offset).at_ms == BEGAN_MS + HOUR_MS


def test_a_receipt_after_the_due_time_voids_an_outcome_before_it() -> None:
    town = Town()
    offset = town.ask(60)
    town.journal.append(Receipt(BEGAN_MS, dead=[offset]))
    assert town.status(offset).state == "dead"
    town.journal.append(Receipt(BEGAN_MS + HOUR_MS, void=[offset], barrier=True))
    assert town.status(offset).state == "pending"


def test_a_receipt_of_a_rebind_names_the_earlier_request_at_that_offset() -> None:
    town = Town()
    offset = town.ask(60)
    asked_again = {"TB/0": [(offset, offset)]}
    town.journal.append(Receipt(BEGAN_MS, delivered=asked_again, cut=[offset]))
    assert town.status(offset).state == "pending"
    town.deliver(offset, BEGAN_MS + HOUR_MS)
    assert town.status(offset).at_ms == BEGAN_MS + HOUR_MS


def test_reading_ends_once_an_outcome_can_no_longer_be_void() -> None:
    town = Town()
    offset = town.ask(0)
    town.deliver(offset)
    for _ in range(DOUBTFUL):
        town.deliver(1000)
    town.journal.receipt_records.append(b"not to be read")
    assert town.status(offset).state == "delivered"


def test_the_next_time_of_a_recurring_request_does_not_replace_it() -> None:
    town = Town()
    offset = town.ask(0, id="daily")
    town.ask(60, id="daily", headers=_marked(offset))
    assert town.status(offset).state == "pending", "its receipt is about to be visible"
    town.deliver(offset)
    assert town.status(offset).state == "delivered"


def test_the_next_time_of_another_request_replaces_this_one() -> None:
    town = Town()
    offset = town.ask(0, id="daily")
    town.ask(60, id="daily", headers=_marked(offset + 7))
    assert town.status(offset).state == "ended"


def test_a_request_that_was_replaced_by_id_has_ended() -> None:
    town = Town()
    offset, other = town.ask(60), town.ask(60)
    town.ask(90, headers=_replaces(offset))
    assert (town.status(offset).state, town.status(other).state) == ("ended", "pending")


def test_a_late_replacement_replaces_nothing_with_its_caller_id() -> None:
    town = Town()
    delivered, offset = town.ask(0), town.ask(60, id="a")
    town.deliver(delivered)
    late = town.ask(90, id="a", headers=_replaces(delivered))
    town.journal.append(Receipt(BEGAN_MS, invalid=[late]))
    assert (town.status(offset).state, town.status(late).state) == ("pending", "invalid")


def test_a_replacement_also_ends_the_request_with_its_caller_id() -> None:
    town = Town()
    other, offset = town.ask(60), town.ask(60, id="a")
    town.ask(90, id="a", headers=_replaces(other))
    assert [town.status(one).state for one in (other, offset)] == ["ended", "ended"]


def test_the_replacement_of_an_ended_request_is_found() -> None:
    town = Town()
    by_id, by_name, cancelled, carried = (town.ask(3600, id=id) for id in ("a", "b", "c", "d"))
    there = town.carry(carried)
    since = len(town.journal.request_records)
    moved = town.ask(60, headers=[(REPLACES, request_id(SHARD, by_id).encode())])
    again = town.ask(60, id="b")
    refused = town.ask(60, id="c")
    town.journal.append(Receipt(BEGAN_MS, invalid=[refused]))
    for offset in (by_id, by_name, cancelled):
        town.cancel(offset)
    last = town.ask(60, id="d")
    lookup = town.lookup()
    found = [
        lookup.replaced_by(lookup.own_record(one), since) for one in (by_id, by_name, cancelled)
    ]
    assert found == [moved, again, None]
    assert lookup.replaced_by(lookup.own_record(there), since) == last
    assert lookup.replaced_by(lookup.own_record(carried), 0) == last


def test_a_cold_request_is_followed_through_all_its_records() -> None:
    town = Town()
    offset = town.ask(3600, id="far")
    renewed = town.carry(offset, is_cold=True)
    assert town.status(offset).state == "pending"
    near = town.carry(renewed)
    assert (town.status(offset).state, town.status(offset).carried) == (
        "pending",
        SHARD.source(near),
    )
    town.deliver(near, BEGAN_MS + HOUR_MS)
    status = town.status(offset)
    assert (status.id, status.source) == (request_id(SHARD, offset), SHARD.source(offset))
    assert (status.state, status.carried) == ("delivered", SHARD.source(near))


def test_a_request_without_its_record_is_found_by_its_carried_record() -> None:
    town = Town()
    offset, ended = town.ask(3600), town.ask(3600)
    renewed = town.carry(offset, is_cold=True)
    near = town.carry(renewed)
    town.journal.first_request = renewed
    town.journal.request_records[:renewed] = [None] * renewed
    status = town.status(offset)
    assert (status.state, status.carried) == ("pending", SHARD.source(near))
    assert (status.id, status.target) == (request_id(SHARD, offset), "orders")
    assert town.status(ended).state == "unknown"
    with pytest.raises(LimitReached):
        town.lookup(ReadLimit(records=0)).status(ended)


def test_a_carried_record_does_not_restore_a_cancelled_request() -> None:
    town = Town()
    offset = town.ask(3600)
    town.cancel(offset)
    town.carry(offset)
    assert town.status(offset).state == "ended"


def test_a_cancel_by_the_first_id_ends_a_carried_request() -> None:
    town = Town()
    offset = town.ask(3600)
    near = town.carry(offset)
    assert town.status(offset).state == "pending"
    town.cancel(offset)
    assert (town.status(offset).state, town.status(near).state) == ("ended", "ended")


def test_a_cancel_does_not_end_a_future_dead_letter() -> None:
    town = Town()
    offset = town.write(b"no request")
    town.cancel(offset)
    assert town.status(offset).state == "pending"


def _marked(offset: int) -> Headers:
    return [
        (name, str(value).encode())
        for name, value in next_request_headers([], SHARD.source(offset))
    ]


def _replaces(offset: int) -> Headers:
    return [(REPLACES, request_id(SHARD, offset).encode())]


def test_a_lookup_ends_at_its_limit_of_records_or_of_time() -> None:
    town = Town()
    offset = town.ask(3600)
    for _ in range(10):
        town.deliver(1000)
    asked = town.lookup().own_record(offset)
    with pytest.raises(LimitReached):
        town.lookup(ReadLimit(records=5)).outcome(asked)
    ticks = iter(range(100))
    with pytest.raises(LimitReached):
        town.lookup(ReadLimit(seconds=5, clock=lambda: next(ticks))).outcome(asked)
    assert town.lookup(ReadLimit(records=10)).outcome(asked) is None


def test_without_its_record_an_outcome_is_found_by_the_read_offsets_of_receipts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("blackbox.core.journal_search.NEAR", 50)
    town = Town()
    for number in range(1000):
        town.journal.append(
            Receipt(BEGAN_MS, delivered={"orders/0": [(number, 7)]}, read=number + 1)
        )
    town.journal.first_request = 1000
    limit = ReadLimit(records=100)
    lookup = town.lookup(limit)
    outcome = lookup.outcome(lookup.own_record(700))
    assert outcome is not None
    assert outcome.state == "delivered"


def test_a_barrier_with_a_lower_read_offset_hides_no_outcome() -> None:
    town = Town()
    for number in range(100):
        town.journal.append(
            Receipt(BEGAN_MS, delivered={"orders/0": [(number, 7)]}, read=number + 1)
        )
        town.journal.append(Receipt(BEGAN_MS, barrier=True, read=1))
    town.journal.first_request = 1000
    lookup = town.lookup()
    assert [lookup.outcome(lookup.own_record(number)) is not None for number in range(100)] == [
        True
    ] * 100


def test_a_carried_record_is_searched_near_the_time_of_its_promotion() -> None:
    town = Town()
    offset = town.ask(2 * 3600)
    for _ in range(2 * 3600):
        town.journal.request_records.append(None)
    near = town.carry(offset)
    lookup = town.lookup(ReadLimit(records=10))
    town.journal.calls.clear()
    assert lookup.carried_nearby(lookup.own_record(offset), CLOCKS_APART_MS) == near
    assert town.journal.calls == [f"requests {near} to {near + 1}"]
