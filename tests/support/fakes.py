"""Fakes of what the verbs use: a scripted producer, journals in lists, targets in a dict.

There is no fake of the index: it is the real one, on a Redis inside this process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import fakeredis
import redis

from blackbox.core.offset_set import OffsetSet
from blackbox.core.plan import UNKNOWN_EPOCH, Batch, Binding, Bounds
from blackbox.formats import Format
from blackbox.formats.format import RefusedError
from blackbox.records.errors import JournalLost, Refused
from blackbox.records.outgoing import Outgoing, Refusal
from blackbox.records.receipt import Checked, Claim, Places, Receipt, decode, encode
from blackbox.records.request import Cancel, Invalid, Reason, Record, Request
from blackbox.records.topic_limits import NO_LIMITS, Limits


def fake_connections(server: fakeredis.FakeServer) -> redis.ConnectionPool:
    """Connections to a Redis inside this process."""
    return redis.ConnectionPool(
        connection_class=fakeredis.FakeRedisConnection, server=server, protocol=2
    )


def record(offset: int, value: bytes | None = b"{}", timestamp_ms: int = 0) -> Record:
    """A request record as Kafka would return it."""
    return Record(offset, timestamp_ms, b"key", value, [("CALLER_SERVICE", b"shop")])


class FakeFormat(Format):
    """A format whose parsed values are given by the record's offset."""

    def __init__(self, parsed: Mapping[int, Request | Cancel | Invalid] | None = None) -> None:
        self.parsed = dict(parsed or {})

    def _read(self, record: Record, latest_ms: int) -> Request | Cancel:
        found = self.parsed[record.offset]
        if isinstance(found, Invalid):
            raise RefusedError(*found)
        return found


@dataclass
class FakeJournal:
    """Both journals of a shard. A record or receipt that is None is a gap in the offsets.

    `absent` are the requests whose message is not where a receipt says it is. `interlopers` are
    receipts that another owner commits just before this owner's next ones. `epochs` are leader epochs by offset.
    """

    request_records: list[Record | None] = field(default_factory=list)
    receipt_records: list[bytes | None] = field(default_factory=list)
    first_request: int = 0
    first_receipt: int = 0
    read_at_once: int = 1000
    absent: set[int] = field(default_factory=set)
    unreadable: set[int] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    interlopers: list[Receipt] = field(default_factory=list)
    format: FakeFormat = field(default_factory=FakeFormat)
    topic_id: str = "topic"
    read_before: int = 0
    epochs: dict[int, int] = field(default_factory=dict)

    def request_bounds(self) -> Bounds:
        return Bounds(self.first_request, len(self.request_records))

    def settled_bounds(self) -> Bounds:
        return self.request_bounds()

    def receipt_bounds(self) -> Bounds:
        return Bounds(self.first_receipt, len(self.receipt_records))

    def binding(self, group: str) -> Binding:
        return Binding("cluster", self.topic_id, "receipts", group)

    def committed(self) -> int:
        return self.read_before

    def receipts(self, start: int, end: int) -> Iterator[tuple[int, Receipt]]:
        self.calls.append(f"receipts {start} to {end}")
        if start < min(self.first_receipt, end):
            raise JournalLost("out of range")
        for offset, value in enumerate(self.receipt_records[start:end], start):
            if value is not None:
                yield offset, decode(value)

    def requests(self, start: int, end: int, ended: OffsetSet | None = None) -> Iterator[Batch]:
        self.calls.append(f"requests {start} to {end}")
        if start < min(self.first_request, end):
            raise JournalLost("out of range")
        for first in range(start, end, self.read_at_once):
            last = min(first + self.read_at_once, end)
            kept = [found for found in self.request_records[first:last] if found is not None]
            ends = [self.epochs.get(one.offset, UNKNOWN_EPOCH) for one in kept] or [UNKNOWN_EPOCH]
            yield Batch(first, last, kept, (ends[0], ends[-1]))

    def records(self, offsets: Iterable[int]) -> dict[int, Record]:
        found = {offset: self._record(offset) for offset in offsets}
        return {offset: kept for offset, kept in found.items() if kept is not None}

    def first_records(
        self, offsets: Iterable[int], most_bytes: int
    ) -> tuple[dict[int, Record], set[int]]:
        found, wanted = dict[int, Record](), sorted(offsets)
        for count, offset in enumerate(wanted, 1):
            if (record := self._record(offset)) is not None:
                found[offset] = record
                most_bytes -= len(record.value or b"")
            if most_bytes <= 0:
                return found, set(wanted[count:])
        return found, set()

    def record(self, offset: int, within_s: float = 0) -> Record | None:
        return self._record(offset)

    def record_at(self, topic: str, partition: int, offset: int) -> Record | None:
        return None

    def first_request_since(self, at_ms: int) -> int | None:
        found = self.request_records[self.first_request :]
        return next((one.offset for one in found if one and one.timestamp_ms >= at_ms), None)

    def first_receipt_since(self, at_ms: int) -> int | None:
        found = enumerate(self.receipt_records[self.first_receipt :], self.first_receipt)
        return next((at for at, one in found if one and decode(one).at_ms >= at_ms), None)

    def check(self, claims: Iterable[Claim], patience_s: float) -> Checked:
        self.calls.append("check")
        every = list(claims)
        unread = {one: "a stranger hides it" for one in every if one.offset in self.unreadable}
        missing = [one for one in every if one.offset in self.absent and one not in unread]
        return Checked(missing, unread)

    def append(self, receipt: Receipt) -> int:
        """Add a committed receipt and the transaction's marker; returns the receipt's offset."""
        for other in self.interlopers[:1]:
            self.receipt_records += [encode(other), None]
        del self.interlopers[:1]
        self.receipt_records += [encode(receipt), None]
        return len(self.receipt_records) - 2

    def _record(self, offset: int) -> Record | None:
        if not self.first_request <= offset < len(self.request_records):
            return None
        return self.request_records[offset]


