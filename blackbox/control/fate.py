"""What became of a request: the index says whether it is pending, the receipts what ended it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from blackbox.cancel import cancel_of, cancels
from blackbox.cold import as_asked, carried, carry_of
from blackbox.connect import formats, kafka
from blackbox.entry import Entry
from blackbox.index.inspector import Inspector, Pending
from blackbox.journal.access import KafkaAccess
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.logs import QUIET
from blackbox.receipt import Places, Receipt, settled
from blackbox.request import Cancel, Record, Request, Shard, request_id
from blackbox.settings import Settings

COUNTED_FOR_S = 5.0
VISIBLE_WITHIN_S = 5.0
LOOK_S = 0.02
CLOCKS_APART_MS = 60_000
"""How far a receipt's time may lie before the due time it answers: the clocks' difference."""

State = Literal[
    "pending", "delivered", "dead", "expired", "invalid", "ended", "unread", "cancel", "tombstone",
    "unknown",
]  # fmt: skip


NO_REQUEST = ("cancel", "tombstone")


@dataclass(frozen=True, slots=True)
class Place:
    """A record: `orders/3@88`."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}"


@dataclass(frozen=True, slots=True)
class Fate:
    """A request and what became of it; what does not apply or is not known is None.

    ended   -- neither pending nor in a receipt: cancelled, or replaced by a later request
    unread  -- in Kafka, and not yet in the index
    cancel  -- the record is no request, it cancels one
    tombstone -- the record is no request, blackbox wrote it when a schedule had ended
    unknown -- there is no such record

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


class Registry:
    """Looks up fates. Raises JournalLost or IndexLost when Kafka or Redis does not answer."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._access = kafka(settings, QUIET)
        self._inspector = Inspector.of(settings.redis_url.get_secret_value())
        self._formats = formats(settings)
        self._admin = self._access.admin()
        self._partitions: dict[str, int] = {}
        self._counted_s = -math.inf
        self.count_partitions()

    @property
    def access(self) -> KafkaAccess:
        return self._access

    @property
    def inspector(self) -> Inspector:
        return self._inspector

    def count_partitions(self) -> None:
        """Look how many there are, unless that was done a moment ago."""
        if time.monotonic() - self._counted_s > COUNTED_FOR_S:
            topics = self._settings.topics
            journals = [name for topic in topics for name in (topic, receipts_topic(topic))]
            self._partitions = Topics(self._admin).partitions(
                [*journals, self._settings.dead_letter_topic], to="Read"
            )
            self._counted_s = time.monotonic()

    def partitions(self, topic: str) -> int:
        """Of one of blackbox's topics; 0 for one that is not there."""
        return self._partitions.get(topic, 0)

    def shards(self) -> Iterator[Shard]:
        """Every shard there is."""
        for topic in self._settings.topics:
            for partition in range(self._partitions.get(topic, 0)):
                yield Shard(topic, partition)

    def request_end(self, shard: Shard) -> int:
        """The next offset of the request topic."""
        journal = ShardJournal(shard, self._access)
        try:
            return journal.request_bounds().end
        finally:
            journal.close()

    def fate(self, shard: Shard, offset: int) -> Fate:
        """What became of the request at this place.

        1. the index is asked first: what is not in it any more has its receipt already;
        2. then the receipts, from the time on when it could have been dispatched;
        3. a request of the cold tier may have become another record: its fate, then.
        """
        if shard.partition >= self._partitions.get(shard.topic, 0):
            return _fate(shard, offset, "unknown")
        pending = self._inspector.look_up(shard, offset)  # 1
        standing = self._inspector.standing(shard, 0)
        journal = ShardJournal(shard, self._access)
        try:
            record = journal.records([offset]).get(offset)
            known = self._known(shard, record)
            if pending is not None:
                told = known | _of_pending(pending) | {"is_cold": False}
                return _fate(shard, offset, "pending", **told)
            if self._inspector.is_cold(shard, offset):
                return _fate(shard, offset, "pending", **(known | {"is_cold": True}))
            label = standing.labels.receipts if standing.labels is not None else 0
            outcome = self._outcome(journal, shard, offset, known.get("due_ms"), label)  # 2
            if outcome is not None:
                return _fate(shard, offset, **(known | outcome))
            is_request = record is not None and known.get("state") not in NO_REQUEST
            if is_request and (standing.has_cold_tier or self._settings.hot_horizon_s):
                there = _carried_to(journal, offset)  # 3
                if there is not None:
                    now = self.fate(shard, there)
                    return replace(
                        now,
                        id=request_id(shard, offset),
                        source=shard.source(offset),
                        carried=now.carried or shard.source(there),
                    )
        finally:
            journal.close()
        if record is None:
            return _fate(shard, offset, "unknown")
        if known.get("state") in NO_REQUEST:
            return _fate(shard, offset, **known)
        is_read = standing.labels is not None and offset < standing.labels.requests
        return _fate(shard, offset, **(known | {"state": "ended" if is_read else "unread"}))

    def close(self) -> None:
        self._inspector.close()

    def _known(self, shard: Shard, record: Record | None) -> dict[str, Any]:
        """What the request's own record says."""
        if record is None:
            return {}
        if carried(record.headers):
            with suppress(ValueError):  # a forged one
                record = as_asked(record)
        if cancels(record.headers):
            named = cancel_of(record)
            return {"state": "cancel", "caller_id": getattr(named, "id", None)}
        asked = self._formats[shard.topic].parse(record, time.time_ns() // 1_000_000)
        if asked is None:
            return {"state": "tombstone"}
        if isinstance(asked, Cancel):
            return {"state": "cancel", "caller_id": asked.caller_id}
        if isinstance(asked, Request):
            return {
                "caller": asked.caller,
                "caller_id": asked.caller_id,
                "target": asked.target,
                "due_ms": asked.due_ms,
            }
        return {"due_ms": record.timestamp_ms, "reason": asked.reason, "detail": asked.detail}

    def _outcome(
        self, journal: ShardJournal, shard: Shard, offset: int, due_ms: int | None, label: int
    ) -> dict[str, Any] | None:
        if shard.partition >= self._partitions.get(receipts_topic(shard.topic), 0):
            return None
        start, end = _bounds_up_to(journal, label)
        if due_ms is not None:
            start = _first_since(journal, start, end, due_ms - CLOCKS_APART_MS)
        for _, receipt in settled(journal.receipts(start, end)):
            place = _place_in(receipt.delivered, offset)
            if place is not None:
                return {"state": "delivered", "place": place, "at_ms": receipt.at_ms}
            for state in ("dead", "expired", "invalid"):
                if offset in getattr(receipt, state):
                    letter = _place_in(receipt.letters, offset)
                    return {"state": state, "at_ms": receipt.at_ms, **self._of_letter(letter)}
        return None

    def _of_letter(self, place: Place | None) -> dict[str, Any]:
        if place is None:
            return {}
        journal = ShardJournal(Shard(place.topic, place.partition), self._access)
        try:
            letter = journal.records([place.offset]).get(place.offset)
        finally:
            journal.close()
        about = dict(letter.headers) if letter is not None else {}
        told = {
            name: (about.get(f"blackbox-{name}") or b"").decode(errors="replace") or None
            for name in ("reason", "detail")
        }
        return {"place": place} | {name: text for name, text in told.items() if text is not None}


def _bounds_up_to(journal: ShardJournal, label: int) -> tuple[int, int]:
    """Of the receipts, once what the index knows can be read: a commit is told before readers see it."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while True:
        start, end = journal.receipt_bounds()
        if end >= label or time.monotonic() > deadline:
            return start, end
        time.sleep(LOOK_S)


def _carried_to(journal: ShardJournal, offset: int) -> int | None:
    for batch in journal.requests(offset + 1, journal.request_bounds().end):
        for record in batch.records:
            if carried(record.headers):
                with suppress(ValueError):
                    if carry_of(record).previous == offset:
                        return record.offset
    return None


def _fate(shard: Shard, offset: int, state: State, **known: Any) -> Fate:
    return Fate(id=request_id(shard, offset), source=shard.source(offset), state=state, **known)


def _of_pending(pending: Pending) -> dict[str, Any]:
    entry: Entry | None = pending.entry
    if entry is None:
        return {"next_try_ms": pending.at_ms}
    return {
        "caller": entry.caller,
        "caller_id": entry.caller_id,
        "target": entry.target or None,
        "due_ms": entry.due_ms,
        "next_try_ms": pending.at_ms,
        "attempts": entry.attempts,
        "reason": entry.reason,
        "detail": entry.detail,
    }


def _place_in(places: Places, offset: int) -> Place | None:
    for at, pairs in places.items():
        for asked, there in pairs:
            if asked == offset:
                topic, _, partition = at.rpartition("/")
                return Place(topic, int(partition), there)
    return None


def _first_since(journal: ShardJournal, start: int, end: int, at_ms: int) -> int:
    """By bisection, an offset at or before the first receipt of this time or later."""
    while start < end:
        middle = (start + end) // 2
        receipt = _next_receipt(journal, middle, end)
        if receipt is not None and receipt.at_ms < at_ms:
            start = middle + 1
        else:
            end = middle
    return start


def _next_receipt(journal: ShardJournal, start: int, end: int) -> Receipt | None:
    reading = journal.receipts(start, end)
    try:
        return next((receipt for _, receipt in reading), None)
    finally:
        reading.close()  # type: ignore[attr-defined]
