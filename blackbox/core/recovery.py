"""The third verb, recovery: make an index agree with the journals, and take the shard over."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from blackbox.core.barrier import commit_barrier
from blackbox.core.intake import Rebuild, Taken, Upcoming
from blackbox.core.marks import (
    check_binding,
    foreign_group,
    is_another,
    newest_mark,
    other_group,
    replaced,
    shortened,
)
from blackbox.core.offset_set import OffsetSet
from blackbox.core.outcomes import Outcomes
from blackbox.core.plan import Batch, Binding, Bounds, IndexMetadata, Positions
from blackbox.core.ports import Index, Journal, Writer
from blackbox.core.settling import end_ahead, remove_ended, settle
from blackbox.records.errors import IndexFull, RecoveryRequired
from blackbox.records.receipt import Mark, Receipt, settled
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.core.recovery")

RECENT_S = 1.0
"""A shard that opens has read every cancel that was written at least this long before."""

CLOCKS_APART_MS = 60_000
"""How far apart the clocks of two owners may be."""

NOWHERE = Binding("", "", "", "")


@dataclass(frozen=True, slots=True)
class Recovered:
    """What opening a shard did: outcomes applied, messages found missing, requests lost to retention.

    `mark` is the last low-water mark, `binding` what the index belongs to.
    """

    outcomes: int
    void: int
    gone: int
    mark: Mark | None = None
    binding: Binding = NOWHERE


class _Start(NamedTuple):
    """Where an opening begins to read, and what it found out before.

    Requests that were due before `unknown_before_ms` may have had an outcome that is gone.
    """

    positions: Positions
    is_rebuild: bool = False
    gone: tuple[int, int] | None = None
    mark: Mark | None = None
    unknown_before_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Recovery:
    """Opens one shard for its owner. `confirm` raises RecoveryRequired unless the shard is still the owner's.

    `ahead` returns what the records of a batch ask for, cancel or carry on, by caller ids and ids.
    `has_room` is False while Redis is so full that requests are to be left in Kafka.
    """

    shard: Shard
    group: str
    index: Index
    journal: Journal
    writer: Writer
    confirm: Callable[[], None]
    apply: Callable[[Batch, Rebuild | None], Taken]
    ahead: Callable[[Batch], Iterable[Upcoming]]
    now_ms: Callable[[], int]
    has_room: Callable[[], bool] = lambda: True
    progress: Callable[[int, int], None] = lambda read, end: None

    def open(self) -> Recovered:
        """Take the shard over, when an owner gets it and whenever recovery is required.

        1. check that the shard still belongs to this owner, and the index to these topics. Then
           fence every earlier owner, and settle its open transaction;
        2. read the index again, as an earlier owner may have changed something until then. If the
           index is lost, empty it and begin at the newest low-water mark;
        3. commit a barrier. The last receipt is a witness, not a proof, so look for its messages at
           the places it names. The barrier proves ownership, and voids what was not found. Where a
           place cannot be read, only that request waits for it, and the shard opens;
        4. read the receipts up to the barrier and apply their removals. A rebuild keeps them in
           memory, and reads the requests once, from the mark on, without those that ended;
        5. read the requests that the index does not know yet, and those that arrived during the
           opening. So a cancel that was applied before is applied again before anything is
           delivered. When Redis has no room for them, what they cancel or replace is still removed.

        Raises RecoveryRequired when it cannot be finished: start over with a new index and writer.
        """
        self.confirm()  # 1
        self._load()  # `blackbox rebind` may be running, and would be fenced for nothing
        self.writer.open()
        checked = self.journal.receipt_bounds().end
        try:
            start = self._start()  # 2
        except IndexFull as full:
            raise RecoveryRequired(f"{self.shard}: {full}; it opens once Redis has room") from None
        binding = self.journal.binding(self.group)
        barrier = Receipt(
            self.now_ms(), gone=start.gone, read=start.positions.requests, topic_id=binding.topic_id,
            group=self.group, unknown_ms=start.unknown_before_ms or 0,
        )  # fmt: skip
        position, void = commit_barrier(  # 3
            self.shard, self.journal, self.writer, barrier, start.positions.receipts, checked
        )
        outcomes = self._outcomes(start, position)  # 4
        self._note_doubts(outcomes)
        judged = 0 if outcomes.unknown_ms else outcomes.judged
        went_back = judged > self.index.positions.requests
        if start.is_rebuild or went_back:
            self.index.judged_before(judged)
        if start.is_rebuild:
            self._rebuild(outcomes, position)
        else:
            self._settle(outcomes, position)
        self._catch_up()  # 5
        if went_back and self.index.positions.requests >= judged:
            self.index.judged_before(0)
        gone = start.gone[1] - start.gone[0] if start.gone else 0
        return Recovered(outcomes.count, void, gone, start.mark, binding)

    def _note_doubts(self, outcomes: Outcomes) -> None:
        """Note in the index which requests are in doubt, and which of these have no outcome after all."""
        if known := outcomes.undelivered.intersection(self.index.doubtful):
            settle(self.index, self.index.end_doubt(known), self.index.positions.receipts)
        if outcomes.doubtful:
            self.index.doubt(outcomes.doubtful)

    def _start(self) -> _Start:
        kept, binding, requests, receipts = self._load()
        since = 0 if kept is None else kept.positions.receipts
        if theirs := foreign_group(self.journal, binding.group, since):
            raise other_group(self.shard, theirs, binding.group)
        if kept is None:
            logger.info("%s: the index is empty, rebuilding it from the journals", self.shard)
            return self._begin(binding, requests, receipts)
        at = kept.positions
        is_behind = at.requests < requests.start or at.receipts < receipts.start
        if not kept.is_whole:
            logger.error(
                "%s: Redis lost a single key of the index; check that maxmemory-policy is "
                "noeviction and that the key was not deleted; rebuilding the index from the "
                "journals", self.shard,
            )  # fmt: skip
            return self._begin(binding, requests, receipts, kept)
        if is_behind and (kept.is_rebuilding or self._can_begin(requests, binding)):
            logger.warning(
                "%s: the index is at %s, but the journals begin at %d and %d: the records in "
                "between were removed; rebuilding it", self.shard, tuple(at), requests.start,
                receipts.start,
            )  # fmt: skip
            return self._begin(binding, requests, receipts, kept)
        self.index.take_over(binding, is_rebuild=kept.is_rebuilding)
        if kept.is_rebuilding:
            logger.info("%s: continuing a rebuild at %d", self.shard, at.requests)
            unknown_ms = kept.unknown_ms
            if not unknown_ms and kept.mark is None and at.receipts == receipts.start > 0:
                unknown_ms = self._first_receipt_ms(receipts)
            return _Start(at, True, None, kept.mark, unknown_ms or None)
        return self._keep(kept, requests, receipts)

    def _load(self) -> tuple[IndexMetadata | None, Binding, Bounds, Bounds]:
        """Read what the index and the journals say of themselves. Raises ForeignIndex if they do not match."""
        binding = self.journal.binding(self.group)
        requests, receipts = self.journal.request_bounds(), self.journal.receipt_bounds()
        kept = self.index.load()
        if kept is None:
            return kept, binding, requests, receipts
        if kept.binding is not None:
            check_binding(self.shard, kept.binding, binding)
        ends = Positions(requests.end, receipts.end)
        if kept.positions.requests > ends.requests or kept.positions.receipts > ends.receipts:
            raise shortened(self.shard, kept.positions, ends)
        if kept.tail is not None and is_another(self.journal, kept.tail):
            raise replaced(self.shard, kept.tail)
        return kept, binding, requests, receipts

    def _keep(self, kept: IndexMetadata, requests: Bounds, receipts: Bounds) -> _Start:
        """Keep an index; if the journals begin after its positions, it knows more than they do."""
        positions, gone = kept.positions, None
        if positions.receipts < receipts.start:
            before_ms = self._first_receipt_ms(receipts)
            count = self.index.outcome_unknown(before_ms, self.now_ms())
            logger.error(
                "%s: receipts %d to %d were removed before they were read; %d pending requests "
                "that may have been delivered become dead letters; keep receipts as long as the "
                "request topic", self.shard, positions.receipts, receipts.start - 1, count,
            )  # fmt: skip
            self.index.settle({}, receipts.start)
            positions = self.index.positions
        if positions.requests < requests.start:
            gone = positions.requests, requests.start
            logger.error(
                "%s: retention removed requests %d to %d before they were read; they are lost; set "
                "retention.ms=-1 on %s, so that only blackbox removes requests, once they have "
                "ended",
                self.shard, positions.requests, requests.start - 1, self.shard.topic,
            )  # fmt: skip
            self.index.lost_before(requests.start, requests.end)
            self.apply(Batch(positions.requests, requests.start, []), None)
            positions = self.index.positions
        return _Start(positions, False, gone, kept.mark, kept.unknown_ms or None)

    def _begin(
        self,
        binding: Binding,
        requests: Bounds,
        receipts: Bounds,
        kept: IndexMetadata | None = None,
    ) -> _Start:
        """Empty the index and begin it at the newest mark; without one, where the journals begin."""
        found = newest_mark(self.shard, self.journal, binding.topic_id)
        gone, unknown_ms = None, 0 if kept is None else kept.unknown_ms
        mark, told = found or (None, requests.end)
        judged = requests.end
        if mark is None:
            positions = Positions(requests.start, receipts.start)
            if receipts.start > 0:
                unknown_ms, judged = max(unknown_ms, self._first_receipt_ms(receipts)), 0
                logger.error(
                    "%s: receipts begin at %d, and no low-water mark is known; requests that may "
                    "have been delivered before become dead letters", self.shard, receipts.start,
                )  # fmt: skip
            elif not receipts.end and (read := self.journal.committed()) > requests.start:
                unknown_ms, judged = self.now_ms() + CLOCKS_APART_MS, 0
                logger.error(
                    "%s: the group %s has read requests up to %d, but %s.receipts is empty: it was "
                    "deleted or not copied. Requests that are due by now may have been delivered, "
                    "and become dead letters", self.shard, self.group, read, self.shard.topic,
                )  # fmt: skip
        else:
            positions = Positions(max(mark.requests, requests.start), mark.receipts)
            if mark.requests < requests.start:
                gone = mark.requests, requests.start
                logger.error(
                    "%s: retention removed requests %d to %d while some of them were pending; "
                    "these are lost; set retention.ms=-1 on %s",
                    self.shard, *gone, self.shard.topic,
                )  # fmt: skip
        self.index.begin(
            positions, binding=binding, mark=mark, told=told, judged=judged, unknown_ms=unknown_ms,
            is_rebuild=True,
        )  # fmt: skip
        return _Start(positions, True, gone, mark, unknown_ms or None)

    def _can_begin(self, requests: Bounds, binding: Binding) -> bool:
        """Whether a mark covers all that is pending. If not, the index may know more than the journals."""
        found = newest_mark(self.shard, self.journal, binding.topic_id)
        return found is not None and found[0].requests >= requests.start

    def _first_receipt_ms(self, receipts: Bounds) -> int:
        """The time before which outcomes may be gone, allowing for a difference between clocks."""
        first = next(iter(self.journal.receipts(receipts.start, receipts.end)), None)
        return (first[1].at_ms if first else self.now_ms()) + CLOCKS_APART_MS

    def _outcomes(self, start: _Start, position: int) -> Outcomes:
        outcomes = Outcomes(start.unknown_before_ms or 0 if start.is_rebuild else 0)
        for _, receipt in settled(self.journal.receipts(start.positions.receipts, position)):
            outcomes.add(receipt)
        return outcomes

    def _rebuild(self, outcomes: Outcomes, position: int) -> None:
        """Read the requests once, then end the rebuild in one MULTI."""
        first, bounds = self.index.positions.requests, self.journal.request_bounds()
        remove_ended(self.index, outcomes.ended)
        if outcomes.ignored:
            self.index.ignore([offset for offset in outcomes.ignored if offset >= first])
        opening = Rebuild(outcomes.ended, outcomes.unknown_ms or None, outcomes.too_late)
        try:
            for batch in self.journal.requests(first, bounds.end, outcomes.ended):
                self.progress(batch.end - first, bounds.end - first)
                if not self.has_room():
                    raise IndexFull("Redis is nearly full")
                self.apply(batch, opening)
        except IndexFull as full:
            # a later read of the rest would not know about unknown outcomes
            if outcomes.unknown_ms:
                why = f"{self.shard}: {full}; it opens once Redis has room"
                raise RecoveryRequired(why) from None
            self._leave_backlog(full, bounds.end, outcomes.ended, outcomes.too_late)
        self.index.finish(position, outcomes.ended)

    def _settle(self, outcomes: Outcomes, position: int) -> None:
        """Remove what has ended since from an index that is kept."""
        unread = self.index.positions.requests
        if late := [offset for offset in outcomes.too_late if offset >= unread]:
            self.index.ignore(late)
        settle(self.index, outcomes.ended, position)

    def _catch_up(self) -> None:
        """Read until the end was seen within `RECENT_S`, unless requests arrive faster than they are read."""
        took_s = math.inf
        while True:
            before_s, began = took_s, time.monotonic()
            if not self._read_to_the_end():
                return
            took_s = time.monotonic() - began
            if took_s < RECENT_S or took_s >= before_s:
                return

    def _read_to_the_end(self) -> bool:
        """Read the requests up to their current end; return whether Redis had room for all."""
        bounds = self.journal.request_bounds()
        try:
            for batch in self.journal.requests(self.index.positions.requests, bounds.end):
                if not self.has_room():
                    raise IndexFull("Redis is nearly full")
                self.apply(batch, None)
        except IndexFull as full:
            self._leave_backlog(full, bounds.end, OffsetSet(), OffsetSet())
            return False
        return True

    def _leave_backlog(
        self, full: IndexFull, end: int, ended: OffsetSet, too_late: OffsetSet
    ) -> None:
        """Remove pending requests that are ended by requests which stay in Kafka for now."""
        logger.warning("%s: %s; opening with a backlog still in Kafka", self.shard, full)
        for batch in self.journal.requests(self.index.positions.requests, end):
            for upcoming in self.ahead(batch):
                end_ahead(self.index, upcoming, ended, too_late)
