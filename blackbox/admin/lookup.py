"""Look up the status of a request: the index shows whether it is pending, the receipts its outcome."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from threading import Lock

from blackbox.admin.pending import as_in_flight, as_pending
from blackbox.admin.read_limit import limit_exceeded
from blackbox.admin.request_ends import request_ends
from blackbox.config.settings import Settings
from blackbox.config.wiring import formats, kafka
from blackbox.core.journal_lookup import JournalLookup
from blackbox.core.journal_search import LimitReached, ReadLimit
from blackbox.core.own_record import OwnRecord, origin_of
from blackbox.core.plan import Positions
from blackbox.core.ports import Journal
from blackbox.core.request_status import NO_REQUEST, RequestStatus
from blackbox.index.inspector import Inspector, ShardStats
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.records.carried import carried, carry_of
from blackbox.records.errors import JournalLost, NotAllowed
from blackbox.records.request import Record, Shard, request_id
from blackbox.support.logs import NO_CLIENT_LOG

COUNTED_FOR_S = 5.0
FAILED_FOR_S = 1.0
VISIBLE_WITHIN_S = 5.0
CHECKED_EVERY_S = 0.02
# Entries due at the same instant that are read, with their payloads, to find a carried one.
DUE_TOGETHER = 100


class StatusLookup:
    """Looks up statuses; call `count_partitions` first.

    Methods raise JournalLost or IndexLost when Kafka or Redis does not answer.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.access = kafka(settings, NO_CLIENT_LOG)
        self.inspector = Inspector.of(settings.redis_url.get_secret_value())
        self.formats = formats(settings)
        self._admin = self.access.admin()
        self._partitions: dict[str, int] = {}
        self._counting = Lock()
        self._count_at_s = -math.inf
        self._failure: JournalLost | None = None

    def count_partitions(self) -> None:
        """Count the partitions of all topics, unless that was done within `COUNTED_FOR_S`.

        While Kafka does not answer, the last known counts stay in use. Raises JournalLost when
        there are none, and NotAllowed; the same error for `FAILED_FOR_S`.
        """
        # Callers wait for a count in progress only if none is known yet.
        if self._is_counted() or not self._counting.acquire(blocking=not self._partitions):
            return
        try:
            if not self._is_counted():
                self._count_now()
        finally:
            self._counting.release()

    def _is_counted(self) -> bool:
        if time.monotonic() >= self._count_at_s:
            return False
        # For a second, or each of many callers would wait in turn for brokers that do not answer.
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
        return True

    def _count_now(self) -> None:
        known_for_s, self._failure = COUNTED_FOR_S, None
        try:
            self._partitions = self._count()
        except JournalLost as failure:
            if not self._partitions or isinstance(failure, NotAllowed):
                known_for_s, self._failure = FAILED_FOR_S, failure
                raise
        finally:
            self._count_at_s = time.monotonic() + known_for_s

    def _count(self) -> dict[str, int]:
        topics = self._settings.topics
        names = [name for topic in topics for name in (topic, receipts_topic(topic))]
        names.append(self._settings.dead_letter_topic)
        try:
            return Topics(self._admin).partitions(names, to="Read")
        except JournalLost:
            # A client may lose sight of all brokers, or have an old certificate.
            self._admin = self.access.admin()
            raise

    def shards(self) -> Iterator[Shard]:
        for topic in self._settings.topics:
            for partition in range(self._partitions.get(topic, 0)):
                yield Shard(topic, partition)

    def record(self, shard: Shard, offset: int) -> Record | None:
        with closing(ShardJournal(shard, self.access)) as journal:
            return journal.record(offset)

    def pending_under(self, caller_id: str) -> list[tuple[Shard, int]]:
        """The pending requests under this caller id, the newest first.

        There can be several if partitions were added to the request topic, or if callers partition by
        something other than the id.
        """
        # Each index holds the newest of its shard; between partitions only timestamps compare.
        found = [(shard, self.inspector.offset_of(shard, caller_id)) for shard in self.shards()]
        held = [(shard, offset) for shard, offset in found if offset is not None]
        if len(held) > 1:
            held.sort(key=lambda one: (self._written_ms(*one), one), reverse=True)
        return held

    def _written_ms(self, shard: Shard, offset: int) -> int:
        if (record := self.record(shard, offset)) is None:
            return -1
        if carried(record.headers):
            with suppress(ValueError):  # a forged header
                return carry_of(record).timestamp_ms  # that of promotion is later
        return record.timestamp_ms

    def request_ends(self) -> dict[Shard, int]:
        return request_ends([*self.shards()], Topics(self._admin), self.access, self.inspector)

    def status(
        self,
        shard: Shard,
        offset: int,
        since: Positions | None = None,
        limit: ReadLimit | None = None,
    ) -> RequestStatus:
        """The status of the request at this place.

        1. read the index first: a request that has left it has its receipt, or is in flight and was cancelled;
        2. a request of the cold tier may have been promoted to another record, which may be in the index;
        3. read the receipts, from the earliest time at which it could have been dispatched;
        4. read the records that promotion wrote. They come first if the request's own record is gone.

        `since`: positions read before a moment at which the request was pending; its outcome comes
        after them. Reads up to the `limit`; the status says when that was not enough.
        """
        if shard.partition >= self._partitions.get(shard.topic, 0):
            return RequestStatus(request_id(shard, offset), shard.source(offset), "unknown")
        limit = limit or ReadLimit()
        # before the index is asked: what is stored in between has not ended
        known_to = self.inspector.positions(shard)
        pending = self.inspector.pending_at(shard, offset)  # 1
        # before the positions: if its batch is settled by then, its receipt is below them
        is_in_flight = pending is None and self.inspector.is_in_flight(shard, offset)
        stats = self.inspector.shard_stats(shard, 0)
        with closing(ShardJournal(shard, self.access)) as journal:
            lookup = self._journal_lookup(shard, journal, limit)
            own = lookup.own_record(offset)
            if pending is not None:
                return replace(as_pending(own.status, pending), is_cold=False)
            if self.inspector.is_cold(shard, offset):
                return self._as_cold(shard, own)
            is_read = known_to is not None and offset < known_to.requests
            found = self._status_outside_index(lookup, own, stats, since, is_read=is_read)
        if isinstance(found, RequestStatus):
            return as_in_flight(found) if is_in_flight and found.state == "ended" else found
        return self.status(shard, found, limit=limit).for_request(shard, offset)

    def _as_cold(self, shard: Shard, own: OwnRecord) -> RequestStatus:
        # A cancel by the first id is only stored; the bit stays until the request is written again.
        is_ended = self.inspector.is_ended(shard, own.origin)
        return replace(own.status, state="ended" if is_ended else "pending", is_cold=True)

    def _status_outside_index(
        self,
        lookup: JournalLookup,
        own: OwnRecord,
        stats: ShardStats,
        since: Positions | None,
        *,
        is_read: bool,
    ) -> RequestStatus | int:
        """The status of a request that the index does not have, or the record that carries it."""
        known, bounds = own.status, lookup.journal.request_bounds()
        # Trimming removes records below the start only; above the end nothing was ever written.
        if known.state == "unknown" and own.offset >= bounds.end:
            return known
        _wait_for(lookup.journal, stats.positions)
        search_from = _search_from(since, stats.positions)
        is_gone = known.state == "unknown" and own.offset < bounds.start
        has_cold_tier = stats.has_cold_tier or bool(self._settings.hot_horizon_s)
        may_be_carried = has_cold_tier and (known.state == "unread" or is_gone)
        try:
            found = self._search(lookup, own, search_from, is_gone, may_be_carried)
        except LimitReached:
            if known.state in NO_REQUEST:
                return known
            return limit_exceeded(known, lookup.limit, is_over=is_read and not may_be_carried)
        if found is None:
            return replace(known, state="ended" if is_read else "unread")
        return found

    def _search(
        self,
        lookup: JournalLookup,
        own: OwnRecord,
        search_from: Positions,
        is_gone: bool,
        may_be_carried: bool,
    ) -> RequestStatus | int | None:
        """Steps 2 to 4 of `status`: the status, or the record that carries the request. Raises LimitReached."""
        horizon_ms = self._settings.hot_horizon_s * 1000
        there = None
        if may_be_carried and is_gone:
            there = lookup.carried_to(own, 0, search_from.requests)
        elif may_be_carried and self._was_cold(own):  # 2
            there = self._carried_to(lookup, own) or lookup.carried_nearby(own, horizon_ms)
        if there is not None:
            return there
        outcome = lookup.outcome(own, search_from.receipts)  # 3
        if outcome is not None:
            return lookup.explained(outcome)
        if own.status.state != "unread":
            return own.status
        if not may_be_carried:
            return None
        found = self._carried_to(lookup, own)  # 4
        return found or lookup.carried_to(own, horizon_ms, search_from.requests)

    def replaced_by(self, shard: Shard, offset: int, since: Positions | None) -> int | None:
        """The offset of what replaced an ended request since; None: it was cancelled. Raises LimitReached."""
        with closing(ShardJournal(shard, self.access)) as journal:
            lookup = self._journal_lookup(shard, journal, ReadLimit())
            return lookup.replaced_by(lookup.own_record(offset), since.requests if since else 0)

    def _was_cold(self, own: OwnRecord) -> bool:
        """Whether the request was cold when it was written, if the horizon has not changed since."""
        due_ms, horizon_ms = own.status.due_ms, self._settings.hot_horizon_s * 1000
        if due_ms is None or own.status.reason is not None:
            return False
        return own.written_ms is None or due_ms - own.written_ms > horizon_ms

    def _carried_to(self, lookup: JournalLookup, own: OwnRecord) -> int | None:
        """The record in the index that carries this request, by its caller id or its due time."""
        caller_id, due_ms = own.status.caller_id, own.status.due_ms
        if caller_id is not None:
            holder = self.inspector.offset_of(lookup.shard, caller_id)
            if holder is not None and holder > own.offset:
                record = lookup.journal.record(holder)
                if record is not None and origin_of(record) == own.origin:
                    return holder
        if due_ms is None:
            return None
        found = self.inspector.list_pending(lookup.shard, due_ms, due_ms, own.offset, DUE_TOGETHER)
        for offset, pending in found:
            if pending.entry is not None and pending.entry.origin == own.origin:
                return offset
        return None

    def close(self) -> None:
        self.inspector.close()

    def _journal_lookup(
        self, shard: Shard, journal: ShardJournal, limit: ReadLimit
    ) -> JournalLookup:
        has_receipts = shard.partition < self._partitions.get(receipts_topic(shard.topic), 0)
        now_ms = time.time_ns() // 1_000_000
        return JournalLookup(shard, journal, self.formats[shard.topic], now_ms, has_receipts, limit)


def wait_until(is_true: Callable[[], bool], deadline: float) -> bool:
    """Ask again and again; False if it is not true by this deadline of `time.monotonic`."""
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(CHECKED_EVERY_S)
    return True


def _wait_for(journal: Journal, positions: Positions | None) -> None:
    """Wait up to `VISIBLE_WITHIN_S` until the receipts that the index has applied can be read."""
    # A producer learns of its commit before consumers can read the records.
    if positions is not None:
        deadline = time.monotonic() + VISIBLE_WITHIN_S
        wait_until(lambda: journal.receipt_bounds().end >= positions.receipts, deadline)


def _search_from(since: Positions | None, positions: Positions | None) -> Positions:
    # After Redis went back, a request that it shows as pending may have ended below `since`.
    if since is None or positions is None:
        return Positions(0, 0)
    is_not_before = positions.requests >= since.requests and positions.receipts >= since.receipts
    return since if is_not_before else Positions(0, 0)
