"""Searches of a shard's journals for what ended a request or took its place, within a limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from blackbox.core.own_record import OwnRecord, origin_of
from blackbox.core.parsing import parse_batch, touched_by
from blackbox.core.plan import Batch, Carried, Cold, Named, Positions, Replacement, View
from blackbox.core.ports import Journal
from blackbox.core.request_status import DEAD, Place, RequestStatus
from blackbox.core.resolve import resolve
from blackbox.formats import Format
from blackbox.records.carried import carried
from blackbox.records.clock import CLOCKS_APART_MS
from blackbox.records.receipt import Places, Receipt, without_void
from blackbox.records.recurrence import follows
from blackbox.records.request import Record, Shard, request_id

# No longer than a person or an HTTP client waits for an answer.
LOOK_UP_S = 5.0
# Some seconds of a core, which the service lacks during that time.
LOOK_UP_RECORDS = 200_000
# Offsets that are read first, where the record probably is: one fetch.
NEAR = 4_000


class LimitReached(Exception):
    """A look-up has read as much as it may."""


@dataclass(eq=False, slots=True)
class ReadLimit:
    """How much of the journals one look-up may read, in seconds and in records."""

    seconds: float = LOOK_UP_S
    records: float = LOOK_UP_RECORDS
    clock: Callable[[], float] = time.monotonic
    _read: int = 0
    _began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    @property
    def left_s(self) -> float:
        return max(0.0, self.seconds - (self.clock() - self._began_s))

    def spend(self, records: int = 0) -> None:
        """Count records that were read. Raises LimitReached when a limit is exceeded."""
        self._read += records
        if self._read > self.records or self.clock() - self._began_s > self.seconds:
            raise LimitReached

    def __str__(self) -> str:
        return f"{self._read:,} records within {self.clock() - self._began_s:.1f} s"


@dataclass(frozen=True, slots=True)
class JournalSearch:
    """Searches the journals of one shard. Raises RecoveryRequired when Kafka does not answer.

    `has_receipts`: whether the receipts topic has a partition for the shard yet. Methods raise
    LimitReached once they have read as much as the `limit` allows and found nothing.
    """

    shard: Shard
    journal: Journal
    format: Format
    now_ms: int
    has_receipts: bool = True
    limit: ReadLimit = field(default_factory=ReadLimit)

    def outcome(self, own: OwnRecord, since: int = 0) -> RequestStatus | None:
        """The outcome in its receipt, without the reason of a dead letter; None: no receipt names it.

        No receipt below `since` is read.
        """
        if not self.has_receipts:
            return None
        bounds = self.journal.receipt_bounds()
        end = bounds.end
        first = min(max(bounds.start, since), end)
        # A receipt names a request soon after it was due, or soon after it was written if it was
        # refused. Without its record, its receipt is after the first one whose writer knew it.
        written = self._first_since(own.written_ms, first, end)
        if own.written_ms is None:
            near = self._first_that_knew(own.offset, written, end)
        else:
            near = self._first_since(own.status.due_ms, written, end)
        for low, high in _nearest_first(written, near, end):
            found = self._outcome_in(own, low, high, end)
            if found is not None:
                return found
        return None

    def carried_nearby(self, own: OwnRecord, horizon_ms: int) -> int | None:
        """Like `carried_to`, but search only where promotion should have written the record."""
        low, high = self._offsets_after(own, 0)
        near = self._first_promoted(own, horizon_ms, low, high)
        return self._carried_in(own, near, min(near + NEAR, high))

    def carried_to(self, own: OwnRecord, horizon_ms: int, since: int = 0) -> int | None:
        """The record, not below `since`, that a cold request has become; None if none is found."""
        # promotion writes it about a horizon before it is due
        low, high = self._offsets_after(own, since)
        near = self._first_promoted(own, horizon_ms, low, high)
        for first, last in _nearest_first(low, near, high):
            found = self._carried_in(own, first, last)
            if found is not None:
                return found
        return None

    def next_change(self, own: OwnRecord, start: int, end: int) -> tuple[int, bool] | None:
        """The next record that ends the request or carries it on, and whether it carries it on.

        Decided as in intake, for an index that holds nothing but this request.
        """
        at, caller_id = own.offset, own.status.caller_id
        named = {
            request_id(self.shard, one): Named(at, False, caller_id) for one in (at, own.origin)
        }
        view = View(Positions(at, 0), frozenset(), {}, named=named)
        for batch in self._requests(start, end):
            # The request for the next time has the same caller id, but does not replace this one:
            # it is written with this one's receipt.
            others = [record for record in batch.records if not self._follows(record, at)]
            changes = parse_batch(
                self.format, batch._replace(records=others), self.now_ms, None
            ).changes
            touched = touched_by(changes)
            names_it = not named.keys().isdisjoint(touched.ids)
            if not (at in touched.cold or names_it or caller_id in touched.caller_ids):
                continue
            for offset, change in changes:
                if isinstance(change, Replacement) and change.id not in named:
                    change = change.content  # if it came too late, its own outcome says so
                if at not in resolve([(at, Cold(caller_id)), (offset, change)], view).to_cold:
                    return offset, isinstance(change, Carried)
        return None

    def _offsets_after(self, own: OwnRecord, since: int) -> tuple[int, int]:
        bounds = self.journal.request_bounds()
        return min(max(own.offset + 1, since, bounds.start), bounds.end), bounds.end

    def _first_promoted(self, own: OwnRecord, horizon_ms: int, low: int, high: int) -> int:
        """The first of the offsets `low` to `high` where promotion may have written it."""
        if own.status.due_ms is None:
            return low
        at_ms = own.status.due_ms - horizon_ms - CLOCKS_APART_MS
        found = self.journal.first_request_since(at_ms)
        return high if found is None else min(max(found, low), high)

    def _carried_in(self, own: OwnRecord, first: int, last: int) -> int | None:
        for batch in self._requests(first, last):
            for record in batch.records:
                if carried(record.headers) and origin_of(record) == own.origin:
                    return record.offset
        return None

    def _requests(self, start: int, end: int) -> Iterator[Batch]:
        self.limit.spend()
        for batch in self.journal.requests(start, end) if start < end else ():
            yield batch
            self.limit.spend(len(batch.records))

    def _receipts(self, start: int, end: int) -> Iterator[tuple[int, Receipt]]:
        self.limit.spend()
        for found in self.journal.receipts(start, end):
            yield found
            self.limit.spend(1)

    def _first_since(self, at_ms: int | None, start: int, end: int) -> int:
        if at_ms is None:
            return start
        found = self.journal.first_receipt_since(at_ms - CLOCKS_APART_MS)
        return end if found is None else min(max(found, start), end)

    def _first_that_knew(self, offset: int, first: int, end: int) -> int:
        """The first receipt whose writer's index knew the request, by bisection."""
        # Not exact if an owner that had just lost its index knew less than earlier receipts.
        while first < end:
            middle = (first + end) // 2
            at, receipt = next(self._receipts(middle, end), (end, None))
            if receipt is None or receipt.read == 0 or receipt.read > offset:
                end = middle
            else:
                first = at + 1
        return first

    def _outcome_in(self, own: OwnRecord, first: int, last: int, end: int) -> RequestStatus | None:
        """The outcome in the receipts `first` to `last` - 1."""
        if first >= last:
            return None
        offset = own.offset
        # beyond `last`, as later receipts may void an outcome
        for at, receipt in without_void(self._receipts(first, end)):
            if at >= last:
                return None
            # The log lost its end: this receipt is about the request that was there before.
            if receipt.cut and receipt.cut[0] <= offset:
                continue
            known = replace(own.status, at_ms=receipt.at_ms)
            place = _place_in(receipt.delivered, offset)
            if place is not None:
                return replace(known, state="delivered", place=place)
            for state in DEAD:
                if offset in getattr(receipt, state):
                    return replace(known, state=state, place=_place_in(receipt.letters, offset))
        return None

    def _follows(self, record: Record, at: int) -> bool:
        """Whether a record asks for the next time of the request at this offset."""
        source = self.shard.source(at).encode()
        return follows(record.headers) and record.headers[-1][1] == source


def _nearest_first(low: int, near: int, high: int) -> Iterator[tuple[int, int]]:
    """The parts of `low` to `high` - 1, with those that begin at `near` and at `low` before the rest."""
    behind, after = min(near + NEAR, high), min(low + NEAR, near)
    stretches = [(near, behind), (low, after), (behind, high), (after, near)]
    return ((first, last) for first, last in stretches if first < last)


def _place_in(places: Places, offset: int) -> Place | None:
    for at, pairs in places.items():
        for request, there in pairs:
            if request == offset:
                topic, _, partition = at.rpartition("/")
                return Place(topic, int(partition), there)
    return None
