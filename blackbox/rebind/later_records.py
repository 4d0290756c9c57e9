"""The records that have ended requests of an index since: later ones of their callers, and messages in doubt."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from blackbox.core.barrier import PATIENCE_S
from blackbox.core.offset_set import OffsetSet
from blackbox.core.outcomes import Outcomes
from blackbox.core.parsing import parse_batch
from blackbox.core.plan import Bounds, Change, Replacement
from blackbox.formats import Format
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.shard_journal import ShardJournal
from blackbox.records.clock import Clock
from blackbox.records.entry import Entry
from blackbox.records.errors import RecoveryRequired
from blackbox.records.recurrence import AGAIN
from blackbox.records.request import Cancel, Headers, Shard, offset_in, placed, request_id

T = TypeVar("T")


class Newer(NamedTuple):
    """Caller ids under which there are later records, and ids of requests that were cancelled since.

    `replacing` are caller ids of replacements, each with the ids of the requests that these name. `again`
    are caller ids of requests that an earlier run wrote again, each with the shards that had these.
    """

    caller_ids: set[str]
    cancelled: set[str]
    replacing: dict[str, set[str]]
    again: dict[str, set[Shard]]

    def ends(self, shard: Shard, offset: int, entry: Entry) -> bool:
        # The request of its own shard is this one, or a later one that had replaced it.
        if shard in self.written_again(entry):
            return True
        # A carried request keeps the id of the record that its caller wrote.
        id = request_id(shard, offset if entry.origin is None else entry.origin)
        return entry.caller_id in self.caller_ids or id in self.cancelled

    def written_again(self, entry: Entry) -> set[Shard]:
        """The shards whose request of this caller id was written again by an earlier run."""
        return set() if entry.caller_id is None else self.again.get(entry.caller_id, set())

    def in_time(self, index: ShardIndex, ended: Container[int], first: int) -> Newer:
        """With the replacements of requests that stay in this index: below `first`, and cold or not `ended`."""
        # Intake ignores the caller id of one that is too late, as those of all others will be. A request
        # under this id, also the one that was to be replaced, would be lost if the replacement counted.
        named = index.named(sorted(set[str]().union(*self.replacing.values())))
        # For intake, a cold request is pending until its bit is cleared, whatever receipts say.
        cold = index.cold_among(one.offset for one in named.values())
        pending = {
            id
            for id, one in named.items()
            if one.offset < first
            and (one.offset in cold or (one.is_pending and one.offset not in ended))
        }
        found = {caller_id for caller_id, ids in self.replacing.items() if ids & pending}
        return self._replace(caller_ids=self.caller_ids | found)


@dataclass(eq=False, repr=False)
class WrittenSince:
    """The records that callers have written to a request topic; `before` has its bounds at the beginning of the run."""

    topic: str
    format: Format
    before: Mapping[int, Bounds]
    journal: Callable[[int], ShardJournal]
    _known: dict[int, Newer] = field(default_factory=dict)

    def newer(self, partitions: Iterable[int], first: int) -> Newer:
        """The records of these partitions from the offset `first` on."""
        found = [self._newer(partition, first) for partition in partitions]
        return Newer(
            set[str]().union(*(one.caller_ids for one in found)),
            set[str]().union(*(one.cancelled for one in found)),
            _merged(one.replacing for one in found),
            _merged(one.again for one in found),
        )

    def _newer(self, partition: int, first: int) -> Newer:
        if partition not in self._known:
            newer = self._known[partition] = Newer(set(), set(), {}, {})
            # Up to where the run began: behind it are requests that the run itself writes.
            start, end = self.before[partition]
            shard, requests = Shard(self.topic, partition), OffsetSet()
            for batch in self.journal(partition).requests(max(first, start), end):
                headers = {record.offset: record.headers for record in batch.records}
                for offset, change in parse_batch(
                    self.format, batch, Clock().latest_ms(), None
                ).changes:
                    source = _source(headers[offset], self.topic)
                    if source is None:
                        _note(newer, change, shard, requests)
                    elif change.caller_id is not None:
                        newer.again.setdefault(change.caller_id, set()).add(source)
                    if not isinstance(change, Cancel):
                        requests.add([offset])
        return self._known[partition]


def _merged(found: Iterable[dict[str, set[T]]]) -> dict[str, set[T]]:
    merged: dict[str, set[T]] = {}
    for name, ones in (pair for one in found for pair in one.items()):
        merged.setdefault(name, set()).update(ones)
    return merged


def _source(headers: Headers, topic: str) -> Shard | None:
    """The shard whose request a record is that a rebind wrote again; None for a caller's record."""
    if not headers or headers[-1][0] != AGAIN:
        return None
    place = placed((headers[-1][1] or b"").decode(errors="replace"))
    return place[0] if place is not None and place[0].topic == topic else None


def _note(newer: Newer, change: Change, shard: Shard, requests: Container[int]) -> None:
    """Note what a later record may end; `requests` are those before it that were written since."""
    named = offset_in(shard, change.id or "") if isinstance(change, Cancel | Replacement) else None
    # A new topic repeats ids: this one may name a new request, not a leftover.
    names_new = named is not None and named in requests
    if isinstance(change, Replacement) and not names_new:
        if change.caller_id is not None:
            newer.replacing.setdefault(change.caller_id, set()).add(change.id)
    elif change.caller_id is not None:
        newer.caller_ids.add(change.caller_id)
    if isinstance(change, Cancel) and change.id is not None and named is not None and not names_new:
        newer.cancelled.add(change.id)


def ended_in_doubt(index: ShardIndex, outcomes: Outcomes, journal: ShardJournal) -> list[int]:
    """Requests in doubt that were delivered or ended. Raises RecoveryRequired if that cannot be read."""
    known = {o: claim for o, claim in index.doubtful.items() if o not in outcomes.undelivered}
    doubtful = {**known, **outcomes.doubtful}
    claims = [claim for offset, claim in doubtful.items() if offset not in outcomes.ended]
    missing, unread = journal.check(claims, PATIENCE_S)
    if unread:
        raise RecoveryRequired(
            f"{index.shard}: cannot read whether {len(unread)} requests were delivered: "
            f"{next(iter(unread.values()))}; run rebind again later, or with --pending drop"
        )
    absent = {claim.offset for claim in missing}
    ended = index.ended_in_doubt([*absent, *outcomes.undelivered.intersection(index.doubtful)])
    return [*(claim.offset for claim in claims if claim.offset not in absent), *ended]
