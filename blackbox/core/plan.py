"""The values that pass between the verbs, the index and the journals.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

from blackbox.records.entry import Entry
from blackbox.records.receipt import Claim, Mark
from blackbox.records.request import Cancel, Record, Request


class Positions(NamedTuple):
    """The two offsets that define an index, the next one of each journal to be read."""

    requests: int
    receipts: int


class Bounds(NamedTuple):
    """The first offset that a journal keeps and the next one to be committed; or the bounds of a part."""

    start: int
    end: int

    def from_the_end(self, length: int) -> Iterator[Bounds]:
        """Split into parts, the last one first, each ten times as long as the one before."""
        end = self.end
        while end > self.start:
            first = max(self.start, end - length)
            yield Bounds(first, end)
            end, length = first, length * 10


def stretches(offsets: Iterable[int], far_apart: int) -> Iterator[Bounds]:
    """The ranges that cover some sorted offsets, split where two offsets are far apart."""
    first = last = -1
    for offset in offsets:
        if first >= 0 and offset - last > far_apart:
            yield Bounds(first, last + 1)
            first = -1
        if first < 0:
            first = offset
        last = offset
    if first >= 0:
        yield Bounds(first, last + 1)


class Binding(NamedTuple):
    """The cluster, the incarnations of the two topics, and the group that an index belongs to."""

    cluster_id: str
    topic_id: str
    receipts_id: str
    group: str


UNKNOWN_EPOCH = -1


class Tail(NamedTuple):
    """A record that was read, to recognise it later: Kafka may have lost it and put another in its place.

    `epoch` is the partition's leader epoch when it was written, UNKNOWN_EPOCH if it was not read.
    """

    offset: int
    timestamp_ms: int
    checksum: int
    epoch: int = UNKNOWN_EPOCH

    @classmethod
    def of(cls, record: Record, epoch: int = UNKNOWN_EPOCH) -> Tail:
        return cls(record.offset, record.timestamp_ms, crc32(record.value or b""), epoch)

    def is_of(self, record: Record) -> bool:
        return Tail.of(record, self.epoch) == self

    def may_be_lost(self, epoch: int) -> bool:
        """Whether it may be gone, given the leader epoch of a record that was read after it."""
        # Under one leader epoch a log only grows. Brokers that report no epoch are trusted, as
        # opening a shard always checks the record itself.
        return epoch not in (self.epoch, UNKNOWN_EPOCH)


class IndexMetadata(NamedTuple):
    """The metadata of an index, read when it is opened.

    `is_whole`: no single key was lost. `is_rebuilding`: a rebuild from the journals was
    interrupted. `mark` is the last low-water mark that its owner wrote, `tail` the last request
    record that was read. `unknown_ms`: requests that were due before this may have had an outcome
    that is in no receipt. `gone` are requests that retention removed, [from, up to], and that no
    opening has reported yet. `token` is new with each opening.
    """

    positions: Positions
    is_whole: bool = True
    is_rebuilding: bool = False
    binding: Binding | None = None
    mark: Mark | None = None
    tail: Tail | None = None
    unknown_ms: int = 0
    gone: tuple[int, int] | None = None
    token: str = ""


class Batch(NamedTuple):
    """The result of one read of a request topic: the records of the offsets `start` to `end` - 1.

    `start` is the position that was read from, not the first record's offset. `epochs` are the
    leader epochs of the first and the last record.
    """

    # control records, aborted transactions and compaction leave fewer records than offsets
    start: int
    end: int
    records: Sequence[Record]
    epochs: tuple[int, int] = (UNKNOWN_EPOCH, UNKNOWN_EPOCH)


class DueEntries(NamedTuple):
    """The due entries of an index: (offset, stored entry, None if its payload is gone), oldest first.

    `is_full` means that more may be due now. `next_due_ms` is the first due time after now.
    `pending` counts all entries; `oldest_ms` is the due time of the first one that is not parked.
    `paused` are the targets that get nothing now. `parked` maps each band with parked entries to
    its target. `released` are entries that were read from bands; they come first. `backlogs` are
    the targets that have more of them. `doubtful` are requests, due now or later, of which it is
    not known whether they were delivered. `left_out` counts entries that were read and are not in
    `entries`: they are being delivered already, or have just ended. `refused` maps those that have no
    payload because they were refused to the cause.
    """

    entries: list[tuple[int, bytes | None]]
    is_full: bool
    next_due_ms: int | None
    oldest_ms: int | None
    pending: int
    paused: frozenset[str] = frozenset()
    parked: Mapping[int, str] = {}
    released: frozenset[int] = frozenset()
    backlogs: frozenset[str] = frozenset()
    doubtful: Mapping[int, Claim] = {}
    left_out: int = 0
    refused: Mapping[int, str] = {}


Postponed = tuple[int, Entry | None]
"""When to retry a pending entry, epoch ms, or the score where it is parked; its new form, None: unchanged."""


class Touched(NamedTuple):
    """The parts of the index that a batch may touch: caller ids, requests of the cold tier, ids.

    `replaced` are the ids whose request is replaced, and so must not be in flight. `conditional`
    are the offsets of records that count only if the request they name is pending, `holding` those of
    other records with a caller id. `origins` are the original requests of carried records.
    """

    caller_ids: Sequence[str]
    cold: Sequence[int]
    ids: Sequence[str] = ()
    replaced: Sequence[str] = ()
    conditional: Sequence[int] = ()
    origins: Sequence[int] = ()
    holding: Sequence[int] = ()


class Named(NamedTuple):
    """The request of an id: whether it is an entry that can be cancelled, and its caller id.

    `offset` is its record in the index. If promotion wrote that record, `origin` is the offset that
    the id names.
    """

    offset: int
    is_pending: bool
    caller_id: str | None
    origin: int | None = None


class Gap(NamedTuple):
    """Requests from `start` to `end` - 1 that retention removed before the index read them.

    Conditional records below `verdicts_below` that name one of these are assumed to have counted.
    """

    start: int = 0
    end: int = 0
    verdicts_below: int = 0


class View(NamedTuple):
    """The content of the index for the plan of a batch: positions, removals read early, holders of caller ids.

    `cold` are the requests of the cold tier that the batch may touch, `named` those whose id it
    names. The index knows nothing of requests below `begun_at`, where it was begun. Requests
    below `judged` were admitted or refused before the index was lost. For conditional records below
    `verdicts_below`, receipts have the verdict: they counted, unless they are `ignored`. `early` are
    replacements by id that count: what they replace was removed before they could be stored.
    `too_late` may be more of them that ended nothing, according to receipts; both also have invalid
    records, which ended nothing either. `tail` is the last
    record that was read before. `doubtful` may have been delivered, and whether they were could not
    be read: nothing ends them before that is known. `cancelled_cold` maps requests of the cold tier to the
    cancel by id that ended them, wherever they are by then. `has_cold`: there may be cold requests. Of these,
    only some whose first record is below `renewed_below` were renewed, so that their first id names
    another record than the bit. `topic_id` is Kafka's id of the request topic that the index belongs to.
    """

    positions: Positions
    skipped: Container[int]
    holders: Mapping[str, int]
    cold: Container[int] = frozenset()
    begun_at: int = 0
    named: Mapping[str, Named] = {}
    judged: int = 0
    verdicts_below: int = 0
    ignored: Container[int] = frozenset()
    gap: Gap = Gap()
    early: frozenset[int] = frozenset()
    cancelled_cold: Mapping[int, int] = {}
    has_cold: bool = False
    renewed_below: int = 0
    too_late: Container[int] = frozenset()
    tail: Tail | None = None
    doubtful: Container[int] = frozenset()
    topic_id: str | None = None

    def knows(self, offset: int) -> bool:
        """Whether the index can decide that this request is not pending."""
        return offset >= self.begun_at and not self.gap.start <= offset < self.gap.end

    def counted(self, offset: int, named: int) -> bool:
        """Whether a conditional record took effect, if the index does not know the request `named`."""
        below = self.verdicts_below if named < self.begun_at else self.gap.verdicts_below
        return offset < below and offset not in self.ignored


class Cold(NamedTuple):
    """A valid request that is due beyond the horizon."""

    caller_id: str | None


class Carried(NamedTuple):
    """A request of the cold tier, written again: it takes the place of the record at `previous`.

    `origin` is the request as its caller wrote it.
    """

    previous: int
    origin: int
    caller_id: str | None
    content: Entry | Cold


class Replacement(NamedTuple):
    """A request that replaces the one with this `id`; `too_late`, of no caller id, if that has ended."""

    id: str
    caller_id: str | None
    content: Request | Cold | Entry
    too_late: Entry


Change = Request | Entry | Cancel | Cold | Carried | Replacement
"""A valid request, one that can only become a dead letter, a cancel, or a cold, carried or replacing one."""


@dataclass(slots=True)
class Plan:
    """The changes of a batch: entries to put by offset, pending ones to remove, holders of caller ids.

    A new request is put as the `Request` itself; an `Entry` is a dead letter or a carried one.
    `to_cold` are requests new in the cold tier, `from_cold` those that leave it. `carried` are
    those that come from there, into the index or as another record. `ignored` are conditional
    records (carried ones, and replacements by id) that did not count. `counted` are the puts, as
    (due time, offset), of the callers whose pending requests are counted. `moved` are requests that
    come into the index as another record than the one their id names; `cancelled_cold` and `renewed_below`
    as in a View.
    `ended_in_doubt` are in doubt: they end once it is known that they were not delivered. `tail` is the
    batch's last record.
    """

    puts: dict[int, Request | Entry] = field(default_factory=dict)
    removals: list[int] = field(default_factory=list)
    holders: dict[str, int | None] = field(default_factory=dict)
    to_cold: set[int] = field(default_factory=set)
    from_cold: set[int] = field(default_factory=set)
    cancelled: int = 0
    replaced: int = 0
    carried: set[int] = field(default_factory=set)
    ignored: set[int] = field(default_factory=set)
    counted: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    moved: dict[int, int] = field(default_factory=dict)
    cancelled_cold: dict[int, int] = field(default_factory=dict)
    renewed_below: int = 0
    ended_in_doubt: set[int] = field(default_factory=set)
    tail: Tail | None = None
