"""The second verb: what is due leaves the index and goes where it was asked to go."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from blackbox import entry as entries
from blackbox.cold import as_asked, carried
from blackbox.doubt import Doubt, IndexFull, IndexLost, Refused
from blackbox.endings import Endings
from blackbox.entry import Entry
from blackbox.intake import refused_entry
from blackbox.limits import Limits
from blackbox.outgoing import Outgoing, Refusal, dead_letters, deliveries
from blackbox.plan import Due, Labels, PutOff
from blackbox.receipt import Places, Receipt
from blackbox.request import MAY_COME_BACK, UNDELIVERABLE, Invalid, Reason, Record, Shard

logger = logging.getLogger("blackbox.dispatch")

FIRST_RETRY_MS = 1_000
LONGEST_RETRY_MS = 60_000
ALONE_PER_TICK = 8
ALONE_SPREAD_MS = 50
TELL_AFTER_MS = 5_000
LETTER_LATER_MS = 15_000
"""In a backlog: the look at the record in Kafka would take time from the good messages of other shards."""


PAUSED: Refusal = (
    Reason.UNREACHABLE,
    "the target is paused; blackbox resume TOPIC lets it go on",
)


class Index(Protocol):
    """What dispatch needs of a shard's index."""

    @property
    def labels(self) -> Labels: ...
    @property
    def removed(self) -> int: ...
    def due(self, now_ms: int, limit: int, passing_over: Collection[int] = ()) -> Due: ...
    def depart(self, offsets: Sequence[int], removed: int) -> Collection[int]: ...
    def settle(
        self,
        removals: Mapping[int, str | None],
        receipts: int,
        put_off: Mapping[int, PutOff] = ...,
        now_ms: int = ...,
        counted: Mapping[str, Sequence[int]] = ...,
    ) -> None: ...
    def defer(self, changes: Mapping[int, PutOff], now_ms: int) -> None: ...


class Writer(Protocol):
    """What dispatch needs of the shard's producer."""

    def begin(self) -> None: ...
    def send(self, outgoing: Outgoing, places: Places) -> Refusal | None: ...
    def flush(self) -> Mapping[int, Refusal]: ...
    def abort(self) -> None: ...
    def commit(self, receipt: Receipt) -> int: ...


class Targets(Protocol):
    """Which of the topics asked for cannot take messages now, and what some of them refuse."""

    def unavailable(self, topics: Iterable[str]) -> Mapping[str, Refusal]: ...
    def limits(self, topics: Iterable[str]) -> Mapping[str, Limits]: ...


class Pace(Protocol):
    """How fast targets are fed."""

    def limited(self) -> Collection[str]: ...
    def times(self, target: str, count: int, now_ms: int) -> Sequence[int]: ...
    def give_back(self, target: str, count: int) -> None: ...


class Journal(Protocol):
    """Where the original records of requests are."""

    def records(self, offsets: Iterable[int]) -> Mapping[int, Record]: ...


@dataclass(slots=True)
class Dispatched:
    """What one tick did. `due_ms` are the due times of what it delivered, `targets` how many went where.

    `next_due_ms` is None when nothing is pending after what is due now.
    """

    due_ms: list[int] = field(default_factory=list)
    targets: Counter[str] = field(default_factory=Counter)
    dead: dict[str, int] = field(default_factory=dict)
    retried: int = 0
    is_full: bool = False
    next_due_ms: int | None = None
    oldest_ms: int | None = None
    pending: int = 0


@dataclass(slots=True)
class _Sorted:
    """A batch, each request in one of four places."""

    ready: dict[int, Entry] = field(default_factory=dict)
    alone: dict[int, Entry] = field(default_factory=dict)
    dead: dict[int, Entry] = field(default_factory=dict)
    deferred: dict[int, PutOff] = field(default_factory=dict)


