"""What has ended the requests of an index since: later records of their callers, and messages in doubt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from blackbox.core.barrier import PATIENCE_S
from blackbox.core.offset_set import OffsetSet
from blackbox.core.outcomes import Outcomes
from blackbox.core.parsing import parse, touched_by
from blackbox.core.plan import Bounds
from blackbox.formats import Format
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.shard_journal import ShardJournal
from blackbox.records.clock import Clock
from blackbox.records.entry import Entry
from blackbox.records.errors import RecoveryRequired
from blackbox.records.request import Cancel, Shard, offset_in, request_id


class Newer(NamedTuple):
    """Caller ids under which there are later records, and ids of requests that were cancelled since."""

    caller_ids: set[str]
    cancelled: set[str]

    def ends(self, shard: Shard, offset: int, entry: Entry) -> bool:
        # A carried request keeps the id of the record that its caller wrote.
        id = request_id(shard, offset if entry.origin is None else entry.origin)
        return entry.caller_id in self.caller_ids or id in self.cancelled


@dataclass(eq=False, repr=False)
class WrittenSince:
    """What callers have written to a request topic; `before` has its bounds at the beginning of the run."""

    topic: str
    format: Format
    before: Mapping[int, Bounds]
    journal: Callable[[int], ShardJournal]
    _known: dict[int, Newer] = field(default_factory=dict)

    def newer(self, partitions: Iterable[int], first: int) -> Newer:
        """What these partitions have from the offset `first` on."""
        found = [self._newer(partition, first) for partition in partitions]
        return Newer(
            set[str]().union(*(one.caller_ids for one in found)),
            set[str]().union(*(one.cancelled for one in found)),
        )

    def _newer(self, partition: int, first: int) -> Newer:
        if partition not in self._known:
            newer = self._known[partition] = Newer(set(), set())
            # Up to where the run began: behind it are requests that the run itself writes.
            start, end = self.before[partition]
            shard, requests = Shard(self.topic, partition), OffsetSet()
            for batch in self.journal(partition).requests(max(first, start), end):
                changes = parse(self.format, batch, Clock().latest_ms(), None).changes
                newer.caller_ids.update(touched_by(changes).caller_ids)
                for offset, change in changes:
                    if not isinstance(change, Cancel):
                        requests.add([offset])
                    elif change.id is not None:
                        # A new topic repeats ids: this may cancel a new request, not a leftover.
                        named = offset_in(shard, change.id)
                        if named is not None and named not in requests:
                            newer.cancelled.add(change.id)
        return self._known[partition]


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
