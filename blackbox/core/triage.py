"""Triage of what is due: messages to send, to send alone, dead letters, and what waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from blackbox.core.follow_ups import FollowUps
from blackbox.core.intake import refused_entry
from blackbox.core.parking import LETTERS, band_of, parked_at, waits_for
from blackbox.core.plan import Due, Postponed
from blackbox.core.ports import Journal
from blackbox.records import entry as entries
from blackbox.records.carried import as_asked, carried
from blackbox.records.entry import Entry
from blackbox.records.errors import IndexFull, IndexLost, JournalLost, RecoveryRequired
from blackbox.records.outgoing import FORMS, Refusal, deliveries
from blackbox.records.receipt import Claim
from blackbox.records.request import MAY_COME_BACK, Invalid, Reason, Record, Shard
from blackbox.records.topic_limits import Limits

logger = logging.getLogger("blackbox.core.dispatch")

FIRST_RETRY_MS = 1_000
LONGEST_RETRY_MS = 60_000
ALONE_PER_TICK = 8
ALONE_SPREAD_MS = 50
MOST_LETTER_BYTES, MOST_LETTER_SPAN = 16_000_000, 4000
"""Bytes (or one larger record) and offsets to read from Kafka for the dead letters of one transaction."""
REFRESH_MS = 900_000
DOUBTFUL_LATER_MS = 5_000
LETTER_LATER_MS = 15_000
"""Delay in a backlog: reading the record from Kafka would take time from the messages of other shards."""

OF_A_TOPIC = MAY_COME_BACK - {Reason.BROKER_ERROR}
"""Refusals of whatever is sent there. Any other is given to each record of a batch, for the fault of one."""

QUEUED = "waiting behind earlier messages for the same target"

PAUSED: Refusal = (
    Reason.UNREACHABLE,
    "the target is paused; resume it with blackbox resume TOPIC",
)


class Targets(Protocol):
    """Which of the given topics cannot take messages now, what some of them refuse, and their ids."""

    def unavailable(
        self, topics: Iterable[str], *, anew: bool = False
    ) -> Mapping[str, Refusal]: ...
    def limits(self, topics: Collection[str]) -> Mapping[str, Limits]: ...
    def take_no_batch(self, topics: Iterable[str]) -> None: ...
    def ids(self, topics: Iterable[str]) -> Mapping[str, str]: ...


class Pace(Protocol):
    """The rate limits of targets."""

    def limited(self) -> Collection[str]: ...
    def times(self, target: str, due_ms: Sequence[int], now_ms: int) -> Sequence[int]: ...
    def give_back(self, target: str, count: int) -> None: ...


@dataclass(slots=True)
class Sorted:
    """A batch, each request in one of four places; `parked` maps bands to the targets parked for."""

    ready: dict[int, Entry] = field(default_factory=dict)
    alone: dict[int, Entry] = field(default_factory=dict)
    dead: dict[int, Entry] = field(default_factory=dict)
    deferred: dict[int, Postponed] = field(default_factory=dict)
    parked: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Triage:
    """Decides what happens to each request that is due in one shard.

    `reread` makes an entry from a request's record again. `follow_ups` are written with the outcomes
    of some requests. `retries` is how often an unavailable target is tried again, after 1, 2, 4 …
    60 s, before the request becomes a dead letter. Without a `pace` there are no rate limits.
    """

    shard: Shard
    targets: Targets
    journal: Journal
    reread: Callable[[Record], Entry]
    dead_letter_topic: str
    follow_ups: FollowUps
    retries: int = 5
    pace: Pace | None = None

    def sort(self, due: Due, now_ms: int) -> Sorted:
        """Decide what to do with a batch that is due."""
        batch = Sorted()
        for offset, entry in self._decoded(due, now_ms).items():
            if offset in due.doubtful:
                batch.deferred[offset] = _doubtful_later(entry, due.doubtful[offset], now_ms)
                continue
            if entry.expires_ms is not None and entry.expires_ms < now_ms and not entry.reason:
                detail = f"due {now_ms - entry.due_ms} ms ago, which exceeds expires_after"
                entry = as_dead(entry, (Reason.EXPIRED, detail))
            if entry.alone:
                batch.alone[offset] = entry
            elif entry.reason is not None:
                batch.dead[offset] = entry
            else:
                batch.ready[offset] = entry
        for offset in list(batch.alone)[ALONE_PER_TICK:]:
            later_ms = now_ms + ALONE_SPREAD_MS * (1 + len(batch.deferred))
            del batch.alone[offset]
            batch.deferred[offset] = later_ms, None
        self._set_unavailable_aside(batch, now_ms, due)
        self._set_behind_the_parked(batch, due)
        self._set_large_aside(batch, now_ms)
        self._set_refused_aside(batch, now_ms, is_backlog=due.is_full)
        return batch

    def hold_back(self, batch: Sorted, now_ms: int) -> dict[str, int]:
        """Defer what exceeds its target's rate limit; return how many, by target.

        What was due first goes first.
        """
        limited = self.pace.limited() if self.pace is not None else frozenset[str]()
        waiting: dict[str, list[int]] = {}
        for offset, entry in batch.ready.items() if limited else ():
            if entry.target in limited:
                waiting.setdefault(entry.target, []).append(offset)
        later: dict[str, int] = {}
        for target, offsets in waiting.items():
            assert self.pace is not None
            offsets.sort(key=lambda offset: batch.ready[offset].due_ms)
            due_ms = [batch.ready[offset].due_ms for offset in offsets]
            try:
                times = self.pace.times(target, due_ms, now_ms)
            except (IndexFull, IndexLost):  # no rate limit then: deliveries make room
                continue
            for offset, at_ms in zip(offsets, times, strict=True):
                if at_ms > now_ms:
                    del batch.ready[offset]
                    batch.deferred[offset] = at_ms, None
                    later[target] = later.get(target, 0) + 1
        return later

    def give_back(self, later: Mapping[str, int]) -> None:
        """Give back the times that were reserved for messages that are read again now."""
        for target, count in later.items():
            assert self.pace is not None
            with suppress(RecoveryRequired, IndexFull):
                self.pace.give_back(target, count)

    def _decoded(self, due: Due, now_ms: int) -> dict[int, Entry]:
        batch: dict[int, Entry] = {}
        lost: list[int] = []
        for offset, stored in due.entries:
            try:
                batch[offset] = entries.decode(stored or b"")
            except ValueError as unreadable:
                why = unreadable if stored else "no payload in Redis"
                logger.warning(
                    "%s: %s; reading it again from Kafka", self.shard.source(offset), why
                )
                lost.append(offset)
        found = self.journal.records(lost) if lost else {}
        for offset in lost:
            batch[offset] = (
                self.reread(found[offset]) if offset in found else payload_lost(offset, now_ms)
            )
        return batch

    def released(self, parked: Iterable[str], paused: Collection[str]) -> set[str]:
        """The targets whose parked entries come out: those that are available, or may not be parked for."""
        all_topics = {to: to or self.dead_letter_topic for to in parked}
        topics = {to: topic for to, topic in all_topics.items() if topic not in paused}
        try:
            refusals = self.targets.unavailable(set(topics.values())) if topics else {}
        except JournalLost:
            return set()
        return {
            to
            for to, topic in topics.items()
            if topic not in refusals or not _may_park(to, refusals[topic])
        }

    def _set_unavailable_aside(self, batch: Sorted, now_ms: int, due: Due) -> None:
        paused = due.paused
        wanted = {entry.target for entry in batch.ready.values()}
        wanted |= {self._destination(entry) for entry in batch.alone.values()}
        ending = self._ending(batch)
        others = {topic for topics in ending.values() for topic in topics}
        asked_for = {*wanted, *others, self.dead_letter_topic}
        unavailable = {
            **self.targets.unavailable(asked_for.difference(paused)),
            **dict.fromkeys(asked_for.intersection(paused), PAUSED),
        }
        for topic in others & unavailable.keys():
            logger.error(
                "%s: recurring and scheduled requests wait: %s", self.shard, unavailable[topic][1]
            )
        for part in (batch.ready, batch.alone, batch.dead) if unavailable else ():
            for offset, entry in list(part.items()):
                refusal = unavailable.get(self._destination(entry))
                if refusal is not None and _parks(batch, offset, entry, refusal, due.parked):
                    del part[offset]
                    continue
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
            self.log_waiting_letters(waiting, unavailable[self.dead_letter_topic][1])

    def _set_behind_the_parked(self, batch: Sorted, due: Due) -> None:
        """Park what comes due for a target with a backlog, so that it goes out in the order of due times."""
        for part in (batch.ready, batch.alone) if due.backlogs else ():
            for offset, entry in list(part.items()):
                is_new = offset not in due.released and not entry.expires_ms
                if is_new and waits_for(entry) in due.backlogs:
                    del part[offset]
                    _park(batch, offset, entry, QUEUED)

    def _ending(self, batch: Sorted) -> dict[int, tuple[str, ...]]:
        """The topics of each request's follow-ups."""
        everything = {**batch.ready, **batch.alone, **batch.dead}
        if not self.follow_ups.has_some(everything.values()):
            return {}
        return {offset: self.follow_ups.topics(entry) for offset, entry in everything.items()}

    def _set_refused_aside(self, batch: Sorted, now_ms: int, *, is_backlog: bool) -> None:
        """Make dead letters of what topics would refuse, after ready messages; in a backlog, check again."""
        messages = batch.ready | {o: e for o, e in batch.alone.items() if e.reason is None}
        limits = self.targets.limits({entry.target for entry in messages.values()})
        strict = {offset: entry for offset, entry in messages.items() if entry.target in limits}
        refused: dict[int, Entry] = {}
        for message in deliveries(self.shard, strict):
            refusal = limits[message.topic].refusal(message)
            if refusal is not None:
                offset = message.offset
                refused[offset] = as_dead(strict[offset], refusal)
                del (batch.alone if offset in batch.alone else batch.ready)[offset]
        if not batch.ready:
            batch.dead |= refused
        elif is_backlog:
            batch.deferred |= dict.fromkeys(refused, (now_ms + LETTER_LATER_MS, None))
        else:
            batch.deferred |= {offset: (now_ms, entry) for offset, entry in refused.items()}

    def _set_large_aside(self, batch: Sorted, now_ms: int) -> None:
        """Defer dead letters whose records are in Kafka, except some close together.

        Messages would wait for the read.
        """
        large = sorted(offset for offset, entry in batch.dead.items() if entry.left_bytes)
        read_bytes = 0
        for offset in large:
            read_bytes += batch.dead[offset].left_bytes
            if offset - large[0] > MOST_LETTER_SPAN:
                del batch.dead[offset]
                later_ms = now_ms + ALONE_SPREAD_MS * (1 + len(batch.deferred))
                batch.deferred[offset] = later_ms, None
            elif read_bytes > MOST_LETTER_BYTES and offset != large[0]:
                del batch.dead[offset]
                batch.deferred[offset] = now_ms, None

    def _destination(self, entry: Entry) -> str:
        return entry.target if entry.reason is None else self.dead_letter_topic

    def _retry_or_end(
        self, batch: Sorted, offset: int, entry: Entry, refusal: Refusal, now_ms: int
    ) -> None:
        reason, detail = refusal
        is_over = entry.attempts >= self.retries and reason != Reason.UNREACHABLE
        if is_over and entry.reason is None:
            detail = f"{detail}, tried {entry.attempts + 1} times"
            batch.dead[offset] = as_dead(entry, (reason, detail))
            return
        if reason == Reason.UNREACHABLE:  # retried without limit, and not counted as an attempt
            count, later = entry.waits, entry._replace(waits=entry.waits + 1)
        else:
            count, later = entry.attempts, entry._replace(attempts=entry.attempts + 1, waits=0)
            detail = f"{detail}; attempt {later.attempts} of {self.retries + 1}"
        if entry.reason is None:
            later = later._replace(detail=detail)
        wait_ms = min(FIRST_RETRY_MS << min(count, 10), LONGEST_RETRY_MS)
        goes_on = reason == Reason.UNREACHABLE and entry.detail == later.detail
        if goes_on and wait_ms == LONGEST_RETRY_MS and not _is_to_be_refreshed(now_ms, wait_ms):
            batch.deferred[offset] = now_ms + wait_ms, None
        else:
            batch.deferred[offset] = now_ms + wait_ms, later

    def postpone(
        self,
        batch: Mapping[int, Entry],
        suspects: Mapping[int, Refusal],
        parked: Mapping[int, str],
        now_ms: int,
        apart: Collection[int] = (),
    ) -> dict[int, Postponed]:
        """Postpone what the broker refused: parked, later, alone, or as a dead letter.

        `apart` was sent in record batches of its own, so a refusal is its own fault.
        """
        aside, crowded = Sorted(), set[str]()
        gone = (o for o, why in suspects.items() if why[0] == Reason.UNREACHABLE)
        away = self._away({self._destination(batch[o]) for o in gone})
        for count, (offset, refusal) in enumerate(suspects.items(), 1):
            entry = batch[offset]
            # its follow-ups share a batch with those of others, and may be what was refused
            has_ending = bool(self.follow_ups.topics(entry))
            is_apart = offset in apart and not has_ending
            is_alone = entry.alone or len(suspects) == 1 or is_apart
            told = away.get(self._destination(entry))
            if told is not None and _parks(aside, offset, entry, told, parked):
                continue
            is_crowded = refusal[0] == Reason.TOO_LARGE and not has_ending
            if is_crowded and not is_alone:  # all of them together may be too large
                crowded.add(self._destination(entry))
                aside.deferred[offset] = now_ms + ALONE_SPREAD_MS, entry
            elif not is_alone and refusal[0] not in OF_A_TOPIC:
                later_ms = now_ms + ALONE_SPREAD_MS * count
                aside.deferred[offset] = later_ms, entry._replace(alone=True)
            elif refusal[0] in MAY_COME_BACK and not self._is_given_up(entry, refusal):
                self._retry_or_end(aside, offset, entry, refusal, now_ms)
            else:
                aside.deferred[offset] = self._as_letter(offset, entry, refusal, now_ms)
        self.targets.take_no_batch(crowded)
        letters = [
            why for o, why in suspects.items() if batch[o].reason and why[0] in MAY_COME_BACK
        ]
        if letters:
            self.log_waiting_letters(len(letters), letters[0][1])
        return aside.deferred | {offset: (now_ms, entry) for offset, entry in aside.dead.items()}

    def _away(self, targets: Collection[str]) -> Mapping[str, Refusal]:
        """The targets that the brokers report as unreachable; others did not answer in time."""
        try:
            return self.targets.unavailable(targets) if targets else {}
        except JournalLost:
            return {}

    def _is_given_up(self, letter: Entry, refusal: Refusal) -> bool:
        """Whether a dead letter was refused often enough, for a reason that may be in its content."""
        has_tried = letter.attempts >= self.retries
        return letter.reason is not None and refusal[0] not in OF_A_TOPIC and has_tried

    def log_waiting_letters(self, count: int, why: str) -> None:
        logger.error("%s: %d dead letters stay pending: %s", self.shard, count, why)

    def _as_letter(
        self, offset: int, entry: Entry, refusal: Refusal, now_ms: int
    ) -> tuple[int, Entry]:
        """Handle a final refusal: a message becomes a dead letter, a dead letter takes a smaller form."""
        reason, detail = refusal
        if entry.reason is None:
            return now_ms, as_dead(entry, refusal)
        if entry.shortened + 1 == FORMS:
            logger.error("%s: its dead letter stays pending: %s", self.shard.source(offset), detail)
            return now_ms + LONGEST_RETRY_MS, entry
        told = (
            f"shortened, because the broker refused the full letter ({reason}: {detail}); "
            f"{entry.detail}"
        )
        return now_ms, entry._replace(shortened=entry.shortened + 1, detail=told)

    def originals(self, offsets: Iterable[int]) -> dict[int, Record]:
        """The records of these requests as their callers wrote them, as far as Kafka has them."""
        found = dict(self.journal.records(offsets))
        for offset, record in found.items():
            if carried(record.headers):
                with suppress(ValueError):  # not written by blackbox, and refused for that
                    found[offset] = as_asked(record)
        return found


