"""What becomes of an index that belongs to another topic, cluster or group than what is there now.

A shard whose index does not fit stays closed, as nobody but a person knows which of the two is meant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import count as count_on
from typing import Literal, NamedTuple

from tenacity import (
    Retrying,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from blackbox import entry as entries
from blackbox.barrier import commit_barrier
from blackbox.clock import Clock
from blackbox.connect import formats, kafka
from blackbox.doubt import Doubt, Fenced, JournalLost, NotAllowed
from blackbox.entry import Entry
from blackbox.index.connection import pool
from blackbox.index.shard_index import ShardIndex
from blackbox.intake import parse, touched_by
from blackbox.journal.bulk import Bulk
from blackbox.journal.partition_reader import PartitionReader
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.journal.trim import Trimmer
from blackbox.journal.writer import Writer
from blackbox.marks import Recreated, Shortened, foreign_group, is_another, newest_mark, openers
from blackbox.outcomes import Outcomes
from blackbox.outgoing import dead_letters
from blackbox.plan import Bounds, Kept, Labels, Rebinding, Tail
from blackbox.receipt import Mark, Receipt, settled
from blackbox.recovery import CLOCKS_APART_MS, settle
from blackbox.recurrence import asked_at
from blackbox.request import Shard
from blackbox.settings import Settings
from blackbox.sorting import as_record

AT_ONCE = 1000
ALL_DUE_MS = 1 << 52
"""Later than anything can be due."""
SAY_WITHIN_S = 60
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


@dataclass(slots=True)
class Rebound:
    """What was done for a shard: why, and how many pending requests were written again, or dropped.

    `cold` are those beyond the horizon, which were only in the request topic, and so are gone with it.
    `before` were written again by a run that was interrupted before it could say so. `superseded` are those
    whose callers have written another request, or a cancel, under the same id since,
    `letters` were to become dead letters, and did.
    """

    shard: Shard
    why: str
    again: int = 0
    dropped: int = 0
    cold: int = 0
    before: int = 0
    superseded: int = 0
    letters: int = 0


@dataclass(frozen=True, slots=True)
class _Decision:
    """What is to be done with an index: pending requests from `first` on move, the labels are set.

    Without labels nothing is. `is_begun`: it is emptied, as none of its requests is in the topic.
    `is_stale`: it is discarded, as it is older than an opening of the topic that is there now.
    `unknown_ms`: the receipts that are there do not tell what became of requests that were due before.
    `is_cut`: the log lost its end, and earlier receipts do not speak of the requests that take its place.
    """

    index: ShardIndex
    why: str
    labels: Labels | None = None
    first: int | None = None
    is_begun: bool = False
    is_stale: bool = False
    noted: Rebinding | None = None
    unknown_ms: int = 0
    is_cut: bool = False


class _Record(NamedTuple):
    """A request as it is written again, or the dead letter that it was about to become."""

    value: bytes | None
    key: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    is_letter: bool = False


def rebind(settings: Settings, topic: str, pending: Pending) -> list[Rebound]:
    """Let the indexes of a request topic belong to what is there now; those that do already stay.

    What is pending under other topics of the same name, or behind the end of one that became shorter,
    is written again as new requests (`deliver`) or forgotten (`drop`). What a group or a new receipts
    topic changes loses nothing. An index of another topic, or of other receipts, is only emptied if receipts tell that
    its group has opened what is there already: Redis went back to before that, and what is pending is in the journals.
    Raises a Doubt when Kafka or Redis does not answer: run it again.

    1. decide for all indexes, before a request that is written again can move the end of any journal;
    2. note in each what was decided: from then on nobody opens it, and a second run finds the same;
    3. take its shard over, so that no earlier owner delivers any more, and remove what receipts say has ended;
    4. write the rest again, but what callers have replaced or cancelled since, and bind it to what is there;
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
        self._count = found[topic]
        self._receipts_count = topics.partitions([receipts], to="Read").get(receipts, 0)
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
        self._known_names: dict[int, set[str]] = {}

    def decide(self) -> list[_Decision]:
        """For each partition that there is, and each that has an index from when there were more."""
        decisions: list[_Decision] = []
        before = 0
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
            if kept is not None and (decision.is_begun or decision.is_stale):
                before = partition + 1
        # Among another number of partitions the keys of new requests name other ones than before.
        self._keeps_partitions = before in (0, self._count)
        return decisions

    def _decide(self, index: ShardIndex, kept: Kept | None) -> _Decision:
        partition = index.shard.partition
        journal = self._journal(partition)
        requests = journal.request_bounds() if partition < self._count else Bounds(0, 0)
        receipts = journal.receipt_bounds() if partition < self._receipts_count else Bounds(0, 0)
        if kept is None or kept.binding is None:
            return self._begin(index, journal, requests, receipts)
        noted = kept.rebinding
        if noted is not None and noted.topic_id != self._ours.topic_id:
            noted = None
        if kept.binding.topic_id != self._ours.topic_id:
            groups = set[str]()
            if self._has_receipts(partition):
                groups = openers(journal, self._ours.topic_id)
            if groups & {self._ours.group, kept.binding.group}:
                return _Decision(index, "an index of before the topic was opened", is_stale=True)
            if groups:  # what they delivered of it is not to be begun again
                return _Decision(index, "another topic", first=0, is_stale=True, noted=noted)
            labels = Labels(requests.start, receipts.end)
            return _Decision(index, "another topic", labels, 0, is_begun=True, noted=noted)
        at = kept.labels
        same = kept.binding.receipts_id == self._ours.receipts_id
        if not same and self._has_receipts(partition) and openers(journal, self._ours.topic_id):
            why = "an index of before its receipts topic was opened"
            return _Decision(index, why, is_stale=True)
        is_untold = not same or at.receipts > receipts.end
        unknown_ms = Clock().latest_ms() + CLOCKS_APART_MS if is_untold else 0
        told = receipts.end if is_untold else at.receipts
        is_shorter = at.requests > requests.end or at.receipts > receipts.end
        lost = requests.end if is_shorter else _replaced(journal, kept.tail)
        if noted is not None or lost is not None:
            first = min(end for end in (lost, noted and noted.first) if end is not None)
            labels, why = Labels(min(at.requests, first), told), "a journal became shorter"
            return _Decision(
                index, why, labels, first, noted=noted, unknown_ms=unknown_ms, is_cut=True
            )
        if kept.binding == self._ours:
            return _Decision(index, FITS)
        why, labels = "another group, or other receipts", at._replace(receipts=told)
        return _Decision(index, why, labels, unknown_ms=unknown_ms)

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
        moving = [(one, one.first) for one in decisions if one.first is not None]
        if self._pending == "deliver" and self._contract != "countdown":
            for one, first in moving:
                self._check_format(one.index, first)
        for one, first in moving:
            noted = one.noted or Rebinding(self._ours.topic_id, first)
            one.index.prepare(noted._replace(first=first))

    def _check_format(self, index: ShardIndex, first: int) -> None:
        passed: set[int] = set()
        for batch in _batches(index, first, passed):
            if any(entry is not None and entry.target for entry in batch.values()):
                raise Doubt(
                    f"{index.shard}: what is pending was asked in the format {self._contract}, in which "
                    "blackbox cannot ask for it again; run it with --pending drop, and let callers ask "
                    "again"
                )
            passed.update(batch)

    def carry_out(self, decision: _Decision) -> Rebound:
        index, labels = decision.index, decision.labels
        done = Rebound(index.shard, decision.why)
        if decision.first == 0:
            done.cold = index.count_cold()
        if decision.first is not None:
            self._end_era(index, decision.first)
            self._move(decision, decision.first, done)
        if decision.is_stale:
            done.dropped += index.discard()
        if labels is not None and decision.is_begun:
            self._begin_at(index, labels)
        elif labels is not None:
            if self._has_receipts(index.shard.partition):
                cut = [] if decision.first is None else [decision.first]
                self._say(index.shard, labels, cut=cut, unknown_ms=decision.unknown_ms)
            index.rebind(labels, self._ours, decision.unknown_ms)
        if self._has_receipts(index.shard.partition):
            self._take_over_receipts(index, done)
        return done

    def _take_over_receipts(self, index: ShardIndex, done: Rebound) -> None:
        """A barrier of ours behind another group's: whatever Redis has, the next owner finds it the newest."""
        journal = self._journal(index.shard.partition)
        if not patiently(foreign_group, journal, self._ours.group, since=0):
            return
        labels = Labels(max(0, index.labels.requests), max(0, index.labels.receipts))
        self._say(index.shard, labels)
        if done.why in (FITS, NO_INDEX):
            done.why = "another group"

    def _begin_at(self, index: ShardIndex, labels: Labels) -> None:
        """Behind a barrier with a mark: earlier receipts tell of other requests under the ids of these, and go."""
        shard, mark = index.shard, Mark(*labels)
        is_said = self._has_receipts(shard.partition)
        if is_said:
            labels, mark = self._say(shard, labels, is_begun=True)
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
        shard: Shard,
        labels: Labels,
        *,
        cut: Sequence[int] = (),
        topic_id: str = "",
        unknown_ms: int = 0,
        is_begun: bool = False,
    ) -> tuple[Labels, Mark]:
        """A barrier of ours; the labels behind it, and the mark it carries if a shard is begun."""
        # A service that tries to open the shard meanwhile fences whoever writes there, which a commit under way may hear
        # of as an unknown error; a barrier that is written twice changes nothing.
        again = Retrying(
            retry=retry_if_exception_type((Fenced, JournalLost))
            & retry_if_not_exception_type(NotAllowed),
            wait=wait_random_exponential(multiplier=0.1, max=1),
            stop=stop_after_delay(SAY_WITHIN_S),
            reraise=True,
        )
        barrier = Receipt(
            Clock().earliest_ms(), read=labels.requests, topic_id=topic_id or self._ours.topic_id,
            group=self._ours.group, unknown_ms=unknown_ms, cut=cut,
        )  # fmt: skip
        end, label = again(self._commit_barrier, shard, labels, barrier, is_begun)
        return labels._replace(receipts=label), Mark(labels.requests, end)

    def _commit_barrier(
        self, shard: Shard, labels: Labels, barrier: Receipt, is_begun: bool
    ) -> tuple[int, int]:
        """Where the receipts ended before it, once no earlier owner could write any, and the label behind it."""
        journal = self._journal(shard.partition)
        checked = journal.receipt_bounds().end
        with closing(Writer(shard, self._access, exactly_once=self._exactly_once)) as writer:
            writer.open()
            end, since = journal.receipt_bounds().end, labels.receipts
            if is_begun:
                barrier, since = replace(barrier, mark=Mark(labels.requests, end)), end
            label, _ = commit_barrier(shard, journal, writer, barrier, since, checked)
        return end, label

    def _end_era(self, index: ShardIndex, first: int) -> None:
        """What Kafka knows to have ended leaves the index, once no owner can deliver any more of it.

        Of requests that the index has not read, those from `first` on are others by now.
        """
        shard, kept = index.shard, index.load()
        if kept is None or kept.binding is None or not self._has_receipts(shard.partition):
            return
        journal, theirs = self._journal(shard.partition), kept.binding
        is_told = theirs.receipts_id == self._ours.receipts_id
        is_another = theirs.topic_id != self._ours.topic_id
        start, end = journal.receipt_bounds()
        if not is_told or not start <= kept.labels.receipts <= end:
            return
        if is_another and openers(journal, self._ours.topic_id):
            return
        behind, _ = self._say(shard, kept.labels, topic_id=theirs.topic_id)
        outcomes = Outcomes()
        for _, receipt in settled(journal.receipts(kept.labels.receipts, behind.receipts)):
            outcomes.add(receipt)
        unread = max(first, kept.labels.requests)
        settle(index, (o for o in outcomes.ended if o < unread), behind.receipts)
        index.load()

    def _move(self, decision: _Decision, first: int, done: Rebound) -> None:
        """Write again, or forget, what is pending from the offset `first` on; a thousand at a time.

        Each thousand leaves the index once Kafka has it. They are noted before they are written: of
        those that a run was interrupted with, the next one looks in Kafka which are there.
        """
        index = decision.index
        is_told = self._pending == "deliver" and decision.noted is not None
        noted = decision.noted if is_told else None
        doubtful = set(noted.moving) if noted is not None else set()
        written = self._written(noted) if noted is not None else Counter()
        for found in _batches(index, first, set()):
            theirs = {offset: entry for offset, entry in found.items() if offset in doubtful}
            others = {offset: entry for offset, entry in found.items() if offset not in doubtful}
            if theirs:  # still noted as they were, should this run be interrupted as well
                self._write(index, self._records(index.shard, theirs), written, done)
                self._take_off(index, theirs, done)
            if others:
                named = self._named_since(decision)
                kept = {o: e for o, e in others.items() if e is None or e.caller_id not in named}
                done.superseded += len(others) - len(kept)
                records = self._records(index.shard, kept)
                if records:
                    ends = self._ends(self._partition(index.shard))
                    noted = Rebinding(self._ours.topic_id, first, list(records), ends)
                    index.prepare(noted)
                self._write(index, records, Counter(), done)
                self._take_off(index, others, done)

    def _named_since(self, decision: _Decision) -> set[str]:
        """The caller ids in what was written since, as far as that was there when all was decided.

        Those requests and cancels come later than what is asked for again, and would be ended by it.
        """
        if self._pending == "drop":
            return set()
        shard = decision.index.shard
        places = [shard.partition] if self._keeps_partitions else range(self._count)
        first = decision.first if decision.is_cut else 0
        assert first is not None
        return set[str]().union(*(self._names(place, first) for place in places))

    def _names(self, partition: int, first: int) -> set[str]:
        if partition not in self._known_names:
            names = self._known_names[partition] = set[str]()
            start, end = self._written_before[partition]
            for batch in self._journal(partition).requests(max(first, start), end):
                changes = parse(self._format, batch, Clock().latest_ms(), None).changes
                names.update(touched_by(changes).caller_ids)
        return self._known_names[partition]

    def _records(self, shard: Shard, batch: Mapping[int, Entry | None]) -> dict[int, _Record]:
        if self._pending == "drop":
            return {}
        return {
            offset: self._letter(shard, offset, entry) if entry.reason else _record(entry)
            for offset, entry in batch.items()
            if entry is not None
        }

    def _letter(self, shard: Shard, offset: int, entry: Entry) -> _Record:
        reason, detail = entry.reason or "", entry.detail or ""
        [letter, *_] = dead_letters(
            shard, self._dead_letter_topic, as_record(offset, entry), reason, detail
        )
        headers = ((name, v.encode() if isinstance(v, str) else v) for name, v in letter.headers)
        return _Record(letter.value, letter.key, tuple(headers), is_letter=True)

    def _write(
        self,
        index: ShardIndex,
        records: Mapping[int, _Record],
        written: Counter[_Record],
        done: Rebound,
    ) -> None:
        letters = self._dead_letter_topic
        if any(record.is_letter for record in records.values()) and not self._topics.partitions(
            [letters], to="Write"
        ):
            raise JournalLost(
                f"{index.shard}: some requests are to become dead letters, and there is no topic {letters}; "
                "create it, or start a service, which does"
            )
        partition = self._partition(index.shard)
        with closing(Bulk(self._large)) as bulk:  # one that was idle cannot say what it may not do
            for record in records.values():
                if written[record] > 0:
                    written[record] -= 1
                    done.before += 1
                    continue
                value, key, headers, is_letter = record
                topic = letters if is_letter else self._topic
                bulk.produce(topic, value, key, list(headers), -1 if is_letter else partition)
                done.letters += is_letter
                done.again += not is_letter
            bulk.flush()

    def _take_off(
        self, index: ShardIndex, batch: Mapping[int, Entry | None], done: Rebound
    ) -> None:
        lost = sum(entry is None for entry in batch.values())
        done.dropped += len(batch) if self._pending == "drop" else lost
        removed = {o: None if entry is None else entry.caller_id for o, entry in batch.items()}
        index.settle(removed, index.labels.receipts)

    def _partition(self, shard: Shard) -> int:
        """Its own, where a cancel by the caller's id will be; -1: that of its key."""
        return shard.partition if self._keeps_partitions else -1

    def _ends(self, partition: int) -> dict[str, int]:
        places = range(self._count) if partition < 0 else [partition]
        return {str(place): self._reader.log_end(self._topic, place) for place in places}

    def _written(self, noted: Rebinding) -> Counter[_Record]:
        """What is in Kafka where a run was interrupted that wrote there."""
        found: Counter[_Record] = Counter()
        for place, end in noted.ends.items():
            journal = self._journal(int(place))
            bounds = journal.settled_bounds()
            for batch in journal.requests(max(end, bounds.start), bounds.end):
                found.update(_Record(r.value, r.key, tuple(r.headers)) for r in batch.records)
        return found

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


def _batches(index: ShardIndex, first: int, passed: set[int]) -> Iterator[dict[int, Entry | None]]:
    """What is pending from the offset `first` on, until all of it has left the index, or is `passed`.

    None is a request whose payload is lost.
    """
    while due := index.due(ALL_DUE_MS, AT_ONCE, passed).entries:
        batch = {o: entries.decode(stored) if stored else None for o, stored in due if o >= first}
        passed.update(offset for offset, _ in due if offset < first)
        if batch:
            yield batch


def _record(entry: Entry) -> _Record:
    headers = tuple((name, v.encode() if isinstance(v, str) else v) for name, v in entry.headers)
    return _Record(asked_at(entry, entry.due_ms), (entry.caller_id or "").encode() or None, headers)
