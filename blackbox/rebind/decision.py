"""Decides what to do with an index that may belong to something else, from what it and the journals say."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from blackbox.core.plan import Binding, Bounds, IndexMetadata, Positions
from blackbox.core.receipt_history import (
    RebindReceipt,
    Recreated,
    Shortened,
    cuts_since,
    foreign_group,
    newest_mark,
    openings,
    rebound_by,
)
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.shard_journal import ShardJournal
from blackbox.rebind.lost_end import lost_from, written_since
from blackbox.records.clock import CLOCKS_APART_MS, Clock
from blackbox.records.errors import ForeignIndex
from blackbox.records.receipt import Mark, Receipt
from blackbox.records.request import Shard

FITS = "it already matches"
NO_INDEX = "it has no index; nothing to do"
INTERRUPTED = "an interrupted run had already written the pending requests"


@dataclass(frozen=True, slots=True)
class Gone:
    """The requests of an index that are not in the current topic: those from the offset `first` on.

    Receipts from `since` on name their outcomes; None: no receipts do. `is_open`: such receipts can still
    be written. `is_unknown`: the requests may have been written again before.
    """

    topic_id: str
    first: int
    since: int | None
    is_open: bool
    is_unknown: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The plan for an index, and the `barrier` that records it in Kafka; without both, nothing is done.

    `gone` is written again in the barrier's transaction. Then the index is emptied (`is_emptied`), or
    loses the requests from `first` on and is bound at `positions`. `begins`: the barrier carries a mark
    at this request. Receipts before `since` are known already; those before `old_receipts` are removed.
    """

    why: str
    barrier: Receipt | None = None
    gone: Gone | None = None
    positions: Positions | None = None
    first: int | None = None
    is_emptied: bool = False
    begins: int | None = None
    old_receipts: int = 0
    since: int = 0
    unknown_ms: int = 0

    @property
    def changes(self) -> bool:
        return self.is_emptied or self.positions is not None or self.barrier is not None

    def marked(self, end: int) -> Receipt | None:
        """The barrier; if it begins a topic, with a mark behind the receipts, which end at `end`."""
        if self.barrier is None or self.begins is None:
            return self.barrier
        return replace(self.barrier, mark=Mark(self.begins, end))


