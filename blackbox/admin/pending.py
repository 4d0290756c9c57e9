"""List pending requests of all shards in due order, page by page."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from blackbox.core.parking import BAND_MS, LETTERS, parked_at
from blackbox.core.request_status import RequestStatus
from blackbox.index.inspector import Inspector, Pending
from blackbox.records.refusal_causes import BROKEN_RULES, TOO_LATE
from blackbox.records.request import MAX_OFFSET, Reason, Shard, is_topic_name, request_id

INVALID = "its record is invalid; its dead letter says why, and is written when its turn comes"
LATE = "the request to replace was not pending; its dead letter is written when its turn comes"

IN_FLIGHT = (
    "it was cancelled or replaced while it was being delivered; look it up again to see whether "
    "that was too late"
)

WAITING = ("pending", "unread")

AT_ONCE = 100
MOST_LOOKED_AT = 5_000
"""How many entries one page may read, including those that the filter skips."""

MOST_BYTES = 6 << 20
"""Of one page, as it is stored: 8 MiB with messages in base64."""

# Redis keeps scores as doubles: integers are exact up to here.
LAST_MS = 1 << 53


class Cursor(NamedTuple):
    """Where a page ended. Pages are ordered by time, then shard, then offset; parked requests come last."""

    at_ms: int
    shard: Shard
    offset: int

    def __str__(self) -> str:
        return f"{self.at_ms}:{self.shard.topic}:{self.shard.partition}:{self.offset}"

    @classmethod
    def read(cls, text: str) -> Cursor:
        """Raises ValueError for anything but the `str` of a cursor."""
        try:
            at_ms, topic, partition, offset = text.split(":")
            cursor = cls(int(at_ms), Shard(topic, int(partition)), int(offset))
            if is_topic_name(topic) and 0 <= cursor.offset <= MAX_OFFSET and str(cursor) == text:
                return cursor
        except ValueError:
            pass
        raise ValueError(f"{text[:80]!r} is not a cursor; use `next` of the previous page")


@dataclass(frozen=True, slots=True)
class PendingFilter:
    """A filter of pending requests; None: any.

    `from_ms` and `to_ms`, both inclusive, apply to the next try, or to the due time if parked.
    """

    from_ms: int | None = None
    to_ms: int | None = None
    target: str | None = None
    caller: str | None = None

    def holds(self, pending: Pending) -> bool:
        entry = pending.entry
        if entry is None:
            return self.target is None and self.caller is None
        return self.target in (None, entry.target) and self.caller in (None, entry.caller)


class FoundPending(NamedTuple):
    cursor: Cursor
    pending: Pending

    def status(self) -> RequestStatus:
        (_, shard, offset), pending = self
        origin = None if pending.entry is None else pending.entry.origin
        id = request_id(shard, offset if origin is None else origin)
        return as_pending(RequestStatus(id, shard.source(offset), "pending"), pending)


def as_pending(status: RequestStatus, pending: Pending) -> RequestStatus:
    status = replace(status, state="pending", next_try_ms=pending.next_try_ms)
    entry = pending.entry
    if entry is None:
        return _as_refused(status, pending.cause)
    return replace(
        status,
        caller=entry.caller,
        caller_id=entry.caller_id,
        target=entry.target or None,
        due_ms=entry.due_ms,
        attempts=entry.attempts + entry.waits,
        reason=entry.reason,
        detail=entry.detail,
    )


def as_in_flight(status: RequestStatus) -> RequestStatus:
    """The status of a request that has left the index during its delivery, which may still fail."""
    return replace(status, state="pending", detail=IN_FLIGHT)


def is_changeable(status: RequestStatus) -> bool:
    """Whether a request that is not known to have ended can be cancelled or replaced."""
    # One that has left the index during its delivery was cancelled or replaced before. A change that is
    # written now could be taken for the one that ended it, while its replacement is delivered.
    waits = status.state in WAITING and status.reason is None
    return waits and status.detail != IN_FLIGHT


def _as_refused(status: RequestStatus, cause: str | None) -> RequestStatus:
    """The status of a request without a payload; `cause` is why it was refused, if it was."""
    if cause is None:
        return status
    if cause in BROKEN_RULES:
        reason, detail = BROKEN_RULES[cause]
        return replace(status, reason=reason, detail=detail)
    if cause == TOO_LATE:
        return replace(status, reason=Reason.TOO_LATE, detail=status.detail or LATE)
    return replace(status, detail=status.detail or INVALID)


def page(
    inspector: Inspector,
    shards: Iterable[Shard],
    wanted: PendingFilter,
    after: Cursor | None,
    limit: int,
    *,
    whole: bool = False,
) -> tuple[list[FoundPending], Cursor | None]:
    """At most `limit` requests after `after`, and the `after` of the next page; None: this is the last page.

    A page may be short or empty although more pages follow. Entries have messages only if `whole`.
    """
    found: list[FoundPending] = []
    found_bytes = 0
    shards = sorted(shards)
    # With a filter most entries may be skipped, so a small limit does not bound what is read.
    at_once = min(AT_ONCE, limit) if wanted.target is wanted.caller is None else AT_ONCE
    # A share for each shard: the merge below reads ahead in all of them.
    whole_bytes = MOST_BYTES // max(1, len(shards)) if whole else None
    listed = partial(inspector.list_pending, count=at_once, whole_bytes=whole_bytes)
    # With messages, a read ends early at its bytes: only an empty one shows the end.
    fewest = 1 if whole else at_once
    each = heapq.merge(
        *(
            _in_shard(listed, fewest, shard, _stretches(inspector, shard, wanted), after)
            for shard in shards
        )
    )
    for looked_at, one in enumerate(each, 1):
        if wanted.holds(one.pending):
            found.append(one)
            found_bytes += one.pending.read_bytes
        is_full = len(found) == limit or found_bytes >= MOST_BYTES
        if is_full or looked_at == MOST_LOOKED_AT:
            return found, one.cursor
    return found, None


def _in_shard(
    listed: Callable[[Shard, int, int, int | None], list[tuple[int, Pending]]],
    fewest: int,
    shard: Shard,
    stretches: Iterable[tuple[int, int]],
    after: Cursor | None,
) -> Iterator[FoundPending]:
    for first_ms, to_ms in stretches:
        from_ms, behind = _start(shard, first_ms, after)
        while from_ms <= to_ms:
            some = listed(shard, from_ms, to_ms, behind)
            yield from (FoundPending(Cursor(p.at_ms, shard, offset), p) for offset, p in some)
            if len(some) < fewest:  # there are no more
                break
            behind, last = some[-1]
            from_ms = last.at_ms


def _stretches(
    inspector: Inspector, shard: Shard, wanted: PendingFilter
) -> Iterator[tuple[int, int]]:
    """The score ranges to read in a shard: the wanted times, then the same times in each parking band."""
    # A caller's `to_ms` must not reach into the bands, whose scores lie behind all times.
    from_ms = -LAST_MS if wanted.from_ms is None else wanted.from_ms
    to_ms = BAND_MS - 1 if wanted.to_ms is None else min(wanted.to_ms, BAND_MS - 1)
    yield from_ms, to_ms
    # Each band costs a Redis command, and a target has one; dead letters have one of their own.
    if wanted.target is not None:
        bands: Iterable[int] = inspector.bands_of(shard, {wanted.target, LETTERS})
    else:
        bands = inspector.bands(shard)
    for band in bands if to_ms >= 0 else ():
        yield parked_at(band, max(from_ms, 0)), parked_at(band, to_ms)


def _start(shard: Shard, from_ms: int, after: Cursor | None) -> tuple[int, int | None]:
    if after is None or after.at_ms < from_ms:
        return from_ms, None
    if shard == after.shard:
        return after.at_ms, after.offset
    # At one instant, shards come in order: those before the cursor's are done with this instant.
    return after.at_ms + (shard < after.shard), None
