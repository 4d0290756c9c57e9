"""What is pending in an index whose topic is not there any more: it ends there, and is asked for again.

The requests of a topic that was deleted, or of an end that a log lost, are of another era than those that have their
offsets now. In a receipt of that era each says where it was asked for again, in the transaction that asked for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tenacity import (
    Retrying,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from blackbox import entry as entries
from blackbox.barrier import commit_barrier
from blackbox.clock import Clock
from blackbox.doubt import Doubt, Fenced, JournalLost, NotAllowed, Refused
from blackbox.ended import Ended
from blackbox.entry import Entry
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics
from blackbox.journal.writer import Writer
from blackbox.outgoing import FORMS, Outgoing, Refusal, asked_once_more, dead_letters
from blackbox.plan import Binding, Kept, Rebinding
from blackbox.receipt import Places, Receipt, settled, topic_of
from blackbox.recovery import settle
from blackbox.request import OUTCOME_UNKNOWN, Reason, Record, Shard, request_id
from blackbox.sorting import as_record, is_record

AT_ONCE = 1000
ALL = 1 << 52
"""Later than anything can be due, in ms; an offset that no topic reaches."""
SAY_WITHIN_S = 60

again = Retrying(
    retry=retry_if_exception_type((Fenced, JournalLost)) & retry_if_not_exception_type(NotAllowed),
    wait=wait_random_exponential(multiplier=0.1, max=1),
    stop=stop_after_delay(SAY_WITHIN_S),
    reraise=True,
)
"""A service that tries to open the shard meanwhile fences whoever writes there, which a commit under way may hear of
as an unknown error. What was committed is found in the receipts; a barrier that is written twice changes nothing.
"""

OF_THE_RECORD = {Reason.TOO_LARGE, Reason.REFUSED, Reason.BROKER_ERROR}
"""Refusals that another try does not change."""


@dataclass(slots=True)
class Rebound:
    """What was done for a shard: why, and how many pending requests were written again, or dropped.

    `cold` are those beyond the horizon, which were only in the request topic, and so are gone with it.
    `before` were written again by a run that was interrupted before Redis knew it. `superseded` are those
    whose callers have written another request, or a cancel, under the same id since,
    `letters` became dead letters: what was to become one, what Kafka refused, what may have been written again before.
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
class Era:
    """Which requests of an index are leftovers: those from the offset `first` on.

    `binding` is what the index belongs to. `is_cut`: the topic is the same, and its log lost its end there. `is_open`:
    receipts of it can still be written. `has_label`: the index' label is a position in receipts that are there, and not
    in some that were deleted. `is_asked_before`: an earlier rebind ended it, and asked for what was pending then.
    """

    binding: Binding
    first: int
    is_cut: bool = False
    is_open: bool = True
    has_label: bool = True
    is_asked_before: bool = False


class Newer(NamedTuple):
    """Caller ids under which there are later records, and ids of requests that were cancelled since.

    The ids of a topic that was created again repeat: where a new request had the id, its cancel ends no leftover.
    """

    caller_ids: set[str]
    cancelled: set[str]

    def ends(self, shard: Shard, offset: int, entry: Entry) -> bool:
        id = request_id(shard, offset if entry.origin is None else entry.origin)
        return entry.caller_id in self.caller_ids or id in self.cancelled