@dataclass(frozen=True, slots=True)
class Decider:
    """Decides for the shards of one request topic of `count` partitions; its receipts have `receipts_count`.

    `ours` is what an index should belong to.
    """

    ours: Binding
    count: int
    receipts_count: int
    journal: Callable[[int], ShardJournal]

    def decide(self, index: ShardIndex) -> Decision:
        shard, kept = index.shard, index.load()
        earlier = index.earlier_binding
        if kept is None and earlier is not None and earlier[1:] != self.ours[1:]:
            raise ForeignIndex(
                f"{shard}: an earlier version of blackbox wrote this index: rebind it with that "
                "version, or delete its keys in Redis if its requests are not needed"
            )
        journal = self.journal(shard.partition)
        requests = journal.request_bounds() if shard.partition < self.count else Bounds(0, 0)
        receipts = journal.receipt_bounds() if self.has_receipts(shard) else Bounds(0, 0)
        if kept is None or kept.binding is None:
            return self._without(shard, kept, journal, requests)
        if kept.binding.topic_id != self.ours.topic_id:
            return self._recreated(shard, journal, kept, requests, receipts)
        return self._kept(shard, journal, kept, requests, receipts)

    def _without(
        self, shard: Shard, kept: IndexMetadata | None, journal: ShardJournal, requests: Bounds
    ) -> Decision:
        """For a shard without an index, which Redis lost or which is new."""
        if shard.partition < min(self.count, self.receipts_count):
            # The last owner's receipts may be of another topic, or of a longer journal.
            try:
                newest_mark(shard, journal, self.ours.topic_id)
            except Recreated:
                why, begins = "another topic", requests.start
            # Requests from before that receipt have ended: its mark was beyond the log's end.
            except Shortened as known:
                why = "a journal became shorter"
                begins = written_since(journal, requests, known.known_ms)
            else:
                return self._group(shard, journal, NO_INDEX, Positions(0, 0))
            barrier = self._barrier(shard, begins)
            return Decision(why, barrier, is_emptied=kept is not None, begins=begins)
        return Decision(NO_INDEX)

    def _recreated(
        self,
        shard: Shard,
        journal: ShardJournal,
        kept: IndexMetadata,
        requests: Bounds,
        receipts: Bounds,
    ) -> Decision:
        """For an index of another topic id: its requests are not in the current topic."""
        assert kept.binding is not None
        opened = openings(journal, self.ours.topic_id) if self.has_receipts(shard) else []
        for one in opened:
            # It was committed together with the pending requests of this index.
            if one.rebound == kept.token != "":
                old = 0 if one.mark is None else one.mark.receipts
                return Decision(INTERRUPTED, is_emptied=True, old_receipts=old)
        groups = {one.group for one in opened}
        # Redis was rolled back to before the current topic was opened, which may have been after a
        # rebind that wrote these requests again.
        is_unknown = bool(groups & {self.ours.group, kept.binding.group})
        is_open = self.has_receipts(shard) and not opened
        why = "an index from before the topic was opened" if is_unknown else "another topic"
        gone = Gone(
            kept.binding.topic_id,
            0,
            self._receipts_since(kept, receipts, is_open),
            is_open,
            is_unknown,
        )
        begins = None if opened else requests.start
        barrier = self._barrier(shard, begins or 0, rebound=kept.token)
        return Decision(why, barrier, gone, is_emptied=True, begins=begins)

    def _kept(
        self,
        shard: Shard,
        journal: ShardJournal,
        kept: IndexMetadata,
        requests: Bounds,
        receipts: Bounds,
    ) -> Decision:
        """For an index of the current topic, whose log may have lost its end, or its receipts may be others."""
        assert kept.binding is not None
        at, is_same = kept.positions, kept.binding.receipts_id == self.ours.receipts_id
        lacks_receipts = not is_same or at.receipts > receipts.end
        lost = lost_from(journal, kept, requests)
        if lost is None and not lacks_receipts and kept.binding == self.ours:
            return self._group(shard, journal, FITS, at)
        by = rebound_by(journal, kept.token)
        if by is None and not is_same and openings(journal, self.ours.topic_id):
            # Redis was rolled back to before that: the journals know what is pending.
            return Decision("an index from before its receipts topic was opened", is_emptied=True)
        receipts_from, unknown_ms = at.receipts, 0
        if lacks_receipts or (by is not None and by.offset < receipts_from):
            # The receipts are gone: requests that are due by now may have been delivered.
            receipts_from, unknown_ms = receipts.end, Clock().latest_ms() + CLOCKS_APART_MS
            if by is not None:
                receipts_from, unknown_ms = by.offset, by.receipt.unknown_ms
        if lost is None:
            return self._bound(shard, kept, Positions(at.requests, receipts_from), unknown_ms, by)
        cuts = cuts_since(journal, receipts_from)
        first = min([lost, *(cut for _, cut in cuts)])
        positions = Positions(min(at.requests, first), receipts_from)
        # By earlier runs. A second cut would void the outcomes since the first one.
        explained = [offset for offset, cut in cuts if lost >= cut]
        if by is not None and any(offset <= by.offset for offset in explained):
            return Decision(INTERRUPTED, positions=positions, first=first, unknown_ms=unknown_ms)
        barrier = self._barrier(
            shard, positions.requests, cut=[] if explained else [lost], unknown_ms=unknown_ms,
            rebound=kept.token,
        )  # fmt: skip
        why = (
            "an index from before a journal became shorter" if cuts else "a journal became shorter"
        )
        is_open = self.has_receipts(shard) and not lacks_receipts
        since = self._receipts_since(kept, receipts, is_open)
        gone = Gone(self.ours.topic_id, first, since, is_open, is_unknown=bool(cuts))
        return Decision(
            why, barrier, gone, positions, first, since=receipts_from, unknown_ms=unknown_ms
        )

    def _bound(
        self,
        shard: Shard,
        kept: IndexMetadata,
        positions: Positions,
        unknown_ms: int,
        by: RebindReceipt | None,
    ) -> Decision:
        """For an index of whose requests none is gone from the topic: all its entries are kept."""
        if by is not None:
            return Decision(INTERRUPTED, positions=positions, unknown_ms=unknown_ms)
        barrier = self._barrier(
            shard, positions.requests, unknown_ms=unknown_ms, rebound=kept.token
        )
        why = "another group, or other receipts"
        return Decision(
            why, barrier, positions=positions, since=positions.receipts, unknown_ms=unknown_ms
        )

    def _group(
        self, shard: Shard, journal: ShardJournal, why: str, positions: Positions
    ) -> Decision:
        """If another group wrote the newest barrier or mark, a barrier of ours goes behind it."""
        # A shard stays closed while the newest barrier or mark is another group's.
        if self.has_receipts(shard) and foreign_group(journal, self.ours.group, since=0):
            barrier = self._barrier(shard, positions.requests)
            return Decision("another group", barrier, since=positions.receipts)
        return Decision(why)

    def _receipts_since(self, kept: IndexMetadata, receipts: Bounds, is_open: bool) -> int | None:
        assert kept.binding is not None
        is_known = kept.binding.receipts_id == self.ours.receipts_id
        if is_known and receipts.start <= kept.positions.receipts <= receipts.end:
            return kept.positions.receipts
        return receipts.start if is_open else None

    def _barrier(
        self,
        shard: Shard,
        read: int,
        *,
        cut: Collection[int] = (),
        unknown_ms: int = 0,
        rebound: str = "",
    ) -> Receipt | None:
        if not self.has_receipts(shard):
            return None
        return Receipt(
            Clock().earliest_ms(), barrier=True, read=read, topic_id=self.ours.topic_id,
            group=self.ours.group, unknown_ms=unknown_ms, cut=list(cut), rebound=rebound,
        )  # fmt: skip

    def has_receipts(self, shard: Shard) -> bool:
        return shard.partition < self.receipts_count


def keep_partitions(former: Collection[int], count: int) -> bool:
    """Whether requests are written again to their own partition; `former` had an index of another topic."""
    # With another number of partitions, the keys of later cancels name other partitions.
    return not former or max(former) + 1 == count
