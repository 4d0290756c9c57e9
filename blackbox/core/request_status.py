"""What became of a request, according to the two journals of its shard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from blackbox.core.intake import parse, touched_by
from blackbox.core.plan import Batch, Carried, Cold, Named, Positions, Replacement, View
from blackbox.core.ports import Journal
from blackbox.core.resolve import resolve
from blackbox.formats import Format
from blackbox.records.cancel import cancel_of, cancels
from blackbox.records.carried import as_written, carried, carry_of
from blackbox.records.receipt import Places, Receipt, settled
from blackbox.records.recurrence import follows
from blackbox.records.request import Cancel, Record, Request, Shard, request_id

CLOCKS_APART_MS = 60_000
"""How much earlier than the time in question a receipt may be timestamped: the difference between clocks."""

LOOK_UP_S = 5.0
"""How long a look-up may read: no longer than a person or an HTTP client waits for an answer."""

LOOK_UP_RECORDS = 200_000
"""How many records a look-up may read: some seconds of a core, which the service lacks during that time."""

NEAR = 4_000
"""How many offsets are read first, where the record probably is: one fetch."""

State = Literal[
    "pending", "delivered", "dead", "expired", "invalid", "ended", "unread", "cancel", "tombstone",
    "unknown", "over", "undetermined",
]  # fmt: skip


NO_REQUEST = ("cancel", "tombstone")
DEAD: tuple[Literal["dead", "expired", "invalid"], ...] = ("dead", "expired", "invalid")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a record, printed as `orders/3@88`."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}"


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """A request and what became of it; what does not apply or is not known is None.

    ended   -- neither pending nor in a receipt: cancelled, or replaced by a later request
    unread  -- in Kafka, and not yet in the index
    cancel  -- the record is not a request, it cancels one
    tombstone -- the record is not a request, blackbox wrote it when a schedule had ended
    unknown -- there is no such record
    over    -- not pending any more; how it ended was not found within the limit of a look-up
    undetermined -- whether it is pending was not found within that limit

    `is_cold`: it waits in Kafka, out of Redis. `carried` is the record that took its place.
    """

    id: str
    source: str
    state: State
    caller: str | None = None
    caller_id: str | None = None
    target: str | None = None
    due_ms: int | None = None
    next_try_ms: int | None = None
    attempts: int | None = None
    at_ms: int | None = None
    place: Place | None = None
    reason: str | None = None
    detail: str | None = None
    is_cold: bool | None = None
    carried: str | None = None

    def for_request(self, shard: Shard, offset: int) -> RequestStatus:
        """The same status for the request whose place this one took."""
        taken = self.carried or self.source
        source = shard.source(offset)
        return replace(self, id=request_id(shard, offset), source=source, carried=taken)


class LimitReached(Exception):
    """A look-up has read as much as it may."""


@dataclass(eq=False, slots=True)
class LookupLimit:
    """How much of the journals one look-up may read, in seconds and in records."""

    seconds: float = LOOK_UP_S
    records: float = LOOK_UP_RECORDS
    clock: Callable[[], float] = time.monotonic
    _read: int = 0
    _began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    def spend(self, records: int = 0) -> None:
        """Count records that were read. Raises LimitReached when a limit is exceeded."""
        self._read += records
        if self._read > self.records or self.clock() - self._began_s > self.seconds:
            raise LimitReached

    def __str__(self) -> str:
        return f"{self._read:,} records within {self.clock() - self._began_s:.1f} s"


class OwnRecord(NamedTuple):
    """What a request's own record says. The status is `unread`, `cancel` or `tombstone`; `unknown` if it is gone.

    `written_ms` is when Kafka got it, None when that is not known. `origin` is the request as its
    caller wrote it: for a carried record, another offset than its own.
    """

    offset: int
    written_ms: int | None
    status: RequestStatus
    origin: int


@dataclass(frozen=True, slots=True)
class JournalLookup:
    """Finds out the statuses of requests of one shard. Raises RecoveryRequired when Kafka does not answer.

    `has_receipts`: whether the receipts topic has a partition for the shard yet. Methods that
    search raise LimitReached once they have read as much as the `limit` allows and found nothing.
    """

    shard: Shard
    journal: Journal
    format: Format
    now_ms: int
    has_receipts: bool = True
    limit: LookupLimit = field(default_factory=LookupLimit)

    def status(self, offset: int) -> RequestStatus:
        """The status by the journals alone: a request is pending if no receipt or later record has ended it.

        So a cancel or a replacement counts once it is written. One that a service has not read when
        the message is due comes too late, and the status is `delivered` then.

        1. read the end of the requests before the receipts: what has ended by now has its receipt
           by then;
        2. read the receipts;
        3. read the later records: the request may have been cancelled, replaced, or carried on.

        If it was carried on, its own record may be gone by then; the record in its place names it.
        """
        own = self.own_record(offset)
        bounds = self.journal.request_bounds()  # 1
        if own.status.state == "unknown" and offset < bounds.start:
            there = self.carried_to(own, 0)
            return own.status if there is None else self._status_of_carried(own, there, bounds.end)
        if own.status.state != "unread":
            return own.status
        return self._by_both_journals(own, bounds.end)  # 2, 3

    def own_record(self, offset: int) -> OwnRecord:
        """What the request's own record says."""
        record = self.journal.record(offset)
        if record is None:
            return OwnRecord(offset, None, self._status(offset, "unknown"), offset)
        written_ms = record.timestamp_ms if record.timestamp_ms >= 0 else None
        return OwnRecord(offset, written_ms, self._parsed(record), origin_of(record))

    def outcome(self, own: OwnRecord, since: int = 0) -> RequestStatus | None:
        """What a receipt says of it, without the reason of a dead letter; None: no receipt names it.

        A request is named soon after it was due, or soon after it was written if it was refused.
        These ranges are read first. Without its record, the receipts from the first one whose
        writer knew the request are. No receipt below `since` is read.
        """
        if not self.has_receipts:
            return None
        bounds = self.journal.receipt_bounds()
        end = bounds.end
        first = min(max(bounds.start, since), end)
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
        """The record, not below `since`, that a request of the cold tier has become; None if none is found.

        Promotion writes it about a horizon before it is due: the records from there on are read
        first.
        """
        low, high = self._offsets_after(own, since)
        near = self._first_promoted(own, horizon_ms, low, high)
        for first, last in _nearest_first(low, near, high):
            found = self._carried_in(own, first, last)
            if found is not None:
                return found
        return None

    def replaced_by(self, own: OwnRecord, since: int) -> int | None:
        """The record, not below `since`, that took the place of an ended request; None: it was cancelled."""
        position, end = self._offsets_after(own, since)
        while (change := self._next_change(own, position, end)) is not None:
            at, is_carried = change
            there = self.own_record(at)
            if there.status.state == "cancel":
                return None
            if is_carried:
                own = there
            elif not self._was_invalid(at):
                return at
            position = at + 1
        return None

    def explained(self, status: RequestStatus) -> RequestStatus:
        """The same with the reason and detail of its dead letter, if that still exists."""
        if status.place is None or status.state == "delivered":
            return status
        place = status.place
        letter = self.journal.record_at(place.topic, place.partition, place.offset)
        about = dict(letter.headers) if letter is not None else {}
        reason_and_detail: dict[str, Any] = {
            name: held.decode(errors="replace")
            for name in ("reason", "detail")
            if (held := about.get(f"blackbox-{name}"))
        }
        return replace(status, **reason_and_detail)

    def _status(self, offset: int, state: State, **known: Any) -> RequestStatus:
        return RequestStatus(
            request_id(self.shard, offset), self.shard.source(offset), state, **known
        )

    def _parsed(self, record: Record) -> RequestStatus:
        offset, record = record.offset, as_written(record)
        if cancels(record.headers):
            named = cancel_of(record)
            return self._status(offset, "cancel", caller_id=getattr(named, "id", None))
        asked = self.format.parse(record, self.now_ms)
        if asked is None:
            return self._status(offset, "tombstone")
        if isinstance(asked, Cancel):
            return self._status(offset, "cancel", caller_id=asked.caller_id)
        if isinstance(asked, Request):
            return self._status(
                offset,
                "unread",
                caller=asked.caller,
                caller_id=asked.caller_id,
                target=asked.target,
                due_ms=asked.due_ms,
            )
        why = {"reason": asked.reason, "detail": asked.detail}
        return self._status(offset, "unread", due_ms=record.timestamp_ms, **why)

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
        """The first receipt whose writer's index knew the request, by bisection.

        Not exact if an owner that had just lost its index wrote a receipt that knew less than
        earlier ones.
        """
        while first < end:
            middle = (first + end) // 2
            at, receipt = next(self._receipts(middle, end), (end, None))
            if receipt is None or receipt.read == 0 or receipt.read > offset:
                end = middle
            else:
                first = at + 1
        return first

    def _outcome_in(self, own: OwnRecord, first: int, last: int, end: int) -> RequestStatus | None:
        """The outcome in the receipts `first` to `last` - 1. Later receipts may void one of these."""
        if first >= last:
            return None
        offset = own.offset
        for at, receipt in settled(self._receipts(first, end)):
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

    def _by_both_journals(self, own: OwnRecord, end: int) -> RequestStatus:
        return self.outcome(own) or self._by_later_records(own, end)

    def _by_later_records(self, own: OwnRecord, end: int) -> RequestStatus:
        """The status, by the records up to `end`, of a request that no receipt names."""
        pending = replace(own.status, state="pending")
        if own.status.reason is not None:  # only its dead letter ends it
            return pending
        position = own.offset
        while True:
            change = self._next_change(own, position + 1, end)
            if change is None:
                return pending
            position, is_carried = change
            if is_carried:
                return self._status_of_carried(own, position, end)
            if not self._was_invalid(position):
                return replace(pending, state="ended")

    def _status_of_carried(self, own: OwnRecord, there: int, end: int) -> RequestStatus:
        return self._by_both_journals(self.own_record(there), end).for_request(
            self.shard, own.offset
        )

    def _next_change(self, own: OwnRecord, start: int, end: int) -> tuple[int, bool] | None:
        """The next record that ends the request or carries it on, and whether it carries it on.

        Decided as in intake, for an index that holds nothing but this request.
        """
        at, caller_id = own.offset, own.status.caller_id
        named = {
            request_id(self.shard, one): Named(at, False, caller_id) for one in (at, own.origin)
        }
        view = View(Positions(at, 0), frozenset(), {}, named=named)
        for batch in self._requests(start, end):
            others = [record for record in batch.records if not self._follows(record, at)]
            changes = parse(self.format, batch._replace(records=others), self.now_ms, None).changes
            touched = touched_by(changes)
            names_it = not named.keys().isdisjoint(touched.ids)
            if not (at in touched.cold or names_it or caller_id in touched.caller_ids):
                continue
            for offset, change in changes:
                if isinstance(change, Replacement) and change.id not in named:
                    change = change.asked  # if it came too late, its own outcome says so
                if at not in resolve([(at, Cold(caller_id)), (offset, change)], view).to_cold:
                    return offset, isinstance(change, Carried)
        return None

    def _follows(self, record: Record, at: int) -> bool:
        """Whether a record asks for the next time of a request. It is written with that request's receipt."""
        source = self.shard.source(at).encode()
        return follows(record.headers) and record.headers[-1][1] == source

    def _was_invalid(self, offset: int) -> bool:
        """Whether the service's own limits refused a request; such a request replaces nothing."""
        outcome = self.outcome(self.own_record(offset))
        return outcome is not None and outcome.state == "invalid"


def origin_of(record: Record) -> int:
    """The offset of the request as its caller wrote it; for a carried record, another offset."""
    if carried(record.headers):
        with suppress(ValueError):  # a forged one
            return carry_of(record).origin
    return record.offset


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
