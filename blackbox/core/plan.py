"""What the verbs read and change: the values that pass between them, the index and the journals.

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
    """The two journal positions that define an index: next offset of the requests, of the receipts."""

    requests: int
    receipts: int


class Bounds(NamedTuple):
    """Of a journal: the first offset kept, and the next offset to be committed; or of a stretch of it."""

    start: int
    end: int

    def from_the_end(self, length: int) -> Iterator[Bounds]:
        """Its stretches, the last one first, each ten times as long as the one before."""
        end = self.end
        while end > self.start:
            first = max(self.start, end - length)
            yield Bounds(first, end)
            end, length = first, length * 10


def stretches(offsets: Iterable[int], far_apart: int) -> Iterator[Bounds]:
    """From the first of some sorted offsets to behind the last, wherever they are not far apart."""
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
    """Which cluster, which incarnation of the two topics, and which group an index belongs to."""

    cluster_id: str
    topic_id: str
    receipts_id: str
    group: str


UNKNOWN_EPOCH = -1


class Tail(NamedTuple):
    """A record that was read, to be known again: Kafka may have lost it and put another there.

    `epoch` is the partition's leader epoch when it was written, UNKNOWN_EPOCH if nobody looked.
    """

    offset: int
    timestamp_ms: int
    checksum: int
    epoch: int = UNKNOWN_EPOCH

    @classmethod
    def of(cls, record: Record, epoch: int = UNKNOWN_EPOCH) -> Tail:
        return cls(record.offset, record.timestamp_ms, crc32(record.value or b""), epoch)

    def is_of(self, record: Record) -> bool:
        """Whether it is this record."""
        return Tail.of(record, self.epoch) == self

    def may_be_lost(self, epoch: int) -> bool:
        """Whether it may be gone, where a record of this epoch was read behind it.

        Under one leader epoch a log only grows; it loses its end when another leader begins. Brokers that tell
        none are believed: who opens a shard looks all the same.
        """
        return epoch not in (self.epoch, UNKNOWN_EPOCH)


class Kept(NamedTuple):
    """What an index says of itself when it is opened.

    `is_whole`: none of its keys was lost alone. `is_rebuilding`: it was begun from the journals, and
    who did so was interrupted. `mark` is the last low-water mark that its owner wrote, `tail` the last
    request record that was read. `unknown_ms`: requests that were due before this may have had an outcome
    that no receipt tells. `token` is new with each opening.
    """

    positions: Positions
    is_whole: bool = True
    is_rebuilding: bool = False
    binding: Binding | None = None
    mark: Mark | None = None
    tail: Tail | None = None
    unknown_ms: int = 0
    token: str = ""


class Batch(NamedTuple):
    """What one read of a request topic gave: the records of the offsets `start` to `end` - 1.

    Fewer records than offsets is normal: control records, aborted transactions and compaction
    leave gaps. `start` is the position that was read from, not the first record's offset. `epochs`
    are the leader epochs of the first record and of the last.
    """

    start: int
    end: int
    records: Sequence[Record]
    epochs: tuple[int, int] = (UNKNOWN_EPOCH, UNKNOWN_EPOCH)


class Due(NamedTuple):
    """What an index says is due: (offset, stored entry, None if its payload is gone), oldest first.

    `is_full` means that more may be due now. `next_due_ms` is the first due time after now.
    `pending` counts all entries; `oldest_ms` is the due time of the first one that is not parked. `paused` are
    the targets that get nothing now. `parked` says by band which target has entries parked there, `released`
    are entries that were read from there, and come first; `backlogs` the targets of which there are more.
    `doubtful` are requests, due now or later, of which it is not known whether they were delivered.
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


Postponed = tuple[int, Entry | None]
"""When to try a pending entry again, epoch ms, or where it is parked; and its new form, None leaves it as it is."""


class Touched(NamedTuple):
    """What a batch may touch of what is there already: caller ids, requests of the cold tier, ids.

    `replaced` are those of the ids whose request is replaced, and so must not be leaving;
    `conditional` the offsets of records that count only if what they name is pending; `origins` the
    requests that carried records are.
    """

    caller_ids: Sequence[str]
    cold: Sequence[int]
    ids: Sequence[str] = ()
    replaced: Sequence[str] = ()
    conditional: Sequence[int] = ()
    origins: Sequence[int] = ()


