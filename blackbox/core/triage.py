"""Triage of what is due: messages to send, to send alone, dead letters, and what waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from blackbox.core.due_batch import (
    MOST_LETTER_BYTES,
    DueBatch,
    as_dead,
    may_park,
    postpone_doubtful,
)  # fmt: skip
from blackbox.core.follow_ups import FollowUps
from blackbox.core.lost_payload import payload_lost
from blackbox.core.plan import DueEntries
from blackbox.core.ports import Journal, Rates, Targets
from blackbox.records import entry as entries
from blackbox.records.carried import original_if_carried
from blackbox.records.entry import Entry
from blackbox.records.errors import JournalLost
from blackbox.records.outgoing import Refusal, deliveries
from blackbox.records.request import Reason, Record, Shard

logger = logging.getLogger("blackbox.core.dispatch")

# Each takes a transaction of its own, for which the other messages of the shard wait.
ALONE_PER_TICK = 8
# In a backlog: reading the record from Kafka would take time from the messages of other shards.
LETTER_LATER_MS = 15_000

PAUSED: Refusal = (Reason.UNREACHABLE, "the target is paused; resume it with blackbox resume TOPIC")


@dataclass(frozen=True, slots=True)
class Triage:
    """Decides what happens to each request that is due in one shard.

    `reread` makes an entry from a request's record again; its second argument is the cause for which that
    was refused. `follow_ups` are written with the outcomes of some requests. `retries` is how often an
    unavailable target is tried again, after 1, 2, 4 … 60 s, before the request becomes a dead letter.
    Without `rates` there are no rate limits.
    """

    shard: Shard
    targets: Targets
    journal: Journal
    reread: Callable[[Record, str | None], Entry]
    dead_letter_topic: str
    follow_ups: FollowUps
    retries: int = 5
    rates: Rates | None = None

    def divide(self, due: DueEntries, now_ms: int) -> DueBatch:
        """Decide what to do with a batch that is due."""
        batch = DueBatch()
        for offset, entry in self._decoded(batch, due, now_ms).items():
            if offset in due.doubtful:
                batch.postponed[offset] = postpone_doubtful(entry, due.doubtful[offset], now_ms)
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
            del batch.alone[offset]
            batch.postpone_spread(offset, now_ms)
        self._set_unavailable_aside(batch, now_ms, due)
        batch.park_behind_backlogs(due, () if self.rates is None else self.rates.limited())
        # late: it depends on whether any message is ready
        self._set_refused_aside(batch, now_ms, is_backlog=due.is_full)
        batch.postpone_distant_letters(now_ms)
        return batch

    def _decoded(self, batch: DueBatch, due: DueEntries, now_ms: int) -> dict[int, Entry]:
        decoded: dict[int, Entry] = {}
        lost: list[int] = []
        for offset, stored in due.entries:
            try:
                decoded[offset] = entries.decode(stored or b"")
            except ValueError as unreadable:
                why = unreadable if stored else "no payload in Redis"
                if stored or offset not in due.refused:
                    logger.warning(
                        "%s: %s; reading it again from Kafka", self.shard.source(offset), why
                    )
                lost.append(offset)
        if lost:
            decoded |= self._read_again(batch, lost, due.refused, now_ms)
        return decoded

    def _read_again(
        self, batch: DueBatch, lost: Sequence[int], refused: Mapping[int, str], now_ms: int
    ) -> dict[int, Entry]:
        """The first of these entries, from their records; the others are postponed."""
        near = batch.close_together(lost, now_ms)
        found, left = self.journal.first_records(near, MOST_LETTER_BYTES)
        batch.postponed |= dict.fromkeys(left, (now_ms, None))
        batch.records |= found
        batch.without_payload = refused.keys()
        again: dict[int, Entry] = {}
        for offset in near:
            if offset in left:
                continue
            again[offset] = (
                self.reread(found[offset], refused.get(offset))
                if offset in found
                else payload_lost(offset, now_ms, refused.get(offset))
            )
        return again

    def released(self, parked: Iterable[str], paused: Collection[str]) -> set[str]:
        """The targets whose parked entries come out: those that are available, or may not be parked for."""
        all_topics = {to: to or self.dead_letter_topic for to in parked}
        topics = {to: topic for to, topic in all_topics.items() if topic not in paused}
        try:
            refusals = self.targets.unavailable(set(topics.values())) if topics else {}
        except JournalLost:
            return set()  # parked entries can wait until the brokers answer
        return {
            to
            for to, topic in topics.items()
            if topic not in refusals or not may_park(to, refusals[topic])
        }

    def _set_unavailable_aside(self, batch: DueBatch, now_ms: int, due: DueEntries) -> None:
        paused = due.paused
        destinations = {entry.target for entry in batch.ready.values()}
        destinations |= {self.destination(entry) for entry in batch.alone.values()}
        follow_up_topics = self._follow_up_topics(batch)
        others = {topic for topics in follow_up_topics.values() for topic in topics}
        asked_for = {*destinations, *others, self.dead_letter_topic}
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
                refusal = unavailable.get(self.destination(entry))
                if refusal is not None and batch.park_if_possible(
                    offset, entry, refusal, due.parked
                ):
                    del part[offset]
                    continue
                # it cannot end without its follow-ups, even as a dead letter: retried without limit
                for topic in follow_up_topics.get(offset, ()) if refusal is None else ():
                    if topic in unavailable:
                        refusal = Reason.UNREACHABLE, unavailable[topic][1]
                if refusal is not None:
                    del part[offset]
                    batch.retry_or_end(offset, entry, refusal, self.retries, now_ms)
        waiting = sum(
            entry is not None and entry.reason is not None for _, entry in batch.postponed.values()
        )
        if waiting and self.dead_letter_topic in unavailable:
            self.log_waiting_letters(waiting, unavailable[self.dead_letter_topic][1])

    def _follow_up_topics(self, batch: DueBatch) -> dict[int, tuple[str, ...]]:
        everything = {**batch.ready, **batch.alone, **batch.dead}
        if not self.follow_ups.has_some(everything.values()):
            return {}
        return {offset: self.follow_ups.topics(entry) for offset, entry in everything.items()}

    def _set_refused_aside(self, batch: DueBatch, now_ms: int, *, is_backlog: bool) -> None:
        """Make dead letters of what topics would refuse, after ready messages; in a backlog, check again."""
        # each dead letter needs a read of its record in Kafka; ready messages would wait for it
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
            batch.postponed |= dict.fromkeys(refused, (now_ms + LETTER_LATER_MS, None))
        else:
            batch.postponed |= {offset: (now_ms, entry) for offset, entry in refused.items()}

    def destination(self, entry: Entry) -> str:
        """The topic that an entry is sent to."""
        return entry.target if entry.reason is None else self.dead_letter_topic

    def reported_unavailable(
        self, topics: Collection[str], *, refresh: bool = False
    ) -> Mapping[str, Refusal]:
        """The topics that the brokers report as unavailable; none if they do not answer in time."""
        try:
            return self.targets.unavailable(topics, refresh=refresh) if topics else {}
        except JournalLost:
            return {}

    def log_waiting_letters(self, count: int, why: str) -> None:
        logger.error("%s: %d dead letters stay pending: %s", self.shard, count, why)

    def originals(self, offsets: Collection[int], known: Mapping[int, Record]) -> dict[int, Record]:
        """The records of these requests as their callers wrote them, as far as Kafka has them.

        `known` are records that were read already.
        """
        found = {offset: known[offset] for offset in offsets if offset in known}
        found |= self.journal.records(offset for offset in offsets if offset not in found)
        return {offset: original_if_carried(record) for offset, record in found.items()}