@dataclass(slots=True)
class Dispatch:
    """Delivers what is due in one shard.

    `reread` makes an entry of a request's record again; `retries` is how often an unavailable
    target is tried again, after 1, 2, 4 … 60 s, before the request becomes a dead letter;
    `endings` are what is written with the outcomes of some requests. Without a `pace` every message
    goes as soon as it can. `counted` are the requests of callers whose pending ones are counted.
    """

    shard: Shard
    index: Index
    writer: Writer
    targets: Targets
    journal: Journal
    reread: Callable[[Record], Entry]
    dead_letter_topic: str
    batch_limit: int = 1000
    retries: int = 5
    endings: Endings | None = None
    pace: Pace | None = None
    counted: Callable[[Mapping[int, Entry]], Mapping[str, Sequence[int]]] = lambda ended: {}
    _known: int = 0
    _told: int = 0
    _told_ms: int = 0
    _ahead: tuple[Dispatched, _Sorted] | None = None
    _removed: int = 0

    def tick(self, now_ms: int) -> Dispatched:
        """Deliver one batch of what is due at `now_ms`.

        1. read labels and due members that belong together, then the payloads; of a full
           batch's successor already while Kafka is busy with the batch; then say in Redis what is
           about to be delivered, without what was cancelled or replaced since;
        2. one transaction: messages and dead letters, flushed, then the receipt that names where
           each went; commit;
        3. one MULTI under WATCH: remove what the receipt names, and set the label `receipts`.

        What cannot be delivered now is put off, out of the head of the queue. Raises a Doubt when
        an outcome is unknown or the labels are not the ones last seen: recover.
        """
        self._known = self.index.labels.requests
        if self.index.removed != self._removed:
            self._ahead = None  # something in it may have been cancelled or replaced since
        did, batch = self._ahead or self._read(now_ms)  # 1
        self._ahead = None
        later = self._set_later(batch, now_ms)
        try:
            if batch.ready or batch.dead:
                self._deliver(batch, did, now_ms, goes_on=did.is_full and not batch.alone)
            else:
                self._defer(batch.deferred, did, now_ms)
                self._tell_what_was_read(now_ms)
        except BaseException:
            self._give_back(later)
            raise
        for offset, entry in batch.alone.items():
            one = {offset: entry}
            only = _Sorted(ready=one) if entry.reason is None else _Sorted(dead=one)
            self._deliver(only, did, now_ms)
        return did

    def _tell_what_was_read(self, now_ms: int) -> None:
        """Where rules judge requests, receipts say up to where they have: also while nothing is delivered."""
        is_news = self._known > self._told and now_ms - self._told_ms >= TELL_AFTER_MS
        if self.pace is not None and is_news:
            self.writer.begin()
            label = self.writer.commit(Receipt(at_ms=now_ms, read=self._known))
            self.index.settle({}, label)
            self._told, self._told_ms = self._known, now_ms

    def _read(self, now_ms: int) -> tuple[Dispatched, _Sorted]:
        self._removed = self.index.removed
        due = self.index.due(now_ms, self.batch_limit)
        return self._looked(due, now_ms)

    def _read_ahead(self, now_ms: int, before: _Sorted) -> tuple[Dispatched, _Sorted]:
        """What comes after a batch that is still being delivered."""
        self._removed = self.index.removed
        leaving = before.ready.keys() | before.dead.keys()
        due = self.index.due(now_ms, self.batch_limit, leaving | before.deferred.keys())
        return self._looked(due._replace(is_full=True, pending=due.pending - len(leaving)), now_ms)

    def _looked(self, due: Due, now_ms: int) -> tuple[Dispatched, _Sorted]:
        did = Dispatched(
            is_full=due.is_full,
            next_due_ms=due.next_due_ms,
            oldest_ms=due.oldest_ms,
            pending=due.pending,
        )
        return did, self._sort(due, now_ms) if due.entries else _Sorted()

    def _sort(self, due: Due, now_ms: int) -> _Sorted:
        batch = _Sorted()
        for offset, entry in self._decoded(due, now_ms).items():
            if entry.expires_ms is not None and entry.expires_ms < now_ms and not entry.reason:
                detail = f"due {now_ms - entry.due_ms} ms ago, expires_after was shorter"
                entry = _ended(entry, (Reason.EXPIRED, detail))
            if entry.alone:
                batch.alone[offset] = entry
            elif entry.reason is not None:
                batch.dead[offset] = entry
            else:
                batch.ready[offset] = entry
        for offset in list(batch.alone)[ALONE_PER_TICK:]:
            later_ms = now_ms + ALONE_SPREAD_MS * (1 + len(batch.deferred))
            batch.deferred[offset] = later_ms, batch.alone.pop(offset)
        self._set_unavailable_aside(batch, now_ms, due.paused)
        self._set_refused_aside(batch, now_ms, is_backlog=due.is_full)
        return batch

    def _set_later(self, batch: _Sorted, now_ms: int) -> dict[str, int]:
        """What a target is not to get yet, those that were due first going first; how many, by target."""
        limited = self.pace.limited() if self.pace is not None else frozenset[str]()
        waiting: dict[str, list[int]] = {}
        for offset, entry in batch.ready.items() if limited else ():
            if entry.target in limited:
                waiting.setdefault(entry.target, []).append(offset)
        later: dict[str, int] = {}
        for target, offsets in waiting.items():
            assert self.pace is not None
            offsets.sort(key=lambda offset: batch.ready[offset].due_ms)
            try:
                times = self.pace.times(target, len(offsets), now_ms)
            except (IndexFull, IndexLost):  # what is delivered makes room; what is due goes out
                continue
            for offset, at_ms in zip(offsets, times, strict=True):
                if at_ms > now_ms:
                    del batch.ready[offset]
                    batch.deferred[offset] = at_ms, None
                    later[target] = later.get(target, 0) + 1
        return later

    def _give_back(self, later: Mapping[str, int]) -> None:
        """The times that were taken for what is read again now."""
        for target, count in later.items():
            assert self.pace is not None
            with suppress(Doubt, IndexFull):
                self.pace.give_back(target, count)

    def _decoded(self, due: Due, now_ms: int) -> dict[int, Entry]:
        batch: dict[int, Entry] = {}
        lost: list[int] = []
        for offset, stored in due.entries:
            try:
                batch[offset] = entries.decode(stored or b"")
            except ValueError as unreadable:
                why = unreadable if stored else "no payload in Redis"
                logger.warning("%s: %s, read again", self.shard.source(offset), why)
                lost.append(offset)
        found = self.journal.records(lost) if lost else {}
        for offset in lost:
            batch[offset] = self.reread(found[offset]) if offset in found else _lost(offset, now_ms)
        return batch

    def _set_unavailable_aside(self, batch: _Sorted, now_ms: int, paused: Collection[str]) -> None:
        wanted = {entry.target for entry in batch.ready.values()}
        wanted |= {self._destination(entry) for entry in batch.alone.values()}
        ending = self._ending(batch) if self.endings is not None else {}
        others = {topic for topics in ending.values() for topic in topics}
        asked_for = {*wanted, *others, self.dead_letter_topic}
        unavailable = {
            **self.targets.unavailable(asked_for.difference(paused)),
            **dict.fromkeys(asked_for.intersection(paused), PAUSED),
        }
        for topic in others & unavailable.keys():
            logger.error(
                "%s: what recurs or is scheduled waits: %s", self.shard, unavailable[topic][1]
            )
        for part in (batch.ready, batch.alone, batch.dead) if unavailable else ():
            for offset, entry in list(part.items()):
                refusal = unavailable.get(self._destination(entry))
                for topic in ending.get(offset, ()) if refusal is None else ():
                    if topic in unavailable:
                        refusal = Reason.UNREACHABLE, unavailable[topic][1]
                if refusal is not None:
                    del part[offset]
                    self._retry_or_end(batch, offset, entry, refusal, now_ms)
        waiting = sum(
            entry is not None and entry.reason is not None for _, entry in batch.deferred.values()
        )
        if waiting and self.dead_letter_topic in unavailable:
            self._say_that_letters_wait(waiting, unavailable[self.dead_letter_topic][1])

    def _ending(self, batch: _Sorted) -> dict[int, tuple[str, ...]]:
        """By request, the topics that something is written to with its end."""
        assert self.endings is not None
        everything = {**batch.ready, **batch.alone, **batch.dead}
        if not self.endings.has_some(everything.values()):
            return {}
        return {offset: self.endings.topics(entry) for offset, entry in everything.items()}

    def _set_refused_aside(self, batch: _Sorted, now_ms: int, *, is_backlog: bool) -> None:
        """As dead letters, behind the good ones that wait; in a backlog they are judged again later."""
        messages = batch.ready | {o: e for o, e in batch.alone.items() if e.reason is None}
        limits = self.targets.limits({entry.target for entry in messages.values()})
        strict = {offset: entry for offset, entry in messages.items() if entry.target in limits}
        refused: dict[int, Entry] = {}
        for message in deliveries(self.shard, strict):
            refusal = limits[message.topic].refusal(message)
            if refusal is not None:
                offset = message.offset
                refused[offset] = _ended(strict[offset], refusal)
                del (batch.alone if offset in batch.alone else batch.ready)[offset]
        if not batch.ready:
            batch.dead |= refused
        elif is_backlog:
            batch.deferred |= dict.fromkeys(refused, (now_ms + LETTER_LATER_MS, None))
        else:
            batch.deferred |= {offset: (now_ms, entry) for offset, entry in refused.items()}

    def _destination(self, entry: Entry) -> str:
        return entry.target if entry.reason is None else self.dead_letter_topic

    def _retry_or_end(
        self, batch: _Sorted, offset: int, entry: Entry, refusal: Refusal, now_ms: int
    ) -> None:
        reason, detail = refusal
        is_over = entry.attempts >= self.retries and reason != Reason.UNREACHABLE
        if is_over and entry.reason is None:
            detail = f"{detail}, tried {entry.attempts + 1} times"
            batch.dead[offset] = _ended(entry, (reason, detail))
            return
        if reason == Reason.UNREACHABLE:  # for as long as it takes, and no try of the target
            count, later = entry.waits, entry._replace(waits=entry.waits + 1)
        else:
            count, later = entry.attempts, entry._replace(attempts=entry.attempts + 1, waits=0)
        wait_ms = min(FIRST_RETRY_MS << min(count, 10), LONGEST_RETRY_MS)
        batch.deferred[offset] = now_ms + wait_ms, later

    def _deliver(
        self, batch: _Sorted, did: Dispatched, now_ms: int, *, goes_on: bool = False
    ) -> None:
        if not self._depart(batch):
            self._defer(batch.deferred, did, now_ms)
            return
        places: Places = {}
        letters: Places = {}
        ready, dead = batch.ready, dict(batch.dead)
        self.writer.begin()  # 2
        try:
            for message in deliveries(self.shard, ready):
                refusal = self.writer.send(message, places)
                if refusal is not None:
                    dead[message.offset] = _ended(ready[message.offset], refusal)
            self._send_dead_letters(dead, letters)
            written = self._send_endings(ready, dead, now_ms)
            if goes_on:
                self._ahead = self._read_ahead(now_ms, batch)
            failed = self.writer.flush()
            self._check_endings(ready | dead, written)
        except Refused as refused:
            self._put_off(ready | dead, refused.suspects, did, now_ms)
            raise
        sent = {**ready, **dead}
        ended = {offset: entry for offset, entry in sent.items() if offset not in failed}
        dead = {offset: entry for offset, entry in dead.items() if offset not in failed}
        label = self.writer.commit(_receipt(dead, places, letters, now_ms, self._known))
        removals = {offset: entry.caller_id for offset, entry in ended.items()}
        counted = self.counted(ended)
        self.index.settle(removals, label, batch.deferred, now_ms, counted)  # 3
        self._told, self._told_ms = self._known, now_ms
        _count(did, ended, dead)
        _count_put_off(did, batch.deferred)
        if failed:
            self._put_off(sent, failed, did, now_ms)

    def _depart(self, batch: _Sorted) -> bool:
        """Leave out what was cancelled or replaced since it was read; whether there is something left."""
        for offset in self.index.depart([*batch.ready, *batch.dead], self._removed):
            batch.ready.pop(offset, None)
            batch.dead.pop(offset, None)
        if batch.ready or batch.dead:
            return True
        self.index.depart((), self._removed)
        return False

    def _send_dead_letters(self, dead: Mapping[int, Entry], letters: Places) -> None:
        originals = self._originals(o for o, entry in dead.items() if not _is_record(entry))
        for offset, entry in dead.items():
            original = originals.get(offset) or _as_record(offset, entry)
            forms = dead_letters(
                self.shard,
                self.dead_letter_topic,
                original,
                entry.reason or "",
                entry.detail or "",
            )
            if all(self.writer.send(form, letters) is not None for form in forms):
                raise Doubt(f"{self.shard.source(offset)}: no form of its dead letter can be sent")

    def _send_endings(
        self, ready: Mapping[int, Entry], dead: Mapping[int, Entry], now_ms: int
    ) -> Places:
        """Returns where those for the request topic went, once they are flushed."""
        written: Places = {}
        ended = {**ready, **dead}
        if self.endings is None or not self.endings.has_some(ended.values()):
            return written
        delivered = {offset: entry for offset, entry in ready.items() if offset not in dead}
        suspects: dict[int, Refusal] = {}
        for part, places in (
            (self.endings.requests(ended, now_ms), written),
            (self.endings.copies(delivered), {}),
        ):
            for message in part:
                refusal = self.writer.send(message, places)
                if refusal is not None:
                    suspects[message.offset] = refusal
        self._take_back(suspects)
        return written

    def _check_endings(self, ended: Mapping[int, Entry], written: Places) -> None:
        if self.endings is not None and written:
            self._take_back(self.endings.overtaken(self._known, ended, written))

    def _take_back(self, suspects: dict[int, Refusal]) -> None:
        if suspects:
            self.writer.abort()
            raise Refused(suspects)

    def _put_off(
        self,
        batch: Mapping[int, Entry],
        suspects: Mapping[int, Refusal],
        did: Dispatched,
        now_ms: int,
    ) -> None:
        """Out of the way with what the broker refused: later, alone, or as a dead letter."""
        aside = _Sorted()
        for count, (offset, refusal) in enumerate(suspects.items(), 1):
            entry = batch[offset]
            if refusal[0] in MAY_COME_BACK:
                self._retry_or_end(aside, offset, entry, refusal, now_ms)
            elif entry.alone or len(suspects) == 1:
                aside.deferred[offset] = self._as_letter(offset, entry, refusal, now_ms)
            else:
                later_ms = now_ms + ALONE_SPREAD_MS * count
                aside.deferred[offset] = later_ms, entry._replace(alone=True)
        letters = [
            why for o, why in suspects.items() if batch[o].reason and why[0] in MAY_COME_BACK
        ]
        if letters:
            self._say_that_letters_wait(len(letters), letters[0][1])
        aside.deferred |= {offset: (now_ms, entry) for offset, entry in aside.dead.items()}
        self._defer(aside.deferred, did, now_ms)

    def _say_that_letters_wait(self, count: int, why: str) -> None:
        logger.error("%s: %d dead letters stay pending: %s", self.shard, count, why)

    def _as_letter(
        self, offset: int, entry: Entry, refusal: Refusal, now_ms: int
    ) -> tuple[int, Entry]:
        """What the broker refused for good: a message as a dead letter, a dead letter in less."""
        reason, detail = refusal
        if entry.reason is None:
            return now_ms, _ended(entry, refusal)
        whole = None if _is_record(entry) else self._originals([offset]).get(offset)
        whole = whole or _as_record(offset, entry)
        if whole.value is not None:
            less = whole._replace(value=None)
        elif whole.key is not None or whole.headers:
            less = whole._replace(key=None, headers=[])
        else:
            logger.error("%s: its dead letter stays pending: %s", self.shard.source(offset), detail)
            return now_ms + LONGEST_RETRY_MS, entry
        told = f"shortened, the broker refused more ({reason}: {detail}); {entry.detail}"
        letter = refused_entry(less, Invalid(Reason(entry.reason), told), entry.due_ms)
        return now_ms, letter._replace(caller_id=entry.caller_id, alone=entry.alone)

    def _originals(self, offsets: Iterable[int]) -> dict[int, Record]:
        """The records of these valid requests as their callers wrote them."""
        return {
            offset: as_asked(record) if carried(record.headers) else record
            for offset, record in self.journal.records(offsets).items()
        }

    def _defer(self, changes: Mapping[int, PutOff], did: Dispatched, now_ms: int) -> None:
        if changes:
            try:
                self.index.defer(changes, now_ms)
            except IndexFull as full:
                logger.warning(
                    "%s: %s; %d deliveries are not put off but tried again at the next look",
                    self.shard, full, len(changes),
                )  # fmt: skip
                did.is_full = False
                return
            _count_put_off(did, changes)


