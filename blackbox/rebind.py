"""What becomes of an index that belongs to another topic, cluster or group than what is there now.

A shard whose index does not fit stays closed, as nobody but a person knows which of the two is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import count as count_on
from typing import Literal, NamedTuple

from tenacity import (
    Retrying,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_after_attempt,
)

from blackbox.barrier import commit_barrier
from blackbox.clock import Clock
from blackbox.connect import formats, kafka
from blackbox.doubt import Doubt, JournalLost, NotAllowed
from blackbox.index.connection import pool
from blackbox.index.shard_index import ShardIndex
from blackbox.intake import parse, touched_by
from blackbox.journal.partition_reader import PartitionReader
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.journal.trim import Trimmer
from blackbox.journal.writer import Writer
from blackbox.leftovers import Era, Leftovers, Newer, Rebound, again, check_note, next_batch
from blackbox.marks import Recreated, Shortened, foreign_group, is_another, newest_mark, openers
from blackbox.plan import Bounds, Kept, Labels, Rebinding, Tail
from blackbox.receipt import Mark, Receipt
from blackbox.recovery import CLOCKS_APART_MS
from blackbox.request import Cancel, Shard, offset_in
from blackbox.settings import Settings

LARGEST_BYTES = "1000000000"

patiently = Retrying(
    retry=retry_if_exception_type(JournalLost) & retry_if_not_exception_type(NotAllowed),
    stop=stop_after_attempt(3),
    reraise=True,
)
"""Receipts cannot be read to their end while the transaction of a killed owner of another group is open: for its
timeout of 20 s, and until the broker looks for such ones, every 10 s. A read gives up after 15 s.
"""

Pending = Literal["deliver", "drop"]
FITS = "it fits already"
NO_INDEX = "it has no index, and needs no decision"


@dataclass(frozen=True, slots=True)
class _Decision:
    """What is to be done with an index: its leftovers of an `era` that is over leave it, the labels are set.

    Without labels nothing is. `is_begun`: it is emptied, as none of its requests is in the topic.
    `is_stale`: it is discarded, as it is older than an opening of the topic that is there now.
    `unknown_ms`: the receipts that are there do not tell what became of requests that were due before.
    """

    index: ShardIndex
    why: str
    labels: Labels | None = None
    era: Era | None = None
    is_begun: bool = False
    is_stale: bool = False
    unknown_ms: int = 0


def rebind(settings: Settings, topic: str, pending: Pending) -> list[Rebound]:
    """Let the indexes of a request topic belong to what is there now; those that do already stay.

    What is pending under other topics of the same name, or behind the end of one that became shorter,
    is written again as new requests (`deliver`) or forgotten (`drop`). What a group or a new receipts
    topic changes loses nothing. An index of another topic, or of other receipts, is only emptied if receipts tell that
    its group has opened what is there already: Redis went back to before that, and what is pending is in the journals.
    What it has of an earlier topic may have been written again then, and becomes dead letters.
    Raises a Doubt when Kafka or Redis does not answer: run it again.

    1. decide for all indexes, before a request that is written again can move the end of any journal;
    2. note in each what was decided: from then on nobody opens it, and a second run finds the same;
    3. take its shard over, so that no earlier owner delivers any more, and remove what receipts say has ended;
    4. write the rest again, but what callers have replaced or cancelled since, each thousand in one transaction with
       a receipt that tells it; then bind the index to what is there;
    5. where the newest receipts are of another group, say in Kafka that they are ours from now on.
    """
    with ExitStack() as ending:
        run = _Run(settings, topic, pending, ending)
        decisions = run.decide()
        run.prepare(decisions)
        return [run.carry_out(decision) for decision in decisions]


class _Run:
    """One run, and what it has open."""

    def __init__(self, settings: Settings, topic: str, pending: Pending, ending: ExitStack) -> None:
        access = kafka(settings)
        self._topics = topics = Topics(access.admin())
        found = topics.partitions([topic])
        if topic not in found:
            raise JournalLost(f"there is no topic {topic}")
        receipts = receipts_topic(topic)
        found |= topics.partitions([receipts], to="Read")
        if receipts not in found:
            raise JournalLost(f"there is no topic {receipts}; start a service, which creates it")
        self._count, self._receipts_count = found[topic], found[receipts]
        self._access = access
        # What a caller's client could compress was taken from it, however large it is without.
        largest = {"message.max.bytes": LARGEST_BYTES} | dict(access.settings)
        self._large = replace(access, settings=largest)
        self._topic = topic
        self._pending = pending
        self._contract = settings.topics[topic]
        self._dead_letter_topic = settings.dead_letter_topic
        self._exactly_once = settings.delivery == "exactly-once"
        self._grace_s = settings.grace_s
        self._connections = pool(settings.redis_url.get_secret_value())
        self._trimmer = Trimmer(access, retention_ms=0)
        self._reader = ending.enter_context(closing(PartitionReader(access)))
        self._ending = ending
        self._ours = self._journal(0).binding(settings.group_id)
        self._keeps_partitions = True
        self._format = formats(settings)[topic]
        self._written_before = {p: self._journal(p).settled_bounds() for p in range(self._count)}
        self._known_newer: dict[int, Newer] = {}

    def decide(self) -> list[_Decision]:
        """For each partition that there is, and each that has an index from when there were more."""
        decisions: list[_Decision] = []
        for partition in count_on():
            shard = Shard(self._topic, partition)
            index = ShardIndex(shard, self._connections, grace_s=self._grace_s)
            self._ending.callback(index.close)
            kept = index.load()
            if kept is None and partition >= max(self._count, self._receipts_count):
                break
            decision = patiently(self._decide, index, kept)
            if partition < self._count or decision.labels is not None or decision.is_stale:
                decisions.append(decision)
        self._keeps_partitions = _keep_partitions(decisions, self._count)
        return decisions

    def _decide(self, index: ShardIndex, kept: Kept | None) -> _Decision:
        partition = index.shard.partition
        journal = self._journal(partition)
        requests = journal.request_bounds() if partition < self._count else Bounds(0, 0)
        receipts = journal.receipt_bounds() if self._has_receipts(partition) else Bounds(0, 0)
        if kept is None or kept.binding is None:
            return self._begin(index, journal, requests, receipts)
        same = kept.binding.receipts_id == self._ours.receipts_id
        if kept.binding.topic_id != self._ours.topic_id:
            opened_by = self._opened_by(journal, partition)
            is_open = self._has_receipts(partition) and not opened_by
            is_asked_before = bool(opened_by & {self._ours.group, kept.binding.group})
            why = "an index of before the topic was opened" if is_asked_before else "another topic"
            labels = None if opened_by else Labels(requests.start, receipts.end)
            has_label = same and self._has_receipts(partition)
            era = Era(kept.binding, 0, False, is_open, has_label, is_asked_before)
            return _Decision(
                index, why, labels, era, is_begun=not opened_by, is_stale=bool(opened_by)
            )
        if not same and self._opened_by(journal, partition):
            why = "an index of before its receipts topic was opened"
            return _Decision(index, why, is_stale=True)
        at = kept.labels
        is_untold = not same or at.receipts > receipts.end
        unknown_ms = Clock().latest_ms() + CLOCKS_APART_MS if is_untold else 0
        told = receipts.end if is_untold else at.receipts
        is_shorter = at.requests > requests.end or at.receipts > receipts.end
        lost = requests.end if is_shorter else _replaced(journal, kept.tail)
        noted = kept.rebinding
        if noted is not None and noted.topic_id != self._ours.topic_id:
            why = "an index that was to be bound to another topic"
            return _Decision(index, why, is_stale=True)
        if noted is not None or lost is not None:
            cut = (
                _Cut()
                if is_untold
                else _cut_since(journal, max(told, receipts.start), receipts.end)
            )
            first = min(at for at in (lost, noted and noted.first, cut.first) if at is not None)
            era = Era(kept.binding, first, is_cut=True, is_open=not is_untold, has_label=same)
            if cut.is_over:
                why = "an index of before a journal became shorter"
                era = replace(era, is_open=False, is_asked_before=True)
                return _Decision(index, why, era=era, is_stale=True)
            labels, why = Labels(min(at.requests, first), told), "a journal became shorter"
            return _Decision(index, why, labels, era, unknown_ms=unknown_ms)
        if kept.binding == self._ours:
            return _Decision(index, FITS)
        why, labels = "another group, or other receipts", at._replace(receipts=told)
        return _Decision(index, why, labels, unknown_ms=unknown_ms)

    def _opened_by(self, journal: ShardJournal, partition: int) -> set[str]:
        return openers(journal, self._ours.topic_id) if self._has_receipts(partition) else set()

    def _begin(
        self, index: ShardIndex, journal: ShardJournal, requests: Bounds, receipts: Bounds
    ) -> _Decision:
        """Where Redis knows nothing: what the last owner's receipts speak of is not to be believed."""
        if index.shard.partition < min(self._count, self._receipts_count):
            try:
                newest_mark(index.shard, journal, self._ours.topic_id)
            except Recreated:
                labels = Labels(requests.start, receipts.end)
                return _Decision(index, "another topic", labels, is_begun=True)
            except Shortened:  # all that is left of it had ended
                labels = Labels(requests.end, receipts.end)
                return _Decision(index, "a journal became shorter", labels, is_begun=True)
        return _Decision(index, NO_INDEX)

    def prepare(self, decisions: Sequence[_Decision]) -> None:
        moving = [(one.index, one.era) for one in decisions if one.era is not None]
        if self._pending == "deliver" and self._contract != "countdown":
            for index, era in moving:
                self._check_format(index, era.first)
        for index, era in moving:
            index.prepare(self._note(era))

    def _note(self, era: Era) -> Rebinding:
        return Rebinding(self._ours.topic_id, era.first)

    def _check_format(self, index: ShardIndex, first: int) -> None:
        passed: set[int] = set()
        while batch := next_batch(index, first, passed):
            if any(entry is not None and entry.target for entry in batch.values()):
                raise Doubt(
                    f"{index.shard}: what is pending was asked in the format {self._contract}, in which "
                    "blackbox cannot ask for it again; run it with --pending drop, and let callers ask "
                    "again"
                )
            passed.update(batch)

    def carry_out(self, decision: _Decision) -> Rebound:
        index, labels, era = decision.index, decision.labels, decision.era
        done = Rebound(index.shard, decision.why)
        if era is not None:
            done.cold = index.count_cold() if era.first == 0 else 0
            leftovers = self._leftovers(index, era, done)
            if self._pending == "deliver":
                leftovers.ask_again()
            else:
                leftovers.drop()
        if decision.is_stale:
            index.discard()  # what is in the journals comes back from there
        if labels is not None and decision.is_begun:
            self._begin_at(index, labels, era)
        elif labels is not None:
            if self._has_receipts(index.shard.partition):
                if era is not None and era.is_open:
                    labels = labels._replace(receipts=index.labels.receipts)
                cut = [] if era is None else [era.first]
                self._say(index, labels, era, cut=cut, unknown_ms=decision.unknown_ms)
            index.rebind(labels, self._ours, decision.unknown_ms)
        if self._has_receipts(index.shard.partition):
            self._take_over_receipts(index, done)
        return done

    def _leftovers(self, index: ShardIndex, era: Era, done: Rebound) -> Leftovers:
        shard = index.shard
        return Leftovers(
            index,
            self._journal(shard.partition),
            era,
            done,
            writer=lambda: Writer(shard, self._large, exactly_once=self._exactly_once),
            newer=lambda: self._newer_since(shard, era),
            note=self._note(era),
            group=self._ours.group,
            partition=shard.partition if self._keeps_partitions else -1,
            topics=self._topics,
            dead_letter_topic=self._dead_letter_topic,
        )

    def _take_over_receipts(self, index: ShardIndex, done: Rebound) -> None:
        """A barrier of ours behind another group's: whatever Redis has, the next owner finds it the newest."""
        journal = self._journal(index.shard.partition)
        if not patiently(foreign_group, journal, self._ours.group, since=0):
            return
        labels = Labels(max(0, index.labels.requests), max(0, index.labels.receipts))
        self._say(index, labels)
        if done.why in (FITS, NO_INDEX):
            done.why = "another group"

    def _begin_at(self, index: ShardIndex, labels: Labels, era: Era | None) -> None:
        """Behind a barrier with a mark: earlier receipts tell of other requests under the ids of these, and go."""
        shard, mark = index.shard, Mark(*labels)
        is_said = self._has_receipts(shard.partition)
        if is_said:
            labels, mark = self._say(index, labels, era, is_begun=True)
        if shard.partition < self._count:
            index.begin(labels, binding=self._ours, mark=mark)
        else:
            index.discard()
        if is_said:  # without a mark behind them, what was delivered would be unknown
            self._trimmer.remove_receipts(shard, mark.receipts)

    def _has_receipts(self, partition: int) -> bool:
        return partition < self._receipts_count

    def _say(
        self,
        index: ShardIndex,
        labels: Labels,
        era: Era | None = None,
        *,
        cut: Sequence[int] = (),
        unknown_ms: int = 0,
        is_begun: bool = False,
    ) -> tuple[Labels, Mark]:
        """A barrier of ours; the labels behind it, and the mark it carries if a shard is begun."""
        barrier = Receipt(
            Clock().earliest_ms(), read=labels.requests, topic_id=self._ours.topic_id,
            group=self._ours.group, unknown_ms=unknown_ms, cut=cut,
        )  # fmt: skip
        end, label = again(self._commit_barrier, index, labels, era, barrier, is_begun)
        return labels._replace(receipts=label), Mark(labels.requests, end)

    def _commit_barrier(
        self, index: ShardIndex, labels: Labels, era: Era | None, barrier: Receipt, is_begun: bool
    ) -> tuple[int, int]:
        """Where the receipts ended before it, once no earlier owner could write any, and the label behind it."""
        shard, journal = index.shard, self._journal(index.shard.partition)
        checked = journal.receipt_bounds().end
        with closing(Writer(shard, self._access, exactly_once=self._exactly_once)) as writer:
            writer.open()
            if era is not None:
                check_note(index, self._note(era))
            end, since = journal.receipt_bounds().end, labels.receipts
            if is_begun:
                barrier, since = replace(barrier, mark=Mark(labels.requests, end)), end
            label, _ = commit_barrier(shard, journal, writer, barrier, since, checked)
        return end, label

    def _newer_since(self, shard: Shard, era: Era) -> Newer:
        """What callers have written since, as far as that was there when all was decided.

        Those requests and cancels come later than what is asked for again, and would be ended by it.
        """
        places = [shard.partition] if self._keeps_partitions else range(self._count)
        first = era.first if era.is_cut else 0
        found = [self._newer(place, first) for place in places]
        return Newer(
            set[str]().union(*(one.caller_ids for one in found)),
            set[str]().union(*(one.cancelled for one in found)),
        )

    def _newer(self, partition: int, first: int) -> Newer:
        if partition not in self._known_newer:
            newer = self._known_newer[partition] = Newer(set(), set())
            start, end = self._written_before[partition]
            shard, requests = Shard(self._topic, partition), set[int]()
            for batch in self._journal(partition).requests(max(first, start), end):
                changes = parse(self._format, batch, Clock().latest_ms(), None).changes
                newer.caller_ids.update(touched_by(changes).caller_ids)
                for offset, change in changes:
                    if not isinstance(change, Cancel):
                        requests.add(offset)
                    elif change.id is not None:
                        named = offset_in(shard, change.id)
                        if named is not None and named not in requests:
                            newer.cancelled.add(change.id)
        return self._known_newer[partition]

    def _journal(self, partition: int) -> ShardJournal:
        return ShardJournal(Shard(self._topic, partition), self._access, reader=self._reader)


