"""The checks of recovery's first step, and its second step: keep the index, or empty it to rebuild it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from blackbox.core.plan import Binding, Bounds, IndexMetadata, Positions
from blackbox.core.ports import Journal, PreparationIndex
from blackbox.core.receipt_history import (
    check_binding,
    foreign_group,
    is_another,
    newest_mark,
    other_group,
    replaced,
    shortened,
)
from blackbox.core.settlement import Settlement
from blackbox.records.clock import CLOCKS_APART_MS
from blackbox.records.errors import ForeignIndex
from blackbox.records.receipt import Mark
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.core.recovery")


class StartingPoint(NamedTuple):
    """Where an opening begins to read, and what it found out before.

    Requests that were due before `unknown_before_ms` may have had an outcome that is gone.
    """

    positions: Positions
    is_rebuild: bool = False
    gone: tuple[int, int] | None = None
    mark: Mark | None = None
    unknown_before_ms: int | None = None


def joined(earlier: tuple[int, int] | None, removed: tuple[int, int]) -> tuple[int, int]:
    """The requests that retention removed, with those that no opening has reported yet."""
    first, end = removed if earlier is None else earlier
    return min(first, removed[0]), max(end, removed[1])


@dataclass(frozen=True, slots=True)
class IndexPreparation:
    """Prepares the index of one shard for the reading of its journals; the fields are those of Recovery.

    `has_markers`: each receipt is the last record of a transaction, and a marker follows it.
    """

    shard: Shard
    group: str
    index: PreparationIndex
    journal: Journal
    now_ms: Callable[[], int]
    has_markers: bool

    def prepare(self) -> StartingPoint:
        """Keep the index or empty it. Raises ForeignIndex if it belongs to something else."""
        kept, binding, requests, receipts = self.load()
        since = 0 if kept is None else kept.positions.receipts
        if theirs := foreign_group(self.journal, binding.group, since):
            raise other_group(self.shard, theirs, binding.group)
        if kept is None:
            logger.info("%s: the index is empty, rebuilding it from the journals", self.shard)
            return self._empty(binding, requests, receipts)
        at = kept.positions
        is_behind = at.requests < requests.start or at.receipts < receipts.start
        if not kept.is_whole:
            logger.error(
                "%s: Redis lost a single key of the index; check that maxmemory-policy is "
                "noeviction and that the key was not deleted; rebuilding the index from the "
                "journals", self.shard,
            )  # fmt: skip
            return self._empty(binding, requests, receipts, kept)
        # Without such a mark, the index may know more than the journals, and is kept.
        if is_behind and (kept.is_rebuilding or self._mark_covers_pending(requests, binding)):
            logger.warning(
                "%s: the index is at %s, but the journals begin at %d and %d: the records in "
                "between were removed; rebuilding it", self.shard, tuple(at), requests.start,
                receipts.start,
            )  # fmt: skip
            return self._empty(binding, requests, receipts, kept)
        self.index.take_over(binding, is_rebuild=kept.is_rebuilding)
        if kept.is_rebuilding:
            logger.info("%s: continuing a rebuild at %d", self.shard, at.requests)
            unknown_ms = kept.unknown_ms
            if not unknown_ms and kept.mark is None and at.receipts == receipts.start > 0:
                unknown_ms = self._first_receipt_ms(receipts)
            return StartingPoint(at, True, kept.gone, kept.mark, unknown_ms or None)
        return self._keep(kept, requests, receipts)

    def load(self) -> tuple[IndexMetadata | None, Binding, Bounds, Bounds]:
        """Read what the index and the journals say of themselves. Raises ForeignIndex if they do not match."""
        binding = self.journal.binding(self.group)
        requests, receipts = self.journal.request_bounds(), self.journal.receipt_bounds()
        kept = self.index.load()
        if kept is None:
            self._check_earlier(binding)
            return kept, binding, requests, receipts
        if kept.binding is not None:
            check_binding(self.shard, kept.binding, binding)
        ends = Positions(requests.end, receipts.end)
        if kept.positions.requests > ends.requests or kept.positions.receipts > ends.receipts:
            raise shortened(self.shard, kept.positions, ends)
        # if callers have written past the old end, the end offset does not show the loss
        if kept.tail is not None and is_another(self.journal, kept.tail):
            raise replaced(self.shard, kept.tail)
        return kept, binding, requests, receipts

    def _check_earlier(self, ours: Binding) -> None:
        """Check that an index that counts as empty may be emptied: it may be the only place of its requests."""
        if self.index.earlier_binding is not None:
            try:
                check_binding(self.shard, self.index.earlier_binding, ours)
            except ForeignIndex as foreign:
                raise type(foreign)(
                    f"{foreign}. An earlier version of blackbox wrote this index: rebind it with "
                    "that version, or delete its keys in Redis if its requests are not needed"
                ) from None

    def _keep(self, kept: IndexMetadata, requests: Bounds, receipts: Bounds) -> StartingPoint:
        """Keep an index, even if the journals begin after its positions."""
        positions, gone = kept.positions, kept.gone
        if positions.receipts < receipts.start:
            # a position above 0 is that of the marker behind the last receipt that was read
            is_at_marker = self.has_markers and positions.receipts > 0
            first_unread = positions.receipts + is_at_marker
            if first_unread < receipts.start:
                self._end_unknown(first_unread, receipts)
            self.index.settle(Settlement({}, receipts.start))
            positions = self.index.positions
        if positions.requests < requests.start:
            gone = joined(gone, (positions.requests, requests.start))
            logger.error(
                "%s: retention removed requests %d to %d before they were read; they are lost; set "
                "retention.ms=-1 on %s, so that only blackbox removes requests, once they have "
                "ended",
                self.shard, positions.requests, requests.start - 1, self.shard.topic,
            )  # fmt: skip
            self.index.lost_before(requests.start, requests.end, gone)
            positions = self.index.positions
        return StartingPoint(positions, False, gone, kept.mark, kept.unknown_ms or None)

    def _end_unknown(self, first: int, receipts: Bounds) -> None:
        """Make dead letters of what may have an outcome in the receipts from `first` on, which are gone."""
        count = self.index.outcome_unknown(self._first_receipt_ms(receipts), self.now_ms())
        logger.error(
            "%s: receipts %d to %d were removed before they were read; %d pending requests "
            "that may have been delivered become dead letters; keep receipts as long as the "
            "request topic", self.shard, first, receipts.start - 1, count,
        )  # fmt: skip

    def _empty(
        self,
        binding: Binding,
        requests: Bounds,
        receipts: Bounds,
        kept: IndexMetadata | None = None,
    ) -> StartingPoint:
        """Empty the index and begin it at the newest mark; without one, where the journals begin."""
        found = newest_mark(self.shard, self.journal, binding.topic_id)
        gone, unknown_ms = (None, 0) if kept is None else (kept.gone, kept.unknown_ms)
        # without a mark: conditional records that name removed requests are assumed to have counted
        mark, verdicts_below = found or (None, requests.end)
        judged = requests.end
        if mark is None:
            positions = Positions(requests.start, receipts.start)
            # the first receipt of a new topic is at offset 0, so earlier ones were removed
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
                gone = joined(gone, (mark.requests, requests.start))
                logger.error(
                    "%s: retention removed requests %d to %d while some of them were pending; "
                    "these are lost; set retention.ms=-1 on %s",
                    self.shard, mark.requests, requests.start - 1, self.shard.topic,
                )  # fmt: skip
        self.index.begin(
            positions, binding=binding, mark=mark, verdicts_below=verdicts_below, judged=judged, unknown_ms=unknown_ms,
            gone=gone, is_rebuild=True,
        )  # fmt: skip
        return StartingPoint(positions, True, gone, mark, unknown_ms or None)

    def _mark_covers_pending(self, requests: Bounds, binding: Binding) -> bool:
        """Whether a mark covers all that is pending."""
        found = newest_mark(self.shard, self.journal, binding.topic_id)
        return found is not None and found[0].requests >= requests.start

    def _first_receipt_ms(self, receipts: Bounds) -> int:
        """The time before which outcomes may be gone, allowing for a difference between clocks."""
        first = next(iter(self.journal.receipts(receipts.start, receipts.end)), None)
        return (first[1].at_ms if first else self.now_ms()) + CLOCKS_APART_MS
