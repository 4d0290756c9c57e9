"""The third verb: make an index say again what the journals say, and take the shard over."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from blackbox.doubt import Doubt, IndexFull
from blackbox.intake import Taken
from blackbox.plan import Batch, Labels, Named, Touched
from blackbox.receipt import DOUBTFUL, Receipt, settled
from blackbox.request import Shard

logger = logging.getLogger("blackbox.recovery")

CHUNK = 5000
TAIL = 100
ROUNDS = DOUBTFUL - 2
RECENT_S = 1.0
"""A shard that opens has read every cancel that was written so long before."""


class Bounds(Protocol):
    """First offset kept, and the next offset to be committed."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class Index(Protocol):
    """What recovery needs of a shard's index."""

    @property
    def labels(self) -> Labels: ...
    def load(self) -> Labels | None: ...
    def begin(self, labels: Labels, judged: int) -> None: ...
    def judged_before(self, judged: int) -> None: ...
    def lost_before(self, first: int) -> None: ...
    def settle(self, removals: Mapping[int, str | None], receipts: int) -> None: ...
    def caller_ids(self, offsets: Sequence[int]) -> dict[int, str | None]: ...
    def holders(self, caller_ids: Sequence[str]) -> dict[str, int]: ...
    def named(self, ids: Sequence[str]) -> dict[str, Named]: ...


class Writer(Protocol):
    """What recovery needs of the shard's new producer."""

    def open(self) -> None: ...
    def begin(self) -> None: ...
    def commit(self, receipt: Receipt) -> int: ...


class Receipts(Protocol):
    """What a barrier needs of the journals."""

    def receipt_bounds(self) -> Bounds: ...
    def receipts(self, start: int, end: int) -> Iterator[tuple[int, Receipt]]: ...
    def missing(self, receipts: Sequence[Receipt]) -> list[int]: ...


class Journal(Receipts, Protocol):
    """What recovery needs of the journals."""

    def request_bounds(self) -> Bounds: ...
    def requests(self, start: int, end: int) -> Iterator[Batch]: ...


@dataclass(frozen=True, slots=True)
class Recovered:
    """What opening a shard did: outcomes applied, outcomes found void, requests lost to retention."""

    outcomes: int
    void: int
    gone: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """Opens one shard for its owner. `confirm` raises a Doubt unless the shard is still ours.

    `names` tells what the records of a batch ask for or cancel, by caller ids and ids.
    """

    shard: Shard
    index: Index
    journal: Journal
    writer: Writer
    confirm: Callable[[], None]
    apply: Callable[[Batch], Taken]
    names: Callable[[Batch], Touched]
    now_ms: Callable[[], int]

    def open(self) -> Recovered:
        """Take the shard over, when an owner gets it and after every doubt.

        1. still the owner? then fence every earlier one, and settle its open transaction;
        2. read the end of the receipts: the last one is a witness, not a proof, so look for its
           messages at the places it names;
        3. commit a barrier: it proves ownership, and voids what was not found;
        4. read the receipts up to the barrier and apply their removals; a record that came in
           between is doubtful as well: go round again;
        5. read the requests that the index does not know yet, and those that came meanwhile: a
           cancel that was applied before is applied again before anything is delivered. When Redis
           has no room for them, what they cancel or replace is removed all the same.

        Raises a Doubt when it cannot be finished: start over with a new index and writer.
        """
        self.confirm()  # 1
        self.writer.open()
        labels, gone, is_new = self._start()
        label, void = commit_barrier(  # 2, 3
            self.shard, self.journal, self.writer, self.now_ms, labels, gone
        )
        applied, judged = self._apply_receipts(labels.receipts, label, is_new=is_new)  # 4
        self._catch_up()  # 5
        if judged is not None and self.index.labels.requests >= judged:
            self.index.judged_before(0)
        return Recovered(applied, void, gone[1] - gone[0] if gone else 0)

    def _start(self) -> tuple[Labels, tuple[int, int] | None, bool]:
        requests, receipts = self.journal.request_bounds(), self.journal.receipt_bounds()
        labels = self.index.load()
        if labels is None:
            logger.info("%s: the index is empty, rebuilding it from the journals", self.shard)
            self.index.begin(Labels(requests.start, receipts.start), requests.end)
            return self.index.labels, None, True
        self._check_ahead(labels, requests, receipts)
        if labels.receipts < receipts.start:
            logger.error(
                "%s: receipts %d to %d were removed by retention before they were read: their "
                "requests may be delivered again; keep receipts as long as the request topic",
                self.shard, labels.receipts, receipts.start - 1,
            )  # fmt: skip
        if labels.requests >= requests.start:
            return labels, None, False
        logger.error(
            "%s: requests %d to %d were removed by retention before they were read: they are lost; "
            "set retention.ms of %s above the longest countdown plus the longest outage",
            self.shard, labels.requests, requests.start - 1, self.shard.topic,
        )  # fmt: skip
        return labels, (labels.requests, requests.start), False

    def _check_ahead(self, labels: Labels, requests: Bounds, receipts: Bounds) -> None:
        if labels.requests > requests.end or labels.receipts > receipts.end:
            raise Doubt(
                f"{self.shard}: the index is at {labels}, beyond the journals' ends "
                f"({requests.end}, {receipts.end}); were the topics deleted and created anew? Then "
                f"stop the service, delete the receipts topic too, then the keys blackbox:"
                f"{{{self.shard}}}:*, and start it: old receipts would end new requests"
            )

    def _apply_receipts(self, start: int, label: int, *, is_new: bool) -> tuple[int, int | None]:
        """How many outcomes there were; up to where rules judge nothing again, if that is not the label."""
        count = judged = 0
        start = max(start, self.journal.receipt_bounds().start)
        for reached, removed, read in _chunked(settled(self.journal.receipts(start, label))):
            known = self.index.caller_ids(removed)
            self.index.settle({offset: known.get(offset) for offset in removed}, reached)
            count += len(removed)
            judged = max(judged, read)
        if self.index.labels.receipts != label:
            self.index.settle({}, label)
        if not is_new and judged <= self.index.labels.requests:
            return count, None
        self.index.judged_before(judged)  # it was lost, or went back
        return count, judged

    def _catch_up(self) -> None:
        """Until the end was looked at a moment ago, unless requests come in faster than they are read."""
        took_s = math.inf
        while True:
            before_s, began = took_s, time.monotonic()
            self._read_to_the_end()
            took_s = time.monotonic() - began
            if took_s < RECENT_S or took_s >= before_s:
                return

    def _read_to_the_end(self) -> None:
        bounds = self.journal.request_bounds()
        try:
            if self.index.labels.requests < bounds.start:
                self.index.lost_before(bounds.start)
                self.apply(Batch(self.index.labels.requests, bounds.start, []))
            for batch in self.journal.requests(self.index.labels.requests, bounds.end):
                self.apply(batch)
        except IndexFull as full:
            logger.warning("%s: %s; opening with a backlog still in Kafka", self.shard, full)
            self._end_ahead(bounds.end)

    def _end_ahead(self, end: int) -> None:
        for batch in self.journal.requests(self.index.labels.requests, end):
            named = self.names(batch)
            holders = self.index.holders(named.caller_ids)
            ended = self.index.caller_ids(list(holders.values()))  # without those of the cold tier
            by_id = self.index.named(named.ids).values()
            ended |= {one.offset: one.caller_id for one in by_id if one.is_pending}
            if ended:
                self.index.settle(ended, self.index.labels.receipts)


