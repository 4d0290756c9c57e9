"""Look up the state of a request in Kafka alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from threading import Lock
from typing import Literal, cast

from blackbox.client.rescheduling import ReplacementRecord, replacement_of
from blackbox.core.journal_lookup import JournalLookup
from blackbox.core.journal_search import LimitReached, ReadLimit
from blackbox.core.request_status import DEAD, NO_REQUEST, Place, RequestStatus
from blackbox.formats import Options
from blackbox.formats.countdown import Countdown
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.partition_reader import PartitionReader
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.records.errors import NotAllowed, RecordHidden, RecoveryRequired
from blackbox.records.request import Shard, locate, request_id

PREFETCHED = 1_000
# No service accepts more than ten years. Its own limit may be lower; only its receipts show that.
LONGEST_COUNTDOWN_S = 315_360_000

StateWord = Literal["pending", "delivered", "dead", "ended", "unknown"]

_WHAT_TO_GIVE = (
    "give the id that send_later returned. A pending request can also be found by its caller id, "
    "over HTTP: GET /requests/{id}"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class LookupFailed(Exception):
    """The state of a request could not be read from Kafka; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class State:
    """The state of a request; fields that do not apply or are not known are None.

    pending   -- waits for its due time, or for a service
    delivered -- `delivered_to` is its message
    dead      -- `dead_letter` is its dead letter, with its `reason` and `detail`
    ended     -- cancelled, or replaced by a later request
    unknown   -- no such record: Kafka has removed it, or it never existed

    `due` is in UTC. A caller that may not read dead letters gets the `reason` only for requests that
    `expired` or were invalid.
    """

    id: str
    state: StateWord
    due: datetime | None = None
    delivered_to: Place | None = None
    dead_letter: Place | None = None
    reason: str | None = None
    detail: str | None = None


class StateReader:
    """Looks up requests of one request topic, one at a time. Safe to use from many threads."""

    def __init__(self, access: KafkaAccess, request_topic: str) -> None:
        self._access = access
        self._topic = request_topic
        # Only the service knows its own topics; the receipt says that a request for one is invalid.
        self._format = Countdown(Options(LONGEST_COUNTDOWN_S, own_topics=lambda name: False))
        self._reader = PartitionReader(access, prefetched=PREFETCHED)
        self._partitions: dict[str, int] = {}
        self._lock = Lock()

    def get(self, id: str, timeout_s: float) -> State:
        """As `Client.get`."""
        shard, offset = self._place(id)
        with self._lock, _as_lookup_failed(self._access.bootstrap_servers):
            status = self._status(shard, offset, ReadLimit(timeout_s, math.inf))
        if status.state in NO_REQUEST:
            raise ValueError(
                f"{id!r} is the id of a {status.state}, not of a request; {_WHAT_TO_GIVE}"
            )
        return _state(status)

    def replacement(
        self, id: str, when: datetime | timedelta, timeout_s: float
    ) -> tuple[Shard, ReplacementRecord] | None:
        """The record that reschedules the request with this id to `when`; None unless it is pending.

        Raises what `get` raises, and ValueError for a datetime without a time zone.
        """
        shard, offset = self._place(id)
        with self._lock, _as_lookup_failed(self._access.bootstrap_servers):
            limit = ReadLimit(timeout_s, math.inf)
            status = self._status(shard, offset, limit)
            if status.state != "pending":
                return None
            # A replacement must name the record that is in the index, the carried one.
            now_at = offset if status.carried is None else int(status.carried.rpartition("@")[2])
            journal = ShardJournal(shard, self._access, reader=self._reader)
            record = journal.record(now_at, limit.left_s)
        if record is None:
            return None
        if isinstance(when, timedelta):
            return shard, replacement_of(
                shard, record, self._format, countdown_s=when.total_seconds()
            )
        return shard, replacement_of(shard, record, self._format, at=when)

    def close(self) -> None:
        # After a look-up under way: a consumer must not be closed while another thread polls it.
        with self._lock:
            self._reader.close()

    def _place(self, id: str) -> tuple[Shard, int]:
        try:
            return locate(id, [self._topic])
        except ValueError as reason:
            raise ValueError(f"{reason}; {_WHAT_TO_GIVE}") from None

    def _status(self, shard: Shard, offset: int, limit: ReadLimit) -> RequestStatus:
        # Only a consumer that worked before is replaced: a new one has just failed as well.
        is_used = bool(self._partitions)
        try:
            return self._status_by_journals(shard, offset, limit)
        except LimitReached:
            raise LookupFailed(
                f"the state of {request_id(shard, offset)} was not found: {limit} were read, and "
                "there are more; give a longer timeout_s, or ask a service, which has an index: "
                "GET /requests/{id}"
            ) from None
        except RecordHidden as reason:
            raise LookupFailed(
                f"{reason}; try again after that, or give a longer timeout_s"
            ) from None
        except RecoveryRequired:
            self._reader.close()
            self._partitions = {}
            if not is_used:
                raise
        # A consumer that was idle during an outage may know no broker, or an old leader: try a new one.
        return self._status(shard, offset, limit)

    def _status_by_journals(self, shard: Shard, offset: int, limit: ReadLimit) -> RequestStatus:
        receipts = receipts_topic(self._topic)
        # The id may be in a partition that was added since the last count.
        if not shard.partition < min(self._count(self._topic), self._count(receipts)):
            self._partitions = Topics(self._access.admin()).partitions(
                [self._topic, receipts], to="Read"
            )
        if not self._count(self._topic):
            servers = self._access.bootstrap_servers
            raise LookupFailed(
                f"the request topic {self._topic!r} does not exist on {servers}; name another"
            )
        if shard.partition >= self._count(self._topic):
            return RequestStatus(request_id(shard, offset), shard.source(offset), "unknown")
        journal = ShardJournal(shard, self._access, reader=self._reader)
        has_receipts = shard.partition < self._count(receipts)
        now_ms = time.time_ns() // 1_000_000
        lookup = JournalLookup(shard, journal, self._format, now_ms, has_receipts, limit)
        status = lookup.status(offset)
        # Without Read on the dead-letter topic, the place of the letter is known, not its reason.
        with suppress(NotAllowed):
            status = lookup.explained(status)
        return status

    def _count(self, topic: str) -> int:
        return self._partitions.get(topic, 0)


@contextmanager
def _as_lookup_failed(servers: str) -> Iterator[None]:
    try:
        yield
    except NotAllowed as reason:
        raise LookupFailed(str(reason)) from None
    except RecoveryRequired as reason:
        what = f"{reason}; check that Kafka is running at {servers}, then try again"
        raise LookupFailed(what) from None


def _state(status: RequestStatus) -> State:
    due = None if status.due_ms is None else _EPOCH + timedelta(milliseconds=status.due_ms)
    if status.state in DEAD:
        reason = status.reason or ("expired" if status.state == "expired" else None)
        return State(status.id, "dead", due, None, status.place, reason, status.detail)
    word = cast(StateWord, status.state)
    return State(status.id, word, due, status.place)