def _receipt(
    dead: Mapping[int, Entry], places: Places, letters: Places, now_ms: int, read: int
) -> Receipt:
    undeliverable = [o for o, entry in dead.items() if entry.reason in UNDELIVERABLE]
    expired = [o for o, entry in dead.items() if entry.reason == Reason.EXPIRED]
    known = {*undeliverable, *expired}
    return Receipt(
        at_ms=now_ms,
        delivered=places,
        dead=undeliverable,
        expired=expired,
        invalid=[offset for offset in dead if offset not in known],
        letters=letters,
        read=read,
    )


def _count(did: Dispatched, ended: Mapping[int, Entry], dead: Mapping[int, Entry]) -> None:
    delivered = [entry for offset, entry in ended.items() if offset not in dead]
    did.due_ms += [entry.due_ms for entry in delivered]
    did.targets.update([entry.target for entry in delivered])
    for entry in dead.values():
        reason = entry.reason or ""
        did.dead[reason] = did.dead.get(reason, 0) + 1


def _count_put_off(did: Dispatched, changes: Mapping[int, PutOff]) -> None:
    if changes:
        did.retried += len(changes)
        first_ms = min(at_ms for at_ms, _ in changes.values())
        did.next_due_ms = min(first_ms, did.next_due_ms or first_ms)


def _ended(entry: Entry, refusal: Refusal) -> Entry:
    reason, detail = refusal
    return entry._replace(reason=reason, detail=detail, attempts=0, waits=0)


def _is_record(entry: Entry) -> bool:
    """Whether the entry holds the request's own record, as an invalid one does."""
    return not entry.target


def _as_record(offset: int, entry: Entry) -> Record:
    """What is left of a request whose record is gone from Kafka, or the record itself."""
    headers = [(name, v.encode() if isinstance(v, str) else v) for name, v in entry.headers]
    return Record(offset, entry.due_ms, entry.key, entry.message, headers)


def _lost(offset: int, now_ms: int) -> Entry:
    detail = (
        "the payload is gone from Redis and the record from Kafka; "
        "check maxmemory-policy and the request topic's retention.ms"
    )
    nothing = Record(offset, now_ms, None, None, [])
    return refused_entry(nothing, Invalid(Reason.PAYLOAD_LOST, detail), now_ms)
