"""The verb of the cold tier: requests that come near are carried on, behind all others."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from blackbox.cold import as_asked, carried, carry_of, carry_on
from blackbox.doubt import Doubt
from blackbox.formats import Format
from blackbox.intake import parse
from blackbox.plan import Batch, Labels
from blackbox.request import Headers, Record, Request, Shard

logger = logging.getLogger("blackbox.promotion")

CARRIED_AT_ONCE = 5000
BYTES_AT_ONCE = 8 << 20


class Bounds(Protocol):
    """First offset kept, and the next offset to be committed."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class Journal(Protocol):
    """What promotion needs of the request topic."""

    def request_bounds(self) -> Bounds: ...
    def requests(self, start: int, end: int) -> Iterator[Batch]: ...
    def uncommitted(self, start: int, end: int) -> Iterator[Batch]: ...


class Index(Protocol):
    """What promotion needs of all indexes; it changes none."""

    def cold(self, shard: Shard) -> tuple[Labels | None, Set[int]]: ...


class Carrier(Protocol):
    """The producer of a shard's carried records; `flush` returns the next offset behind the last one."""

    def open(self) -> None: ...
    def begin(self) -> None: ...
    def send(self, record: Record, headers: Headers, timestamp_ms: int) -> None: ...
    def flush(self) -> int: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Promoted:
    """What a run did for a shard: `cold` there were, `near` came back, `renewed` stay cold.

    `lost` are requests that retention removed from Kafka while they were cold.
    """

    shard: Shard
    cold: int = 0
    near: int = 0
    renewed: int = 0
    lost: int = 0


@dataclass(slots=True)
class Promotion:
    """Carries on what is due within `lead_ms` (None: everything), and what is kept not much longer.

    `renew_after_ms` is the age at which a record is written anew; None: Kafka keeps it for ever.
    """

    shard: Shard
    index: Index
    journal: Journal
    carrier: Carrier
    contract: Format
    lead_ms: int | None
    renew_after_ms: int | None
    _ended: set[str] = field(default_factory=set)
    _carried: set[int] = field(default_factory=set)
    _seen: int = 0

    def run(self, now_ms: int) -> Promoted:
        """Carry each such request once, whatever ended an earlier run and whoever else runs.

        1. the index tells which requests are cold, and up to where it has read;
        2. fence every other run, and settle what it left open;
        3. read what the index has not: some are carried already, some cancelled or replaced;
        4. carry the others, in transactions: before each is committed, whatever came in between is
           looked at, so that nothing is carried that was ended first.

        Raises a Doubt when Kafka or Redis does not answer, or another run took over; run it again.
        """
        labels, cold = self.index.cold(self.shard)  # 1
        if labels is None:
            raise Doubt(f"{self.shard}: its index is empty or lost; promote when it is open again")
        if not cold:
            return Promoted(self.shard)
        self.carrier.open()  # 2
        bounds = self.journal.request_bounds()
        self._seen = max(labels.requests, bounds.start)
        for batch in self.journal.requests(self._seen, bounds.end):  # 3
            self._note_carried(batch)
            self._note_ended(batch, now_ms)
        self._seen = max(self._seen, bounds.end)
        near, renewed = self._carry_all(cold, labels.requests, bounds.start, now_ms)  # 4
        lost = sum(offset < bounds.start for offset in cold)
        if lost:
            logger.error(
                "%s: %d cold requests were removed by retention before they were carried on: they "
                "are lost; set retention.ms of %s well above the time between two promotions",
                self.shard, lost, self.shard.topic,
            )  # fmt: skip
        return Promoted(self.shard, len(cold), near, renewed, lost)

    def _carry_all(self, cold: Set[int], label: int, start: int, now_ms: int) -> tuple[int, int]:
        near = renewed = size = 0
        waiting: list[tuple[Record, bool, str | None]] = []
        for record in self._cold_records(cold, label, start):
            asked = self.contract.parse(
                as_asked(record) if carried(record.headers) else record, now_ms
            )
            stays_cold = isinstance(asked, Request) and not self._is_near(asked.due_ms, now_ms)
            if stays_cold and not self._is_old(record.timestamp_ms, now_ms):
                continue
            caller_id = asked.caller_id if isinstance(asked, Request) else None
            waiting.append((record, stays_cold, caller_id))
            size += len(record.value or b"")
            if len(waiting) == CARRIED_AT_ONCE or size > BYTES_AT_ONCE:
                done = self._carry(waiting, now_ms)
                near, renewed, size = near + done[0], renewed + done[1], 0
                waiting.clear()
        done = self._carry(waiting, now_ms)
        return near + done[0], renewed + done[1]

    def _cold_records(self, cold: Set[int], label: int, start: int) -> Iterator[Record]:
        first = max(start, min(cold))
        for batch in self.journal.requests(first, max(first, label)):
            for record in batch.records:
                if record.offset in cold and record.offset not in self._carried:
                    yield record

    def _carry(
        self, waiting: Sequence[tuple[Record, bool, str | None]], now_ms: int
    ) -> tuple[int, int]:
        while kept := [one for one in waiting if one[2] is None or one[2] not in self._ended]:
            self.carrier.begin()
            for record, stays_cold, _ in kept:
                self.carrier.send(record, carry_on(record, is_cold=stays_cold), now_ms)
            end = self.carrier.flush()
            if any(caller_id is not None for _, _, caller_id in kept):
                for batch in self.journal.uncommitted(self._seen, end):
                    self._note_ended(batch, now_ms)
                self._seen = end
            if all(one[2] is None or one[2] not in self._ended for one in kept):
                self.carrier.commit()
                renewed = sum(stays_cold for _, stays_cold, _ in kept)
                return len(kept) - renewed, renewed
            self.carrier.abort()
        return 0, 0

    def _note_carried(self, batch: Batch) -> None:
        for record in batch.records:
            if carried(record.headers):
                with suppress(ValueError):  # a forged one: intake makes it a dead letter
                    self._carried.add(carry_of(record).previous)

    def _note_ended(self, batch: Batch, now_ms: int) -> None:
        others = [record for record in batch.records if not carried(record.headers)]
        for _, change in parse(self.contract, batch._replace(records=others), now_ms, None).changes:
            if change.caller_id is not None:
                self._ended.add(change.caller_id)

    def _is_near(self, due_ms: int, now_ms: int) -> bool:
        return self.lead_ms is None or due_ms <= now_ms + self.lead_ms

    def _is_old(self, timestamp_ms: int, now_ms: int) -> bool:
        return self.renew_after_ms is not None and timestamp_ms < now_ms - self.renew_after_ms
