"""The verb of the cold tier: write requests again, at the end of the journal, before they are due."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple, Protocol

from blackbox.core.offset_set import OffsetSet
from blackbox.core.parsing import parse_batch
from blackbox.core.plan import Batch, Bounds, Replacement, stretches
from blackbox.formats import Format
from blackbox.records.carried import (
    carried,
    carry_of,
    carry_on,
    original_record,
    record_bytes,
    removed_record,
)
from blackbox.records.errors import RecoveryRequired
from blackbox.records.request import Cancel, Headers, Record, Request, Shard, offset_in

logger = logging.getLogger("blackbox.core.promotion")

# The limits of one transaction: read_committed consumers of the topic wait for its end.
CARRIED_AT_ONCE = 5000
BYTES_AT_ONCE = 8 << 20
# Offsets between two cold requests from which on a new read is worthwhile.
FAR_APART = 20_000
# Request records that the index has not read: some 100 bytes each, if they have a caller id. Behind more of them, a
# carried record would not be read soon, for example while Redis is full.
MOST_UNREAD = 1_000_000


class PromotionJournal(Protocol):
    """The part of the request topic that promotion needs."""

    def request_bounds(self) -> Bounds: ...
    def log_end(self) -> int: ...
    def requests(self, start: int, end: int) -> Iterator[Batch]: ...
    def uncommitted(self, start: int, end: int) -> Iterator[Batch]: ...


class PromotionProducer(Protocol):
    """The producer of a shard's carried records.

    `flush` returns the offset after the last record, and why some were refused.
    """

    def open(self) -> None: ...
    def begin(self) -> None: ...
    def send(self, record: Record, headers: Headers, timestamp_ms: int) -> None: ...
    def flush(self) -> tuple[int, Mapping[int, str]]: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Promoted:
    """The result of a run for a shard: of `cold` requests, `promoted` were written again and `renewed` stay cold.

    `lost` are requests that retention removed from Kafka while they were cold: they become dead
    letters. `refused` are those whose record Kafka does not take again. `passed_over` are those that a
    record carries or ends which an open transaction hides: it may be aborted, so a run should follow soon.
    """

    shard: Shard
    cold: int = 0
    promoted: int = 0
    renewed: int = 0
    lost: int = 0
    refused: int = 0
    passed_over: int = 0


_Kind = Literal["promoted", "renewed", "lost"]


class _ToCarry(NamedTuple):
    record: Record
    kind: _Kind
    caller_id: str | None


@dataclass(slots=True)
class Promotion:
    """Carries on requests that are due within `lead_ms` (None: all), and those whose record is old.

    `cold` are the requests of the cold tier below `position`, according to an index.
    `renew_after_ms` is the age at which a record is written again; None: Kafka keeps it
    indefinitely. `confirm` is called repeatedly, and raises RecoveryRequired to end the run.
    """

    shard: Shard
    position: int
    cold: Set[int]
    journal: PromotionJournal
    producer: PromotionProducer
    format: Format
    lead_ms: int | None
    renew_after_ms: int | None
    confirm: Callable[[], None] = lambda: None
    # Hashes of caller ids, which may be long.
    _ended: set[int] = field(default_factory=set)
    # Of the requests in `cold`, whatever records of others name.
    _cancelled: OffsetSet = field(default_factory=OffsetSet)
    _carried: OffsetSet = field(default_factory=OffsetSet)
    _read_to: int = 0
    _unread: int = 0
    _is_hidden: bool = False
    _markers: int = 0
    _done: Counter[_Kind] = field(default_factory=Counter)
    _refused: int = 0
    _passed_over: int = 0

    def run(self, now_ms: int) -> Promoted:
        """Carry each such request once, however an earlier run ended and whatever other runs there are.

        Raises RecoveryRequired when Kafka does not answer, another run took over, or the index has
        not read a million records; run it again.
        """
        # Fence every other run first, so that all that it carried is below the end of the log.
        self.producer.open()
        bounds = self.journal.request_bounds()
        self._read_to = max(self.position, bounds.start)
        self._read_unread(bounds.end, self.journal.log_end(), now_ms)
        self._carry_all(bounds.start, now_ms)
        if lost := self._done["lost"]:
            logger.error(
                "%s: retention removed %d cold requests before they were promoted or renewed; they "
                "are lost, and become dead letters; set retention.ms of %s well above the time "
                "between two promotions", self.shard, lost, self.shard.topic,
            )  # fmt: skip
        return Promoted(
            self.shard,
            len(self.cold),
            self._done["promoted"],
            self._done["renewed"],
            lost,
            self._refused,
            self._passed_over,
        )

    def _read_unread(self, stable: int, end: int, now_ms: int) -> None:
        """Read what the index has not read: it may carry on, cancel or replace some requests already.

        An open transaction hides what was written from `stable` on.
        """
        # Callers' transactions may follow one another without a pause, so this does not wait for their end. Records that
        # they hide count, committed or not: at worst, a request that an aborted one names is left to a later run.
        stable = max(self._read_to, min(stable, end))
        for batch in self.journal.requests(self._read_to, stable):
            self._note(batch, now_ms)
        for batch in self.journal.uncommitted(stable, end):
            self._passed_over += self._note(batch, now_ms)
            self._is_hidden = True
        self._read_to = max(stable, end)

    def _note(self, batch: Batch, now_ms: int) -> int:
        """Note what the batch carries and ends; return how many cold requests it carries."""
        self.confirm()
        # Counted by records: offsets of aborted ones and of markers wait for nobody.
        self._unread += len(batch.records)
        self._stop_above(self._unread)
        self._note_ended(batch, now_ms)
        return self._note_carried(batch)

    def _carry_all(self, start: int, now_ms: int) -> None:
        size = 0
        waiting: list[_ToCarry] = []
        for to_carry in chain(self._removed(start), self._readable(start, now_ms)):
            waiting.append(to_carry)
            size += record_bytes(to_carry.record)
            if len(waiting) == CARRIED_AT_ONCE or size > BYTES_AT_ONCE:
                self._carry(waiting, now_ms)
                size = 0
                waiting.clear()
        self._carry(waiting, now_ms)

    def _removed(self, start: int) -> Iterator[_ToCarry]:
        """The cold requests that Kafka removed: they end as dead letters, as they would hold the mark forever."""
        # No other run can carry them any more, and all that carried them before is in `_carried`.
        for offset in self.cold:
            if offset < start and offset not in self._carried:
                yield _ToCarry(removed_record(offset), "lost", None)

    def _readable(self, start: int, now_ms: int) -> Iterator[_ToCarry]:
        for record in self._cold_records(start):
            to_carry = self._to_carry(record, now_ms)
            if to_carry is not None:
                yield to_carry

    def _cold_records(self, start: int) -> Iterator[Record]:
        """The cold requests to be carried, read from the parts of the journal that have some."""
        readable = (offset for offset in self.cold if start <= offset < self.position)
        for stretch in stretches(readable, FAR_APART):
            for batch in self.journal.requests(*stretch):
                self.confirm()
                for record in batch.records:
                    if record.offset in self.cold and record.offset not in self._carried:
                        yield record

    def _to_carry(self, record: Record, now_ms: int) -> _ToCarry | None:
        parsed = self.format.of_accepted.parse(
            original_record(record) if carried(record.headers) else record, now_ms
        )
        if not isinstance(parsed, Request):  # its format has changed: it becomes a dead letter
            return _ToCarry(record, "promoted", None)
        if self.lead_ms is None or parsed.due_ms <= now_ms + self.lead_ms:
            return _ToCarry(record, "promoted", parsed.caller_id)
        if self.renew_after_ms is None or record.timestamp_ms >= now_ms - self.renew_after_ms:
            return None
        return _ToCarry(record, "renewed", parsed.caller_id)

    def _carry(self, waiting: Sequence[_ToCarry], now_ms: int) -> None:
        """Carry these in one transaction; in ever smaller ones if Kafka refuses something."""
        kept = self._not_ended(waiting)
        if self._is_hidden:
            self._passed_over += len(waiting) - len(kept)
        if not kept:
            return
        self._stop_above(len(self._ended))  # callers went on writing
        self.producer.begin()
        for record, kind, _ in kept:
            self.producer.send(record, carry_on(record, is_cold=kind == "renewed"), now_ms)
        end, refused = self.producer.flush()
        # Others wrote in between, and may have ended some of these requests. A transaction that is
        # still open counts too: if it commits, its records come before these.
        if end - self._read_to > len(kept) + self._markers:
            for batch in self.journal.uncommitted(self._read_to, end):
                self._note_ended(batch, now_ms)
        self._read_to = max(self._read_to, end)
        self._markers = 1  # the marker that ends this transaction takes an offset
        if not refused and len(self._not_ended(kept)) == len(kept):
            self.producer.commit()
            self._done.update(kind for _, kind, _ in kept)
            return
        self.producer.abort()
        if not refused:
            self._carry(kept, now_ms)
            return
        self.producer.open()  # a producer is unusable after a refusal
        if len(kept) == 1:
            self._refuse(refused)
        else:
            # the broker refuses a record batch as a whole: halving finds the record at fault
            half = len(kept) // 2
            self._carry(kept[:half], now_ms)
            self._carry(kept[half:], now_ms)

    def _refuse(self, refused: Mapping[int, str]) -> None:
        for offset, why in refused.items():
            self._refused += 1
            logger.error(
                "%s: cannot be promoted or renewed, and will be late or lost: %s; check that "
                "max.message.bytes of %s was not lowered",
                self.shard.source(offset), why, self.shard.topic,
            )  # fmt: skip

    def _note_carried(self, batch: Batch) -> int:
        found = list[int]()
        for record in batch.records:
            if carried(record.headers):
                with suppress(ValueError):  # a forged one: intake makes it a dead letter
                    previous = carry_of(record).previous
                    found += [previous] if previous in self.cold else []
        self._carried.add(found)
        return len(found)

    def _note_ended(self, batch: Batch, now_ms: int) -> None:
        # a carried record ends nothing under its caller id: it is the request that holds it
        others = [record for record in batch.records if not carried(record.headers)]
        for _, change in parse_batch(
            self.format, batch._replace(records=others), now_ms, None
        ).changes:
            if change.caller_id is not None:
                self._ended.add(hash(change.caller_id))
            if isinstance(change, Cancel | Replacement) and change.id is not None:
                offset = offset_in(self.shard, change.id)
                if offset is not None and offset in self.cold:
                    self._cancelled.add([offset])

    def _not_ended(self, some: Sequence[_ToCarry]) -> list[_ToCarry]:
        """Those that no record of others ends; two ids with one hash only leave a request to a later run."""
        return [
            one
            for one in some
            if one.record.offset not in self._cancelled
            and (one.caller_id is None or hash(one.caller_id) not in self._ended)
        ]

    def _stop_above(self, unread: int) -> None:
        if unread > MOST_UNREAD:
            raise RecoveryRequired(
                f"{self.shard}: more than {MOST_UNREAD} request records are waiting to be read; "
                "carried records would wait behind them, so promotion continues when fewer are left"
            )
