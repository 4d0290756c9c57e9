"""The outcomes in a range of receipts, kept in memory while a shard is opened."""

from __future__ import annotations

from itertools import chain

from blackbox.core.offset_set import OffsetSet
from blackbox.records.receipt import Claim, Receipt


class Outcomes:
    """The sum of receipts that are added in order; `count` is the number of outcomes in them.

    `ended` have an outcome. `doubtful` may have one, at a place that could not be read.
    `undelivered` were found to have none. `ignored` are conditional records that did not count.
    `too_late` ended nothing: invalid records, and replacements by id that came too late. Requests below `judged`
    were judged by callers' rules. A request that was due before `unknown_ms` and has no outcome may have had one
    that is gone.
    """

    def __init__(self, unknown_ms: int = 0) -> None:
        self.ended, self.too_late = OffsetSet(), OffsetSet()
        self.ignored: list[int] = []
        self._doubtful: dict[int, Claim] = {}
        self.undelivered: set[int] = set()
        self.count = self.judged = 0
        self.unknown_ms = unknown_ms

    def add(self, receipt: Receipt) -> None:
        self.count += self.ended.add(receipt.removals())
        self.ignored += receipt.ignored
        # `invalid` too: a replacement that came too late became a dead letter
        self.too_late.add(chain(receipt.ignored, receipt.invalid))
        # before `doubtful`: a barrier lists requests in doubt in both
        for offset in receipt.void:
            self._doubtful.pop(offset, None)
            self.undelivered.add(offset)
        for claim in receipt.doubtful:
            self._doubtful[claim.offset] = claim
            self.undelivered.discard(claim.offset)
        self.judged = max(self.judged, receipt.read)
        self.unknown_ms = max(self.unknown_ms, receipt.unknown_ms)
        # last: this receipt, too, is about the requests that the log lost
        for first in receipt.cut:
            self._forget_from(first)

    def was_refused(self, offset: int) -> bool:
        """Whether this record became a dead letter without ending anything, even if it would be valid now."""
        return offset in self.too_late and offset in self.ended

    @property
    def doubtful(self) -> dict[int, Claim]:
        return {o: claim for o, claim in self._doubtful.items() if o not in self.ended}

    def _forget_from(self, first: int) -> None:
        """Forget all from this offset on: other records are there now."""
        self.ended.forget_from(first)
        self.too_late.forget_from(first)
        self.ignored = [offset for offset in self.ignored if offset < first]
        self._doubtful = {o: claim for o, claim in self._doubtful.items() if o < first}
        self.undelivered = {o for o in self.undelivered if o < first}
        self.judged = min(self.judged, first)