def _parks(
    batch: Sorted, offset: int, entry: Entry, refusal: Refusal, parked: Mapping[int, str]
) -> bool:
    """Park an entry if possible; return whether it was parked.

    Messages that expire are not parked, nor is what would share a band with another target.
    """
    to = waits_for(entry)
    if not _may_park(to, refusal) or (to != LETTERS and entry.expires_ms):
        return False
    if batch.parked.setdefault(band_of(to), parked.get(band_of(to), to)) != to:
        return False
    _park(batch, offset, entry, refusal[1])
    return True


def _may_park(to: str, refusal: Refusal) -> bool:
    """Whether a refusal allows parking.

    A dead letter waits for its topic, whatever that lacks. A message waits only while its target is
    unreachable.
    """
    return refusal[0] == Reason.UNREACHABLE or (to == LETTERS and refusal[0] in OF_A_TOPIC)


def _park(batch: Sorted, offset: int, entry: Entry, why: str) -> None:
    if entry.reason is not None:  # a dead letter's detail is for its reader
        entry = entry._replace(waits=max(1, entry.waits))
    elif entry.waits == 0 or entry.detail != why:
        entry = entry._replace(waits=entry.waits + 1, detail=why)
    batch.deferred[offset] = parked_at(band_of(waits_for(entry)), entry.due_ms), entry


