"""The low-water mark: from where on the journals of a shard are still needed.

A rebuild of a lost index reads the journals from the mark on. So the mark is written to Kafka, in a
receipt, and what is below it is removed only after that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from blackbox.core.plan import Positions
from blackbox.core.ports import LowWaterIndex, Writer
from blackbox.core.settlement import Settlement
from blackbox.records.receipt import Mark, Receipt
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.core.low_water")

# Pairs of positions per mark. With more of them, receipts could be removed a little earlier.
PAIRS = 32

IGNORED_PER_RECEIPT = 10_000  # some 120 kB


@dataclass(slots=True)
class LowWater:
    """The marks of one shard, from one opening to the next recovery; `last` is the newest one."""

    shard: Shard
    index: LowWaterIndex
    writer: Writer
    now_ms: Callable[[], int]
    topic_id: str = ""
    last: Mark | None = None
    walked: int = -1
    group: str = ""

    def write(self, walked: Positions, lowest: int) -> Mark:
        """Record that requests below `lowest` have ended, as found by a walk that began at `walked`.

        Nothing is written if no request was added and the mark did not move. Raises
        RecoveryRequired as any commit does.
        """
        mark = next_mark(self.last, walked, lowest)
        is_same = self.last is not None and mark.requests == self.last.requests
        if self.last is not None and is_same and walked.requests == self.walked:
            return self.last
        is_complete = False
        while not is_complete:
            # A rebuild from the mark cannot judge conditional records again: the requests that they
            # name may be below the mark. So receipts record which of them did not count.
            position, ignored = self.index.unrecorded(IGNORED_PER_RECEIPT)
            is_complete = len(ignored) < IGNORED_PER_RECEIPT
            # The mark comes last: its receipt says that all verdicts below its `read` are recorded.
            written = mark if is_complete else None
            self.writer.begin()
            receipt = Receipt(
                self.now_ms(), read=position, ignored=ignored, mark=written,
                topic_id=self.topic_id, group=self.group,
            )  # fmt: skip
            receipts = self.writer.commit(receipt)
            # After the commit: this removes the verdicts from the index.
            self.index.settle(Settlement({}, receipts, recorded=ignored, mark=written))
        self.last, self.walked = mark, walked.requests
        return mark


def next_mark(last: Mark | None, walked: Positions, lowest: int) -> Mark:
    """The mark that follows from a walk. It never goes back."""
    before = last or Mark(0, 0)
    requests = max(lowest, before.requests)
    pairs = sorted({*map(tuple, before.pairs), tuple(walked)})
    # Receipts below the second position of a pair name only requests below its first one, so
    # the receipts that are needed begin at the last pair that is not above the mark.
    behind = [pair for pair in pairs if pair[0] <= requests]
    receipts = max([before.receipts, *(pair[1] for pair in behind)])
    later = [pair for pair in pairs if pair[0] > requests]
    while len(later) > PAIRS:
        # The first and the last pair stay. The pair with the closest neighbours is missed least.
        gaps = [after[0] - first[0] for first, after in zip(later, later[2:], strict=False)]
        del later[1 + gaps.index(min(gaps))]
    return Mark(requests, receipts, [(at, there) for at, there in later])