def _replaced(journal: ShardJournal, tail: Tail | None) -> int | None:
    """From where on others were written in the places of records that had been read, if they were.

    What was read was written by the time of the last one of it.
    """
    if tail is None or not is_another(journal, tail):
        return None
    since = journal.first_request_since(tail.timestamp_ms + 1)
    return tail.offset if since is None else min(since, tail.offset)


def _keep_partitions(decisions: Sequence[_Decision], count: int) -> bool:
    """Whether what is asked for again goes to its former partition.

    Among another number of partitions than the former topic had, the keys of new requests name other ones than before.
    """
    eras = [(one.index.shard.partition, one.era) for one in decisions]
    former = [partition for partition, era in eras if era is not None and not era.is_cut]
    return not former or max(former) + 1 == count


class _Cut(NamedTuple):
    """From where on earlier runs have said that the log lost its end, if one did, and whether a shard was opened since."""

    first: int | None = None
    is_over: bool = False


def _cut_since(journal: ShardJournal, since: int, end: int) -> _Cut:
    """Nobody opens a shard before a run is done with its index: if one is open, Redis went back to before that."""
    found = _Cut()
    for _, receipt in journal.receipts(since, end):
        if receipt.cut:
            first = receipt.cut[0] if found.first is None else min(found.first, receipt.cut[0])
            found = _Cut(first)
        elif receipt.barrier and found.first is not None:
            found = found._replace(is_over=True)
    return found