def _doubtful_later(entry: Entry, claim: Claim, now_ms: int) -> Postponed:
    """Postpone a request of which it is not known whether it was delivered."""
    why = f"cannot read yet whether it was delivered to {claim.at} at {claim.there}"
    told = entry._replace(waits=entry.waits + 1)
    if entry.reason is None:
        told = told._replace(detail=why)
    at_ms = now_ms + DOUBTFUL_LATER_MS
    goes_on = entry.detail == told.detail and not _is_to_be_refreshed(now_ms, DOUBTFUL_LATER_MS)
    return at_ms, None if goes_on else told


def _is_to_be_refreshed(now_ms: int, wait_ms: int) -> bool:
    """Whether a waiting payload is written again: Redis keeps it at least an hour beyond its time."""
    return now_ms // REFRESH_MS != (now_ms - wait_ms) // REFRESH_MS


def as_dead(entry: Entry, refusal: Refusal) -> Entry:
    """The dead letter that a request becomes."""
    reason, detail = refusal
    return entry._replace(reason=reason, detail=detail, attempts=0, waits=0)


RECORD_GONE = "the record was too large for Redis and is no longer in Kafka"


def is_record(entry: Entry) -> bool:
    """Whether the entry holds the request's own record, as an invalid one does."""
    return not entry.target


def as_record(offset: int, entry: Entry) -> Record:
    """The record itself, or what is left of a request whose record is gone from Kafka."""
    headers = [(name, v.encode() if isinstance(v, str) else v) for name, v in entry.headers]
    return Record(offset, entry.due_ms, entry.key, entry.message, headers)


def payload_lost(offset: int, now_ms: int) -> Entry:
    """The entry for a dead letter in place of a request of which nothing is left."""
    detail = (
        "the payload is missing in Redis and the record in Kafka; check maxmemory-policy and the "
        "request topic's retention.ms"
    )
    nothing = Record(offset, now_ms, None, None, [])
    return refused_entry(nothing, Invalid(Reason.PAYLOAD_LOST, detail), now_ms)