def commit_barrier(
    shard: Shard,
    journal: Receipts,
    writer: Writer,
    now_ms: Callable[[], int],
    labels: Labels,
    gone: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """The label that a new owner's barrier reaches, and how many outcomes it voids.

    The owner's index is at `labels`, and it has opened its writer. Raises a Doubt when
    others keep writing receipts.
    """
    void, start = 0, labels.receipts
    for attempt in range(ROUNDS):
        bounds = journal.receipt_bounds()
        end = bounds.end
        tail = _tail(journal, max(start, bounds.start), end)
        newest = tail[-1:] if attempt == 0 else tail
        missing = journal.missing([r for _, r in newest if not r.barrier])
        if missing:
            logger.warning(
                "%s: the last receipt names %d messages that are not there; they stay pending",
                shard, len(missing),
            )  # fmt: skip
        void += len(missing)
        barrier = Receipt(
            at_ms=now_ms(), void=missing, barrier=True, gone=gone, read=labels.requests
        )
        writer.begin()
        label = writer.commit(barrier)
        start = end
        if [at for at, _ in journal.receipts(end, label)] == [label - 1]:
            return label, void
    raise Doubt(f"{shard}: other owners kept writing receipts; starting over")


def _tail(journal: Receipts, start: int, end: int) -> list[tuple[int, Receipt]]:
    """The last receipts; further back where there are none, as aborted ones leave only gaps."""
    length = TAIL
    while True:
        first = max(start, end - length)
        tail = list(journal.receipts(first, end))
        if tail or first == start:
            return tail
        length *= 10


def _chunked(
    receipts: Iterable[tuple[int, Receipt]],
) -> Iterator[tuple[int, list[int], int]]:
    """Removals of many receipts at once, each time with the label they reach and the requests read by then."""
    removed: list[int] = []
    read, offset = 0, -1
    for offset, receipt in receipts:
        removed.extend(receipt.removals())
        read = max(read, receipt.read)
        if len(removed) >= CHUNK:
            yield offset + 1, removed, read
            removed = []
    if offset >= 0:
        yield offset + 1, removed, read