class Named(NamedTuple):
    """The request of an id: whether it is an entry that can be cancelled, and its caller id.

    `offset` is the record that it is in the index by. Where promotion wrote that, `origin` is the one
    that the id means.
    """

    offset: int
    is_pending: bool
    caller_id: str | None
    origin: int | None = None


class Gap(NamedTuple):
    """Requests from `start` to `end` - 1 that retention removed before the index read them.

    Conditional records below `told` that name one of these are taken to have counted.
    """

    start: int = 0
    end: int = 0
    told: int = 0


class View(NamedTuple):
    """What an index says while a batch is planned: its positions, early removals, holders of caller ids.

    `cold` are the requests of the cold tier, as far as the batch may touch them, `named` those
    whose id it names. Of requests below `known_from` the index knows nothing: it was begun behind
    them. Those below `judged` were let in, or refused, before the index was lost. What became of
    conditional records below `told` was told by receipts: they counted, unless they are `ignored`.
    `early` are replacements by id that count: what they replace was removed before they could be stored.
    `too_late` may be more of them that ended nothing, as receipts told. `tail` is the last record that
    was read before.
    `doubtful` may have been delivered, and nobody could read whether they were: nothing ends them before that is known.
    `ended` are requests of the cold tier that the cancel at this offset has ended by their ids, wherever
    they are by then; `has_cold`: there may be some.
    """

    positions: Positions
    skipped: Container[int]
    holders: Mapping[str, int]
    cold: Container[int] = frozenset()
    known_from: int = 0
    named: Mapping[str, Named] = {}
    judged: int = 0
    told: int = 0
    ignored: Container[int] = frozenset()
    gap: Gap = Gap()
    early: frozenset[int] = frozenset()
    ended: Mapping[int, int] = {}
    has_cold: bool = False
    too_late: Container[int] = frozenset()
    tail: Tail | None = None
    doubtful: Container[int] = frozenset()

    def knows(self, offset: int) -> bool:
        """Whether the index can tell that this request is not pending."""
        return offset >= self.known_from and not self.gap.start <= offset < self.gap.end

    def counted(self, offset: int, named: int) -> bool:
        """Whether a conditional record took effect, where the request `named` is not known any more."""
        told = self.told if named < self.known_from else self.gap.told
        return offset < told and offset not in self.ignored


class Cold(NamedTuple):
    """A valid request that is due beyond the horizon."""

    caller_id: str | None


class Carried(NamedTuple):
    """A request of the cold tier, written anew: it takes the place of the record at `previous`.

    `origin` is the request as its caller wrote it.
    """

    previous: int
    origin: int
    caller_id: str | None
    asked: Entry | Cold


class Replacement(NamedTuple):
    """A request that takes the place of the one of this `id`; `too_late`, of no caller id, if that has ended."""

    id: str
    caller_id: str | None
    asked: Request | Cold | Entry
    too_late: Entry


Change = Request | Entry | Cancel | Cold | Carried | Replacement
"""A valid request, one that can only become a dead letter, a cancel, one that replaces another, or a
matter of the cold tier."""


