"""All operations on a running blackbox, without access control."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

from blackbox.admin.changes import READ_WITHIN_S, Cancelled, Changes, Rescheduled
from blackbox.admin.dead_letters import ClosedLetters, DeadLetters
from blackbox.admin.lookup import StatusLookup, wait_until
from blackbox.admin.pending import Cursor, FoundPending, PendingFilter, page
from blackbox.admin.request_topics_writer import RefusedValue, RequestTopicsWriter
from blackbox.config.settings import Settings
from blackbox.config.wiring import shared
from blackbox.core.request_status import RequestStatus
from blackbox.index.inspector import ShardStats
from blackbox.index.redis_servers import RedisRoom, RedisServers
from blackbox.journal.dead_letter_topic import MOST_SHOWN_BYTES, DeadLetter
from blackbox.records.request import Shard, locate, placed

# How long a look-up waits until intake has read what was written; shorter than a change does,
# because a look-up can be repeated.
LOOKED_FOR_S = 1.0

COUNTED_PER_SHARD = 1_000
"""How many entries of each shard, the soonest first, are counted by caller and target."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of all shards.

    `callers` and `targets` count the soonest entries of each shard, `counted` in all. `profile` has
    the number of entries whose next try is from each given instant to before the next one.
    """

    shards: dict[Shard, ShardStats]
    callers: Counter[str]
    targets: Counter[str]
    counted: int
    profile: Sequence[int]


class Admin:
    """All operations, safe to use from many threads.

    Methods raise JournalLost or IndexLost when Kafka or Redis does not
    answer, NotSent when Kafka does not accept a request.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._writer = RequestTopicsWriter(settings)
        self._shared = shared(settings)
        self._redis = RedisServers(settings.redis_url.get_secret_value())
        self._has_room = RedisRoom(self._redis)
        self._lock = Lock()
        # Not the writer's: this takes a second among many letters, and no request may wait for it.
        self._closing_letters = Lock()
        self._made_lookup: StatusLookup | None = None

    def find(self, text: str) -> RequestStatus | None:
        """The request with this id, or the newest pending one under this caller id; None: there is none.

        If a caller id is not found, waits up to a second for intake to read the latest requests, and may
        miss them. Does not wait while Redis is full.
        """
        places = self._places(text, LOOKED_FOR_S)
        if not places:
            return None
        status = self._lookup().status(*places[0])
        return None if status.state == "unknown" else status

    def page(
        self,
        wanted: PendingFilter,
        after: Cursor | None,
        limit: int,
        topics: Collection[str] | None = None,
        *,
        whole: bool = False,
    ) -> tuple[list[FoundPending], Cursor | None]:
        """As `admin.pending.page`; only of these request topics, if given."""
        lookup = self._lookup()
        shards = [shard for shard in lookup.shards() if topics is None or shard.topic in topics]
        return page(lookup.inspector, shards, wanted, after, limit, whole=whole)

    def all_pending(
        self, topics: Collection[str], wanted: PendingFilter, at_once: int
    ) -> Iterator[FoundPending]:
        after: Cursor | None = None
        while True:
            found, after = self.page(wanted, after, at_once, topics)
            yield from found
            if after is None:
                return

    def send(self, values: Sequence[bytes], caller: str | None) -> list[str] | list[RefusedValue]:
        """As `RequestTopicsWriter.send`."""
        return self._writer.send(values, caller)

    def cancel(self, text: str) -> Cancelled:
        """Cancel the request with this id, or all pending ones under this caller id; returns the outcome."""
        return self._changes().cancel(self._places(text), text)

    def reschedule(
        self, text: str, *, countdown_s: float | None = None, at: str | int | None = None
    ) -> Rescheduled:
        """Change the due time of the pending request with this id or caller id; returns the outcome.

        If several are pending under a caller id, the newest is rescheduled and the others are
        cancelled. Raises ValueError for an invalid time, for a request in another format than
        `countdown`, and when Kafka no longer keeps its record.
        """
        return self._changes().reschedule(self._places(text), countdown_s, at)

    def letters(
        self,
        reason: str | None = None,
        *,
        is_open: bool = True,
        limit: int | None = None,
        most_bytes: int = MOST_SHOWN_BYTES,
    ) -> list[DeadLetter]:
        """The dead letters with this reason (None: any), the newest first; only open ones, or all.

        With a `limit`, reading stops once that many are found. `most_bytes`: of key and value each.
        """
        return self._dead_letters().newest(reason, is_open, limit, most_bytes)

    def close_letters(self, places: Sequence[str], *, replay: bool) -> ClosedLetters:
        """As `DeadLetters.close_letters`."""
        # Both transactions would have one transactional id, so the second would fence the first.
        with self._closing_letters:
            return self._dead_letters().close_letters(places, replay=replay)

    def paused(self) -> dict[str, int]:
        """The paused targets, and since when, epoch ms."""
        return self._shared.paused(self._lookup().shards())

    def pause(self, topic: str) -> dict[str, int]:
        """Stop delivery to this target within a second; returns all paused targets.

        The target is not among them while no request topic exists.
        """
        self._shared.pause(topic, time.time_ns() // 1_000_000, self._lookup().shards())
        return self.paused()

    def resume(self, topic: str) -> dict[str, int]:
        """Resume delivery to this target; returns the targets that are still paused."""
        self._shared.resume(topic, self._lookup().shards())
        return self.paused()

    def stats(self, now_ms: int, edges_ms: Sequence[int]) -> Stats:
        lookup = self._lookup()
        shards = list(lookup.shards())
        callers: Counter[str] = Counter()
        targets: Counter[str] = Counter()
        counted = 0
        for shard in shards:
            found, _ = page(lookup.inspector, [shard], PendingFilter(), None, COUNTED_PER_SHARD)
            counted += len(found)
            held = [one.pending.entry for one in found if one.pending.entry is not None]
            callers.update(entry.caller or "" for entry in held)
            targets.update(entry.target for entry in held)
        profiles = [lookup.inspector.pending_counts(shard, edges_ms) for shard in shards]
        return Stats(
            shards={shard: lookup.inspector.shard_stats(shard, now_ms) for shard in shards},
            callers=callers,
            targets=targets,
            counted=counted,
            profile=[sum(column) for column in zip(*profiles, strict=True)],
        )

    def close(self) -> None:
        self._writer.close()
        self._shared.close()
        self._redis.close()
        with self._lock:
            if self._made_lookup is not None:
                self._made_lookup.close()

    def _lookup(self) -> StatusLookup:
        with self._lock:
            if self._made_lookup is None:
                self._made_lookup = StatusLookup(self._settings)
        # Outside the lock: it may wait for Kafka.
        self._made_lookup.count_partitions()
        return self._made_lookup

    def _changes(self) -> Changes:
        return Changes(self._settings, self._lookup(), self._writer)

    def _dead_letters(self) -> DeadLetters:
        return DeadLetters(self._lookup(), self._settings.dead_letter_topic)

    def _places(self, text: str, within_s: float = READ_WITHIN_S) -> list[tuple[Shard, int]]:
        """The place of the request with this id, or of those pending under this caller id, the newest first.

        If none is found and the text is a place such as TB/3@1234, that place. Otherwise waits up
        to `within_s` for intake to read what was written by now.
        """
        try:
            return [locate(text, list(self._settings.topics))]
        except ValueError:
            pass
        lookup = self._lookup()
        # In all shards: the partition of a caller id changes when partitions are added.
        if found := lookup.pending_under(text):
            return found
        # Only now: a caller may have chosen an id that looks like a place.
        place = placed(text)
        if place is not None and place[0].topic in self._settings.topics:
            return [place]
        # A full Redis stops intake: a look-up would wait in vain. A change may still come in time.
        if within_s < READ_WITHIN_S and not self._has_room():
            return []
        return self._pending_once_read(lookup, text, within_s)

    def _pending_once_read(
        self, lookup: StatusLookup, text: str, within_s: float
    ) -> list[tuple[Shard, int]]:
        # The ends of this moment: under load, the current ends would never be reached.
        ends = lookup.request_ends()

        def are_read() -> bool:
            positions = {shard: lookup.inspector.positions(shard) for shard in ends}
            return all(one is not None and one.requests >= ends[s] for s, one in positions.items())

        wait_until(are_read, time.monotonic() + within_s)
        return lookup.pending_under(text)
