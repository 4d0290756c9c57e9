"""What promotion writes again, and what becomes of it when intake reads it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from blackbox.core.bits import Bits
from blackbox.core.intake import Intake
from blackbox.core.offset_set import OffsetSet
from blackbox.core.plan import Batch, Bounds
from blackbox.core.promotion import Promoted, Promotion
from blackbox.formats import Format, Options, make_format
from blackbox.index.shard_index import ShardIndex
from blackbox.records import entry as entries
from blackbox.records.errors import JournalLost, RecoveryRequired
from blackbox.records.request import Headers, Record, request_id
from tests.contract.held import NOW_MS, PREFIX, SHARD, held
from tests.support.fakes import FakeJournal

DAY_S, DAY_MS = 86_400, 86_400_000
LETTER = "payload-lost"


def countdown(max_countdown_s: int = 400 * DAY_S) -> Format:
    return make_format("countdown", Options(max_countdown_s, lambda topic: topic == "TB"))


@dataclass
class PromotionJournal(FakeJournal):
    """Hides what is at `open_from` and later, where another producer's transaction is open.

    `aborted` are records of aborted transactions, by offset.
    """

    open_from: int | None = None
    aborted: dict[int, Record] = field(default_factory=dict)

    def request_bounds(self) -> Bounds:
        end = self.log_end() if self.open_from is None else self.open_from
        return Bounds(self.first_request, end)

    def log_end(self) -> int:
        return len(self.request_records)

    def settled_bounds(self) -> Bounds:
        if self.open_from is not None:
            raise JournalLost(f"an open transaction hides what is at {self.open_from} and later")
        return self.request_bounds()

    def requests(self, start: int, end: int, ended: OffsetSet | None = None) -> Iterator[Batch]:
        assert start >= end or end <= self.request_bounds().end, "not committed yet"
        yield from super().requests(start, end, ended)

    def uncommitted(self, start: int, end: int) -> Iterator[Batch]:
        for batch in super().requests(start, end):
            offsets = range(batch.start, batch.end)
            also = [self.aborted[offset] for offset in offsets if offset in self.aborted]
            yield batch._replace(records=[*batch.records, *also])


@dataclass
class Producer:
    """Writes to the end of the journal; `meanwhile` happens before its first records arrive there."""

    journal: PromotionJournal
    meanwhile: Callable[[], object] = lambda: None
    _waiting: list[tuple[Record, Headers, int]] = field(default_factory=list)

    def open(self) -> None: ...

    def begin(self) -> None:
        self._waiting = []

    def send(self, record: Record, headers: Headers, timestamp_ms: int) -> None:
        self._waiting.append((record, headers, timestamp_ms))

    def flush(self) -> tuple[int, Mapping[int, str]]:
        self.meanwhile()
        self.meanwhile = lambda: None
        for record, headers, timestamp_ms in self._waiting:
            append(self.journal, record.key, record.value, headers, timestamp_ms)
        return len(self.journal.request_records), {}

    def commit(self) -> None:
        self.journal.request_records.append(None)  # the marker of the transaction

    def abort(self) -> None:
        count = len(self._waiting)
        undo(self.journal, range(self.journal.log_end() - count, self.journal.log_end()))
        self.journal.request_records.append(None)  # the marker


def undo(journal: PromotionJournal, offsets: Iterable[int]) -> None:
    """Make these the records of an aborted transaction."""
    for offset in offsets:
        written = journal.request_records[offset]
        assert written is not None
        journal.aborted[offset], journal.request_records[offset] = written, None


def append(
    journal: FakeJournal,
    key: bytes | None,
    value: bytes | None,
    headers: Iterable[tuple[str, bytes | None]] = (),
    timestamp_ms: int = NOW_MS,
    *,
    is_stamped: bool = True,
) -> int:
    offset = len(journal.request_records)
    read = Record(offset, timestamp_ms, key, value, list(headers), None, is_stamped)
    journal.request_records.append(read)
    return offset


class Lab:
    """A shard with a cold tier, its horizon is a day."""

    def __init__(self, index: ShardIndex, client: Any) -> None:
        self.index, self.client = index, client
        self.journal = PromotionJournal()
        self.producer = Producer(self.journal)
        self.format = countdown()
        self.now_ms = NOW_MS

    def ask(self, countdown_s: float, id: str | None = None, **more: Any) -> int:
        value = {"topic": "orders", "message": "m", "countdown": countdown_s, "id": id}
        return append(self.journal, None, orjson.dumps(value), timestamp_ms=self.now_ms, **more)

    def cancel(self, id: str) -> int:
        return append(self.journal, None, orjson.dumps({"id": id, "cancel": True}))

    def read(self) -> None:
        start, end = self.index.positions.requests, self.journal.request_bounds().end
        records = [one for one in self.journal.request_records[start:end] if one is not None]
        intake = Intake(self.format, self.index, DAY_MS)
        intake.parse_and_store(Batch(start, end, records), self.now_ms)

    def begin(self) -> None:
        """A caller begins a transaction: it hides all that is written from now on."""
        self.journal.open_from = self.journal.log_end()

    def end(self, *aborted: int) -> None:
        """The caller ends it; without `aborted` it commits its records."""
        undo(self.journal, aborted)
        self.journal.request_records.append(None)  # the marker
        self.journal.open_from = None

    def promote(self) -> Promoted:
        return Promotion(
            shard=SHARD,
            position=self.index.positions.requests,
            cold=self.bits(),
            journal=self.journal,
            producer=self.producer,
            format=self.format,
            lead_ms=DAY_MS,
            renew_after_ms=DAY_MS,
        ).run(self.now_ms)

    def bits(self) -> Bits:
        segments = self.client.hgetall(PREFIX + "cold")
        return Bits({int(segment): bitmap for segment, bitmap in segments.items()})

    def cold(self) -> set[int]:
        return set(self.bits())

    def pending(self) -> dict[int, tuple[str | None, int]]:
        """Why each pending request becomes a dead letter, if it does, and when it is due."""
        found = held(self.client)
        stored = {offset: entries.decode(found.payloads[offset]) for offset in found.offsets()}
        return {offset: (entry.reason, entry.due_ms) for offset, entry in stored.items()}

    def lowest(self) -> int:
        """The offset that the low-water mark can move to."""
        with closing(self.index.walk()) as walk:
            while walk.slice():
                pass
            return walk.lowest


@pytest.fixture
def lab(index: ShardIndex, client: Any) -> Lab:
    return Lab(index, client)


def test_a_cold_request_that_kafka_removed_becomes_a_dead_letter_and_frees_the_low_water_mark(
    lab: Lab,
) -> None:
    removed, kept = lab.ask(30 * DAY_S), lab.ask(30 * DAY_S)
    lab.read()
    assert (lab.cold(), lab.lowest()) == ({removed, kept}, removed)
    lab.journal.first_request = 1

    promoted = lab.promote()
    again = lab.promote()  # before intake has read what the first run wrote
    lab.read()

    assert (promoted.lost, again.lost) == (1, 0)
    assert lab.pending() == {2: (LETTER, lab.now_ms)}
    assert (lab.cold(), lab.lowest()) == ({kept}, kept)
    assert lab.promote().lost == 0


def test_a_dead_letter_names_the_record_that_kafka_removed(lab: Lab) -> None:
    lab.ask(30 * DAY_S)
    lab.read()
    lab.journal.first_request = 1
    lab.promote()
    lab.read()

    [payload] = held(lab.client).payloads.values()
    letter = entries.decode(payload)

    assert "Kafka removed the record at offset 0" in (letter.detail or "")
    assert (letter.message, letter.key, list(letter.headers)) == (None, None, [])


def test_a_request_that_was_promoted_before_kafka_removed_it_is_not_lost(lab: Lab) -> None:
    lab.ask(2 * DAY_S)
    lab.read()
    lab.now_ms += 3 * DAY_MS // 2
    assert lab.promote().promoted == 1
    lab.journal.first_request = 1

    assert lab.promote().lost == 0
    lab.read()

    assert lab.pending() == {1: (None, NOW_MS + 2 * DAY_MS)}


@pytest.mark.parametrize("is_by_id", [False, True])
def test_a_removed_request_that_its_caller_cancels_meanwhile_is_no_dead_letter(
    lab: Lab, is_by_id: bool
) -> None:
    offset = lab.ask(30 * DAY_S, "a")
    lab.read()
    lab.journal.first_request = 1

    def cancel() -> None:
        if is_by_id:
            header = ("blackbox-cancel", request_id(SHARD, offset).encode())
            append(lab.journal, None, None, [header])
        else:
            lab.cancel("a")

    lab.producer.meanwhile = cancel
    lab.promote()
    lab.read()

    assert (lab.pending(), lab.cold()) == ({}, set())


def test_a_renewed_request_that_was_cancelled_by_its_first_id_is_a_dead_letter_if_kafka_removed_it(
    lab: Lab,
) -> None:
    """Only the removed record named its first id."""
    first = lab.ask(30 * DAY_S)
    lab.read()
    lab.now_ms += 2 * DAY_MS
    assert lab.promote().renewed == 1
    lab.read()
    [renewed] = lab.cold()
    header = ("blackbox-cancel", request_id(SHARD, first).encode())
    append(lab.journal, None, None, [header])
    lab.read()
    lab.journal.first_request = renewed + 1

    assert lab.promote().lost == 1
    lab.read()

    [(reason, _)] = lab.pending().values()
    assert (reason, lab.cold()) == (LETTER, set())


def test_a_request_that_was_accepted_is_promoted_and_renewed_after_the_longest_countdown_was_lowered(
    lab: Lab,
) -> None:
    lab.ask(40 * DAY_S)
    lab.read()
    lab.format = countdown(30 * DAY_S)

    lab.now_ms += 2 * DAY_MS
    assert lab.promote().renewed == 1
    lab.read()
    lab.now_ms += 37 * DAY_MS
    assert lab.promote().promoted == 1
    lab.read()

    [(reason, due_ms)] = lab.pending().values()
    assert (reason, due_ms) == (None, NOW_MS + 40 * DAY_MS)


def test_a_new_request_is_limited_by_the_lowered_countdown(lab: Lab) -> None:
    lab.format = countdown(30 * DAY_S)
    lab.format.of_accepted  # noqa: B018
    lab.ask(40 * DAY_S)
    lab.read()

    assert lab.pending() == {0: ("too-far", NOW_MS)}


def test_requests_are_promoted_while_a_callers_transaction_is_open(lab: Lab) -> None:
    lab.ask(2 * DAY_S)
    lab.read()
    lab.begin()
    lab.ask(30 * DAY_S)
    lab.now_ms += 3 * DAY_MS // 2

    promoted = lab.promote()
    lab.read()
    assert (promoted.promoted, lab.pending()) == (1, {})
    lab.end()
    lab.read()

    assert lab.pending() == {2: (None, NOW_MS + 2 * DAY_MS)}


def test_a_request_that_an_earlier_run_carried_behind_an_open_transaction_is_not_carried_again(
    lab: Lab,
) -> None:
    lab.ask(2 * DAY_S)
    lab.read()
    lab.begin()
    lab.ask(30 * DAY_S)
    lab.now_ms += 3 * DAY_MS // 2
    assert lab.promote().promoted == 1

    assert lab.promote().promoted == 0
    lab.end()
    lab.read()

    assert lab.pending() == {2: (None, NOW_MS + 2 * DAY_MS)}


def test_a_removed_request_that_an_earlier_run_carried_behind_an_open_transaction_is_not_lost(
    lab: Lab,
) -> None:
    lab.ask(2 * DAY_S)
    lab.read()
    lab.begin()
    lab.ask(30 * DAY_S)
    lab.now_ms += 3 * DAY_MS // 2
    assert lab.promote().promoted == 1
    lab.journal.first_request = 1

    assert lab.promote().lost == 0
    lab.end()
    lab.read()

    assert lab.pending() == {2: (None, NOW_MS + 2 * DAY_MS)}


@pytest.mark.parametrize("is_by_id", [False, True])
@pytest.mark.parametrize("is_committed", [False, True])
def test_a_request_that_an_open_transaction_cancels_is_promoted_only_after_that_is_aborted(
    lab: Lab, is_committed: bool, is_by_id: bool
) -> None:
    offset = lab.ask(2 * DAY_S, "a")
    lab.read()
    lab.begin()
    if is_by_id:
        header = ("blackbox-cancel", request_id(SHARD, offset).encode())
        cancel = append(lab.journal, None, None, [header])
    else:
        cancel = lab.cancel("a")
    lab.now_ms += 3 * DAY_MS // 2

    left_out = lab.promote()
    assert (left_out.promoted, left_out.passed_over) == (0, 1), "the next run should follow soon"
    lab.end(*(() if is_committed else (cancel,)))
    assert lab.promote().promoted == (0 if is_committed else 1)
    lab.read()

    assert len(lab.pending()) == (0 if is_committed else 1)


def test_a_request_whose_carried_record_was_aborted_behind_an_open_transaction_is_carried_later(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.ask(2 * DAY_S)
    lab.read()
    lab.begin()
    lab.ask(30 * DAY_S)
    lab.now_ms += 3 * DAY_MS // 2
    with monkeypatch.context() as interrupted:
        interrupted.setattr(lab.producer, "commit", lab.producer.abort)
        lab.promote()

    passed_over = lab.promote()
    assert (passed_over.promoted, passed_over.passed_over) == (0, 1)
    lab.end()
    promoted = lab.promote()
    assert (promoted.promoted, promoted.passed_over) == (1, 0)
    lab.read()

    assert [due_ms for _, due_ms in lab.pending().values()] == [NOW_MS + 2 * DAY_MS]


def test_of_caller_ids_that_the_index_has_not_read_only_hashes_are_kept(lab: Lab) -> None:
    replaced, _ = lab.ask(2 * DAY_S, "a" * 200), lab.ask(2 * DAY_S, "b" * 200)
    lab.read()
    lab.ask(2 * DAY_S, "a" * 200)
    for number in range(20_000):
        lab.ask(2 * DAY_S, f"{number:0200}")
    lab.journal.read_at_once = 100
    lab.now_ms += 3 * DAY_MS // 2
    tracemalloc.start()
    try:
        promoted = lab.promote()
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (promoted.cold, promoted.promoted) == (2, 1)
    assert replaced in lab.cold()
    assert most_bytes < 5_000_000, "less than the ids"


def test_promotion_waits_while_millions_of_records_have_not_been_read(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blackbox.core.promotion.MOST_UNREAD", 3)
    lab.ask(2 * DAY_S)
    lab.read()
    for _ in range(4):
        lab.ask(0)
    lab.now_ms += 3 * DAY_MS // 2

    with pytest.raises(RecoveryRequired, match="TB-3: more than 3 request records are waiting"):
        lab.promote()
    lab.read()

    assert lab.promote().promoted == 1


def test_records_of_aborted_transactions_are_not_waited_for(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blackbox.core.promotion.MOST_UNREAD", 3)
    lab.ask(2 * DAY_S)
    lab.read()
    lab.begin()
    lab.end(*[lab.ask(0) for _ in range(10)])
    lab.now_ms += 3 * DAY_MS // 2

    assert lab.promote().promoted == 1


def test_promotion_continues_later_if_callers_write_millions_of_records_meanwhile(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blackbox.core.promotion.MOST_UNREAD", 3)
    monkeypatch.setattr("blackbox.core.promotion.CARRIED_AT_ONCE", 1)
    for _ in range(6):
        lab.ask(2 * DAY_S)
    lab.read()
    lab.now_ms += 3 * DAY_MS // 2
    lab.producer.meanwhile = lambda: [lab.ask(0, f"{number}") for number in range(4)]

    with pytest.raises(RecoveryRequired):
        lab.promote()
    lab.read()

    # records that it writes itself do not count
    assert lab.promote().promoted == 5