@dataclass
class FakeWriter:
    """A scripted producer that records what was committed.

    refused, refuses -- by topic, by record: the reason why the client refuses it at once
    failing, fails   -- by topic, by record: the answer of the brokers, which `flush` raises or returns
    before           -- step name -> the exception raised instead of the step
    most_together    -- by topic: how many records its brokers take in one batch, which is refused as a whole
    meanwhile        -- what happens while `flush` waits for brokers that do not answer
    """

    journal: FakeJournal
    calls: list[str] = field(default_factory=list)
    committed: list[Outgoing] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    refused: dict[str, Refusal] = field(default_factory=dict)
    refuses: Callable[[Outgoing], Refusal | None] = lambda _: None
    failing: dict[str, Refusal] = field(default_factory=dict)
    fails: Callable[[Outgoing], Refusal | None] = lambda _: None
    exactly_once: bool = True
    not_before_ms: int = 0
    before: dict[str, Exception] = field(default_factory=dict)
    meanwhile: Callable[[], None] | None = None
    most_together: dict[str, int] = field(default_factory=dict)
    _queued: list[tuple[Outgoing, Places]] = field(default_factory=list)
    _flushed: int = 0
    crowded: set[str] = field(default_factory=set)
    _failed: dict[int, Refusal] = field(default_factory=dict)
    _ends: dict[str, int] = field(default_factory=dict)

    def open(self) -> None:
        self._step("open")

    def begin(self) -> None:
        self._step("begin")
        self._queued, self._flushed, self._failed, self.crowded = [], 0, {}, set()

    def send(self, outgoing: Outgoing, places: Places) -> Refusal | None:
        self._step(f"send {outgoing.topic}@{outgoing.offset}")
        refusal = self.refused.get(outgoing.topic) or self.refuses(outgoing)
        if refusal is None:
            self._queued.append((outgoing, places))
        return refusal

    def flush(self, hopeless: Callable[[], dict[int, Refusal]] = dict) -> Mapping[int, Refusal]:
        self._step("flush")
        if self.meanwhile is not None:
            self.meanwhile()
            if suspects := hopeless():
                self.abort()
                raise Refused(suspects)
        waiting = self._queued[self._flushed :]
        answers = [(o.offset, self._answer(o, waiting)) for o, _ in waiting]
        failed = {offset: refusal for offset, refusal in answers if refusal is not None}
        too_large = [(o, self._answer(o, waiting)) for o, _ in waiting]
        self.crowded |= {o.topic for o, why in too_large if why and why[0] == Reason.TOO_LARGE}
        if failed and self.exactly_once:
            late = any(why[0] == Reason.UNREACHABLE for why in failed.values())
            raise Refused(failed, is_timeout=late)
        taken = [(o, places) for o, places in waiting if o.offset not in failed]
        for outgoing, places in taken:
            at = f"{outgoing.topic}/{max(0, outgoing.partition)}"
            there = self._ends.get(at, 0)
            self._ends[at] = there + 1
            places.setdefault(at, []).append((outgoing.offset, there))
        self._queued[self._flushed :] = taken
        self._flushed = len(self._queued)
        self._failed |= failed
        return self._failed

    def _answer(
        self, outgoing: Outgoing, batch: Sequence[tuple[Outgoing, Places]]
    ) -> Refusal | None:
        together = sum(one.topic == outgoing.topic for one, _ in batch)
        if together > self.most_together.get(outgoing.topic, together):
            return Reason.TOO_LARGE, "the batch"
        return self.failing.get(outgoing.topic) or self.fails(outgoing)

    def abort(self) -> None:
        self._step("abort")
        if not self.exactly_once:  # what was flushed stays
            self.committed += [outgoing for outgoing, _ in self._queued[: self._flushed]]
        self._queued, self._flushed = [], 0

    def commit(self, receipt: Receipt, not_before_ms: int = 0) -> int:
        self._step("commit")
        self.not_before_ms = not_before_ms
        self.committed += [outgoing for outgoing, _ in self._queued]
        self._queued, self._flushed = [], 0
        self.receipts.append(receipt)
        return self.journal.append(receipt) + 1

    def sent_to(self, topic: str) -> list[int]:
        """The requests whose record was committed to this topic."""
        return [outgoing.offset for outgoing in self.committed if outgoing.topic == topic]

    def _step(self, name: str) -> None:
        self.calls.append(name)
        if name in self.before:
            raise self.before.pop(name)


@dataclass
class FakeTargets:
    """Topics that cannot accept messages now, and why; and the limits of some topics."""

    refusals: dict[str, Refusal] = field(default_factory=dict)
    strict: dict[str, Limits] = field(default_factory=dict)

    def unavailable(self, topics: Iterable[str], *, refresh: bool = False) -> dict[str, Refusal]:
        return {topic: self.refusals[topic] for topic in topics if topic in self.refusals}

    def ids(self, topics: Iterable[str]) -> dict[str, str]:
        return {topic: f"id-{topic}" for topic in topics}

    def limits(self, topics: Collection[str]) -> dict[str, Limits]:
        return {topic: self.strict[topic] for topic in topics if topic in self.strict}

    def send_one_by_one(self, topics: Iterable[str]) -> None:
        for topic in topics:
            self.strict[topic] = self.strict.get(topic, NO_LIMITS)._replace(one_by_one=True)