@dataclass(eq=False, repr=False)
class Leftovers:
    """Those of one shard. `partition` is where they are asked for again; -1: where their caller's id, as key, says.

    `newer` tells what callers have written since; `writer` makes one. `note` is what a run wrote into the index before.
    """

    index: ShardIndex
    journal: ShardJournal
    era: Era
    done: Rebound
    writer: Callable[[], Writer]
    newer: Callable[[], Newer]
    note: Rebinding
    group: str
    partition: int
    topics: Topics
    dead_letter_topic: str
    _open: Writer | None = None
    _passed: set[int] = field(default_factory=set)
    _refused: dict[int, Refusal] = field(default_factory=dict)
    _refusals: Counter[int] = field(default_factory=Counter)
    _alone: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._has_label = self.era.has_label

    @property
    def _shard(self) -> Shard:
        return self.index.shard

    def ask_again(self) -> None:
        """Write all of them to the topic that is there now, a thousand at a time; they leave the index then."""
        while again(self._ask_for_some):
            pass
        self._close()
        self.index.load()

    def drop(self) -> None:
        """Forget all of them; no earlier owner delivers any more."""
        if self.era.is_open:
            again(self._take_over)
        self._close()
        check_note(self.index, self.note)
        while batch := self._some():
            self.done.dropped += len(batch)
            self._take_off(batch, self.index.labels.receipts)
        self.index.load()

    def _ask_for_some(self) -> bool:
        """Whether there were any."""
        try:
            writer = self._open or self._take_over()
            batch = self._some()
            if batch:
                self._end(writer, batch)
            return bool(batch)
        except Refused as refused:
            self._close()
            self._note(refused)
            return True
        except Doubt:
            self._close()
            raise

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None
        self._passed.clear()  # of those that are left some may come before one that was passed

    def _take_over(self) -> Writer:
        """Stop every earlier owner, and let what receipts say has ended leave the index."""
        self._close()
        self._open = writer = self.writer()
        start, end = (
            self.journal.receipt_bounds() if self._has_label or self.era.is_open else (0, 0)
        )
        writer.open()
        kept = check_note(self.index, self.note)
        if not self._has_label and not self.era.is_open:
            return writer
        known = kept.labels.receipts
        is_known = self._has_label and start <= known <= end
        if self.era.is_open:
            barrier = Receipt(
                Clock().earliest_ms(), read=kept.labels.requests, cut=self._cut,
                topic_id=self.era.binding.topic_id, group=self.group,
            )  # fmt: skip
            since = known if is_known else start
            label, _ = commit_barrier(self._shard, self.journal, writer, barrier, since, end)
            self._leave(kept, since, label, label)
            self._has_label = True
        elif is_known:
            self._leave(kept, known, end, known)
        return writer

    def _leave(self, kept: Kept, since: int, end: int, label: int) -> None:
        unread = max(self.era.first, kept.labels.requests)
        ended = (offset for offset in self._ended(since, end) if offset < unread)
        settle(self.index, ended, label)

    @property
    def _cut(self) -> Sequence[int]:
        return [self.era.first] if self.era.is_cut else ()

    def _ended(self, since: int, end: int) -> Ended:
        """What receipts of the era say has ended; from where the log was cut on, later ones speak of others."""
        ended, cut = Ended(), None
        for _, receipt in settled(self.journal.receipts(since, end)):
            if receipt.topic_id not in ("", self.era.binding.topic_id):
                break
            cut = receipt.cut[0] if cut is None and receipt.cut else cut
            upto = ALL if cut is None or cut in receipt.cut else cut
            ended.add(offset for offset in receipt.removals() if offset < upto)
            self.done.before += sum(
                len(pairs)
                for at, pairs in receipt.delivered.items()
                if topic_of(at) == self._shard.topic
            )
        return ended

    def _some(self) -> dict[int, Entry | None]:
        """The next ones; one that was refused comes alone."""
        passed = set[int]() if self._alone else self._passed
        found = next_batch(self.index, self.era.first, passed)
        alone = [offset for offset in found if offset in self._alone]
        return {alone[0]: found[alone[0]]} if alone else found

    def _end(self, writer: Writer, batch: Mapping[int, Entry | None]) -> None:
        """One transaction: they are asked for again, or become dead letters, and a receipt says so."""
        newer = self.newer()
        there = {o: e for o, e in batch.items() if e is not None}
        left = {o: e for o, e in there.items() if not newer.ends(self._shard, o, e)}
        letters = {o: why for o, entry in left.items() if (why := self._why_dead(o, entry))}
        self._check_letters(letters)
        asked: Places = {}
        buried: Places = {}
        failed: dict[int, Refusal] = {}
        writer.begin()
        for offset, entry in left.items():
            record, places = asked_once_more(self._shard, offset, entry, self.partition), asked
            if why := letters.get(offset):
                record, places = self._letter(record, entry, why), buried
            if refusal := writer.send(record, places):
                failed[offset] = refusal
        failed |= writer.flush()
        gone = {o: entry for o, entry in batch.items() if o not in failed}
        buried_now = [offset for offset in letters if offset in gone]
        label = self.index.labels.receipts
        if self.era.is_open:
            now_ms = Clock().earliest_ms()
            receipt = Receipt(now_ms, asked, buried_now, letters=buried, cut=self._cut)
            label = writer.commit(receipt)
        else:
            writer.end()
        self._take_off(gone, label)
        self._alone.difference_update(gone)
        self.done.again += sum(o in left and o not in letters for o in gone)
        self.done.letters += len(buried_now)
        self.done.superseded += len(there) - len(left)
        self.done.dropped += len(batch) - len(there)
        if failed:
            raise Refused(failed)

    def _check_letters(self, letters: Mapping[int, Refusal]) -> None:
        if letters and not self.topics.partitions([self.dead_letter_topic], to="Write"):
            raise Doubt(
                f"{self._shard}: some requests become dead letters, and there is no topic "
                f"{self.dead_letter_topic}; create it, or start a service, which does"
            )

    def _why_dead(self, offset: int, entry: Entry) -> Refusal | None:
        if entry.reason is not None:
            return entry.reason, entry.detail or ""
        if self.era.is_asked_before:
            return Reason.OUTCOME_UNKNOWN, OUTCOME_UNKNOWN
        return self._refused.get(offset)

    def _letter(self, asked: Outgoing, entry: Entry, why: Refusal) -> Outgoing:
        """In a form that can be asked for again, unless the record itself was none."""
        headers = [(name, v.encode() if isinstance(v, str) else v) for name, v in entry.headers]
        record = Record(asked.offset, entry.due_ms, asked.key, asked.value, headers)
        if is_record(entry):
            record = as_record(asked.offset, entry)
        forms = list(dead_letters(self._shard, self.dead_letter_topic, record, *why))
        return forms[self._refusals[asked.offset]]

    def _note(self, refused: Refused) -> None:
        """What is refused alone becomes a dead letter, in a smaller form if that is refused as well."""
        for reason, detail in refused.suspects.values():
            if reason not in OF_THE_RECORD:
                kind = NotAllowed if reason == Reason.NOT_AUTHORIZED else JournalLost
                raise kind(f"{self._shard}: not all records were written: {detail}")
        if not self._alone.issuperset(refused.suspects):
            self._alone.update(refused.suspects)
            return
        for offset, why in refused.suspects.items():
            self._refusals[offset] += offset in self._refused
            if self._refusals[offset] == FORMS:
                raise refused
            self._refused.setdefault(offset, why)

    def _take_off(self, batch: Mapping[int, Entry | None], label: int) -> None:
        removed = {o: None if entry is None else entry.caller_id for o, entry in batch.items()}
        self.index.settle(removed, label)


def check_note(index: ShardIndex, note: Rebinding) -> Kept:
    """What the index says of itself. Raises a Doubt when another run is done with it, or it was lost.

    Whoever was frozen may wake up when all is over, and would take what is pending now for leftovers.
    """
    kept = index.load()
    if kept is None or kept.rebinding != note:
        raise Doubt(
            f"{index.shard}: its index has changed while blackbox rebind worked on it: another one may be "
            "done with it; run it again, which says what is left to do"
        )
    return kept


def next_batch(index: ShardIndex, first: int, passed: set[int]) -> dict[int, Entry | None]:
    """What is pending from the offset `first` on and not `passed`; None is a request whose payload is lost."""
    while due := index.due(ALL, AT_ONCE, passed).entries:
        passed.update(offset for offset, _ in due if offset < first)
        if found := {
            o: entries.decode(stored) if stored else None for o, stored in due if o >= first
        }:
            return found
    return {}
