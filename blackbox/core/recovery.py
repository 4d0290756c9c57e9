"""The third verb, recovery: make an index agree with the journals, and take the shard over."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from blackbox.core.barrier import commit_barrier
from blackbox.core.index_preparation import IndexPreparation, StartingPoint
from blackbox.core.intake import Taken
from blackbox.core.outcomes import Outcomes
from blackbox.core.plan import Batch, Binding
from blackbox.core.ports import Journal, RecoveryIndex, Writer
from blackbox.core.rebuild import Rebuild
from blackbox.core.settling import apply_outcomes, end_by_upcoming, remove_ended
from blackbox.core.upcoming import Upcoming
from blackbox.records.errors import IndexFull, RecoveryRequired
from blackbox.records.receipt import Mark, Receipt, without_void
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.core.recovery")

# A shard that opens has read every cancel that was written at least this long before.
RECENT_S = 1.0

NO_BINDING = Binding("", "", "", "")


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of opening a shard: outcomes applied, messages found missing, requests lost to retention.

    `mark` is the last low-water mark, `binding` what the index belongs to.
    """

    outcomes: int
    missing: int
    gone: int
    mark: Mark | None = None
    binding: Binding = NO_BINDING


@dataclass(frozen=True, slots=True)
class Recovery:
    """Opens one shard for its owner. `confirm` raises RecoveryRequired unless the shard is still the owner's.

    `upcoming` returns what the records of a batch ask for, cancel or carry on, by caller ids and ids.
    `has_room` is False while Redis is so full that requests are to be left in Kafka.
    """

    shard: Shard
    group: str
    index: RecoveryIndex
    journal: Journal
    writer: Writer
    confirm: Callable[[], None]
    apply: Callable[[Batch, Rebuild | None], Taken]
    upcoming: Callable[[Batch], Iterable[Upcoming]]
    now_ms: Callable[[], int]
    has_room: Callable[[], bool] = lambda: True
    progress: Callable[[int, int], None] = lambda read, end: None

    def open(self) -> Recovered:
        """Take the shard over, when an owner gets it and whenever recovery is required.

        The steps R1 to R5 are those of `docs/how-it-works.md`. A crash after any of them leaves a
        correct position. Raises RecoveryRequired when it cannot be finished: start over with a new
        index and writer.
        """
        # Ask the group first: else a former owner and the current one fence each other in turn.
        self.confirm()  # R1
        preparation = IndexPreparation(
            self.shard, self.group, self.index, self.journal, self.now_ms,
            has_markers=self.writer.exactly_once,
        )  # fmt: skip
        preparation.load()  # `blackbox rebind` may be running, and would be fenced for nothing
        # Fence before any receipt is read: an earlier owner may commit receipts until then. Its open
        # transaction is aborted.
        self.writer.open()
        # read before `prepare` checks the groups: the barrier checks later receipts
        checked = self.journal.receipt_bounds().end
        try:
            # Reads the index again: an earlier owner may have changed it until it was fenced.
            start = preparation.prepare()  # R2, except the check of the last receipt
        except IndexFull as full:
            raise RecoveryRequired(f"{self.shard}: {full}; it opens once Redis has room") from None
        binding = self.journal.binding(self.group)
        barrier = Receipt(
            self.now_ms(), gone=start.gone, read=start.positions.requests, topic_id=binding.topic_id,
            group=self.group, unknown_ms=start.unknown_before_ms or 0,
        )  # fmt: skip
        # The last receipt proves nothing yet: its owner may have died during the commit.
        position, void = commit_barrier(  # the rest of R2, and R3
            self.shard, self.journal, self.writer, barrier, start.positions.receipts, checked
        )
        outcomes = self._outcomes(start, position)  # R4: read; removed below
        self._note_doubts(outcomes)
        judged = 0 if outcomes.unknown_ms else outcomes.judged
        # Redis went back: rules do not judge again the requests that they have judged
        went_back = judged > self.index.positions.requests
        if start.is_rebuild or went_back:
            self.index.judged_before(judged)
        if start.is_rebuild:
            self._rebuild(outcomes, position)
        else:
            self._apply_outcomes(outcomes, position)  # R4
        # before any delivery: a cancel may have taken effect before Redis went back
        self._catch_up(outcomes)  # R5
        if went_back and self.index.positions.requests >= judged:
            self.index.judged_before(0)
        gone = start.gone[1] - start.gone[0] if start.gone else 0
        return Recovered(outcomes.count, void, gone, start.mark, binding)

    def _note_doubts(self, outcomes: Outcomes) -> None:
        """Note in the index which requests are in doubt, and which of these have no outcome after all."""
        if known := outcomes.undelivered.intersection(self.index.doubtful):
            apply_outcomes(self.index, self.index.end_doubt(known), self.index.positions.receipts)
        if outcomes.doubtful:
            self.index.mark_doubtful(outcomes.doubtful)

    def _outcomes(self, start: StartingPoint, position: int) -> Outcomes:
        outcomes = Outcomes(start.unknown_before_ms or 0 if start.is_rebuild else 0)
        for _, receipt in without_void(self.journal.receipts(start.positions.receipts, position)):
            outcomes.add(receipt)
        return outcomes

    def _rebuild(self, outcomes: Outcomes, position: int) -> None:
        """Read the requests once, then end the rebuild."""
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
            self._leave_backlog(full, bounds.end, outcomes)
        # position and `skip` in one MULTI: a crash between them would forget what has ended
        self.index.finish(position, outcomes.ended)

    def _apply_outcomes(self, outcomes: Outcomes, position: int) -> None:
        """Remove what earlier owners delivered from an index that is kept: it is not sent again."""
        unread = self.index.positions.requests
        if late := [offset for offset in outcomes.too_late if offset >= unread]:
            self.index.ignore(late)
        apply_outcomes(self.index, outcomes.ended, position)

    def _catch_up(self, outcomes: Outcomes) -> None:
        """Read until the end was seen within `RECENT_S`."""
        took_s = math.inf
        while True:
            before_s, began = took_s, time.monotonic()
            if not self._read_to_the_end(outcomes):
                return
            took_s = time.monotonic() - began
            # not less than before: requests arrive faster than they are read
            if took_s < RECENT_S or took_s >= before_s:
                return

    def _read_to_the_end(self, outcomes: Outcomes) -> bool:
        """Read the requests up to their current end; return whether Redis had room for all."""
        bounds = self.journal.request_bounds()
        try:
            for batch in self.journal.requests(self.index.positions.requests, bounds.end):
                if not self.has_room():
                    raise IndexFull("Redis is nearly full")
                self.apply(batch, None)
        except IndexFull as full:
            self._leave_backlog(full, bounds.end, outcomes)
            return False
        return True

    def _leave_backlog(self, full: IndexFull, end: int, outcomes: Outcomes) -> None:
        """Remove pending requests that are ended by requests which stay in Kafka for now."""
        # else they would be delivered before their cancels and replacements are read
        logger.warning("%s: %s; opening with a backlog still in Kafka", self.shard, full)
        for batch in self.journal.requests(self.index.positions.requests, end):
            # The outcomes of an earlier opening are not read again: the index remembers what ended nothing.
            known = self.index.ignored([one.offset for one in batch.records])
            known.update(o.offset for o in batch.records if outcomes.was_refused(o.offset))
            refused = [one for one in batch.records if one.offset in known]
            others = [one for one in batch.records if one.offset not in known]
            for one in self.upcoming(batch._replace(records=refused)):
                if one.ending:
                    self.index.ignore(one.ending)  # until they are read
            for one in self.upcoming(batch._replace(records=others)):
                end_by_upcoming(self.index, one, outcomes.ended)