@dataclass(slots=True)
class Plan:
    """What a batch changes: entries to put by offset, pending ones to remove, who holds a caller id.

    `frozen` are requests new in the cold tier, `thawed` those that leave it. `carried` are those that
    come from there, into the index or as another record. `ignored` are conditional records (carried
    ones, and replacements by id) that did not count. `counted` are the puts, (due time, offset), of
    the callers whose pending requests are counted. `moved` are requests that come into the index as
    another record than the one of their ids; `ended` as in a View. `unwanted` are in doubt: they end once it is known that
    they were not delivered. `tail` is the batch's last record.
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
    counted: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    moved: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    unwanted: set[int] = field(default_factory=set)
    tail: Tail | None = None


def resolve(changes: Sequence[tuple[int, Change]], view: View) -> Plan:
    """Decide what a batch of requests changes, given what the index says.

    A request that is skipped (its removal was read before it) is not put, yet still ends the
    request it replaced. A carried one is put only if the request it carries on is still cold. A
    replacement by id that is too late ends nothing, whatever its caller id; one that was, stays it,
    whatever is pending under another horizon.
    """
    plan = Plan(holders=dict(view.holders))
    puts, first, skipped = plan.puts, view.positions.requests, view.skipped
    for offset, change in changes:
        if offset < first:
            continue
        if type(change) is Cancel and change.id is not None:
            if _end_named(plan, view, change.id):
                plan.cancelled += 1
            else:
                _end_wherever(plan, view, change.id, offset)
            continue
        if type(change) is Replacement:
            was_too_late = offset in view.ignored or offset in view.too_late
            is_in_time = not was_too_late and _end_named(plan, view, change.id, offset)
            plan.replaced += is_in_time
            if not is_in_time:
                plan.ignored.add(offset)
            change = change.asked if is_in_time else change.too_late
        if type(change) is Carried:
            if not _takes_over(plan, view, offset, change):
                plan.ignored.add(offset)
                continue
            change = change.asked
        elif change.caller_id is not None:
            _end_holder(plan, view, change.caller_id, is_cancel=type(change) is Cancel)
        if type(change) is Cancel or offset in skipped:
            continue
        if type(change) is Cold:
            plan.to_cold.add(offset)
        else:
            puts[offset] = change  # type: ignore[assignment]
        if change.caller_id is not None:
            plan.holders[change.caller_id] = offset
    return plan


def _end_holder(plan: Plan, view: View, caller_id: str, *, is_cancel: bool) -> None:
    holder = plan.holders.get(caller_id)
    plan.holders[caller_id] = None
    if holder is None:
        return
    _end(plan, view, holder)
    if is_cancel:
        plan.cancelled += 1
    else:
        plan.replaced += 1


def _end_named(plan: Plan, view: View, id: str, by: int | None = None) -> bool:
    """Whether the request of this id was pending; what can only become a dead letter stays, to become one.

    A replacement, at the offset `by`, of a request that the index does not know ends nothing that is
    there, but may have been in time.
    """
    if id not in view.named:
        return False
    offset, is_pending, caller_id, origin = view.named[id]
    offset = plan.moved.get(offset if origin is None else origin, offset)
    if offset in view.doubtful:
        if by is None:
            plan.unwanted.add(offset)
        return False
    if by is not None and by in view.early:
        return True
    if by is not None and not view.knows(offset):
        return view.counted(by, offset)
    new = plan.puts.get(offset)
    if new is not None:
        if isinstance(new, Entry) and new.reason is not None:
            return False
        caller_id = new.caller_id
        del plan.puts[offset]
    elif is_pending and offset not in plan.removals:
        plan.removals.append(offset)
    elif not _take_from_cold(plan, view, offset):
        return False
    if caller_id is not None and plan.holders.get(caller_id) == offset:
        plan.holders[caller_id] = None
    return True


def _end_wherever(plan: Plan, view: View, id: str, by: int) -> None:
    """A cold request may have been written again by now, and only Kafka knows where: it ends when it is once more."""
    if id in view.named and (view.has_cold or plan.to_cold):
        offset, _, _, origin = view.named[id]
        asked = offset if origin is None else origin
        if asked < by:
            plan.ended[asked] = by


def _takes_over(plan: Plan, view: View, offset: int, change: Carried) -> bool:
    """Whether a carried record is the one that counts from now on.

    Not when the request it carries on was ended meanwhile, by its id as well, or was carried on already. Nor when it
    is in the index itself, as under a longer horizon than once; unless the carried one was
    delivered already: that ends it. Of requests before the index began, receipts told.
    """
    previous, origin, caller_id, _ = change
    is_cold = _take_from_cold(plan, view, previous)
    was_delivered = offset in view.skipped
    is_believed = not view.knows(previous) and view.counted(offset, previous)
    if not (is_cold or was_delivered or is_believed):
        return False
    if caller_id is not None and plan.holders.get(caller_id) in (previous, origin):
        plan.holders[caller_id] = None
    if origin in plan.ended or view.ended.get(origin, offset) < offset:
        plan.cancelled += 1
        return False
    if not is_cold:
        _end(plan, view, previous)
        _end(plan, view, origin)
    plan.carried.add(offset)
    if type(change.asked) is not Cold and not was_delivered:
        plan.moved[origin] = offset  # not of a cold one: a later batch would not find it either
    return True


def _end(plan: Plan, view: View, offset: int) -> None:
    if offset in view.doubtful:
        plan.unwanted.add(offset)
        return
    if plan.puts.pop(offset, None) is None and not _take_from_cold(plan, view, offset):
        plan.removals.append(offset)


def _take_from_cold(plan: Plan, view: View, offset: int) -> bool:
    """Take a request out of the cold tier; False when it is not there."""
    if offset in plan.to_cold:
        plan.to_cold.remove(offset)
        return True
    if offset in view.cold and offset not in plan.from_cold:
        plan.from_cold.add(offset)
        return True
    return False
