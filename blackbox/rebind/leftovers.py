"""Leftovers: pending requests of an index whose topic no longer has them, written again in one transaction.

The requests of a topic that was deleted, or of an end that a log lost, are not the ones that have their
offsets now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from blackbox.core.letter_record import RECORD_GONE, as_record
from blackbox.core.lost_payload import payload_lost
from blackbox.core.offset_set import OffsetSet
from blackbox.index.shard_index import ShardIndex
from blackbox.index.stored_fields import as_entry
from blackbox.journal.shard_writer import ShardWriter
from blackbox.journal.topics import Topics
from blackbox.rebind.later_records import Newer
from blackbox.records.clock import Clock
from blackbox.records.entry import Entry
from blackbox.records.errors import (
    JournalLost,
    NotAllowed,
    PositionsMoved,
    RecoveryRequired,
    Refused,
)
from blackbox.records.outgoing import FORMS, Outgoing, Refusal, dead_letters, rewritten_request
from blackbox.records.receipt import Places, Receipt
from blackbox.records.request import OUTCOME_UNKNOWN, Reason, Shard

AT_ONCE = 1000

# With another number of partitions, both come into one: the later one would replace the other.
ID_TAKEN = (
    "another pending request with this id, of another partition, was written again; if this one is to "
    "be delivered as well, replay it once that one has ended, or send it under another id"
)

# Refusals that a retry does not change; after any other, rebind has to be run again.
OF_THE_RECORD = {Reason.TOO_LARGE, Reason.REFUSED, Reason.BROKER_ERROR}


@dataclass(slots=True)
class Rebound:
    """The result for a shard: why, and how many pending requests were written again, or dropped.

    `cold` are those beyond the horizon, which were only in the request topic, and are gone with it.
    `superseded` are those under whose id the caller has written another request, or a cancel, since.
    `letters` became dead letters: they were to become one, or Kafka refused them, or they have expired, or
    they may have been written again before, or one of another partition was written again under their id.
    """

    shard: Shard
    why: str
    again: int = 0
    dropped: int = 0
    cold: int = 0
    superseded: int = 0
    letters: int = 0


@dataclass(eq=False, repr=False)
class Leftovers:
    """The pending requests of one index from the offset `first` on, without those that have `ended`.

    They are written again to `partition`; -1: by their caller's id as key. `newer` is what callers have
    written since. `holders` has, for each caller id, the shard whose request was written again by it. With
    `is_unknown` they may have been written again before, and become dead letters. Without `delivers` they are only
    counted.
    """

    index: ShardIndex
    first: int
    ended: Container[int]
    newer: Newer
    partition: int
    is_unknown: bool
    delivers: bool
    topics: Topics
    dead_letter_topic: str
    exactly_once: bool
    holders: dict[str, Shard] = field(default_factory=dict)
    _seen: OffsetSet = field(default_factory=OffsetSet)
    _refused: dict[int, Refusal] = field(default_factory=dict)
    _refusals: Counter[int] = field(default_factory=Counter)
    _takes_letters: bool = False
    _at_once: int = field(default_factory=lambda: AT_ONCE)
    _began_ms: int = field(default_factory=lambda: Clock().earliest_ms())

    @property
    def _shard(self) -> Shard:
        return self.index.shard

    def write(self, writer: ShardWriter, receipt: Receipt | None, done: Rebound) -> None:
        """Write all of them again and commit the receipt, all or nothing with exactly-once delivery."""
        while True:
            try:
                self._write(writer, receipt, done)
                return
            except Refused as refused:
                self._check_refusals(refused.suspects)
                if self._find_refused(writer):
                    continue
                if self._at_once == 1:
                    raise
                # A topic may take each of them, but not so many in one batch.
                self._at_once = max(1, self._at_once // 10)

    def _write(self, writer: ShardWriter, receipt: Receipt | None, done: Rebound) -> None:
        done.again = done.letters = done.superseded = done.dropped = 0
        with _begun(writer):
            for batch in self.batches():
                self._write_some(writer, batch, done)
            # Before the commit: after it, the index is emptied, and a missed entry would be lost.
            self._check_all_seen()
        if receipt is None:
            writer.end()
        else:
            writer.commit(receipt)

    def _write_some(self, writer: ShardWriter, batch: Mapping[int, Entry], done: Rebound) -> None:
        if not self.delivers:
            done.dropped += len(batch)
            return
        left = self._left(batch)
        self._send(writer, left)
        again = [entry for offset, entry in left.items() if self._why_dead(offset, entry) is None]
        done.letters += len(left) - len(again)
        done.again += len(again)
        for entry in again:
            # before the commit, which may have happened although it fails
            if self.partition < 0 and entry.caller_id is not None:
                self.holders[entry.caller_id] = self._shard
        done.superseded += len(batch) - len(left)

    def batches(self) -> Iterator[dict[int, Entry]]:
        """All of them, in batches by due time."""
        rank, self._seen = 0, OffsetSet()
        while stored := self.index.stored(rank, self._at_once):
            rank += len(stored)
            # A frozen earlier owner may postpone entries: they move to a later rank and come again.
            fresh = [(offset, payload) for offset, payload in stored if offset not in self._seen]
            self._seen.add(offset for offset, _ in fresh)
            refused = self.index.refused([offset for offset, held in fresh if held is None])
            if batch := {
                offset: as_entry(payload)
                or payload_lost(offset, Clock().earliest_ms(), refused.get(offset))
                for offset, payload in fresh
                if offset >= self.first and offset not in self.ended
            }:
                yield batch

    def check_format(self, format_name: str) -> None:
        """Raise RecoveryRequired if these requests have a format that cannot be written again."""
        if format_name == "countdown":
            return
        for batch in self.batches():
            if any(entry.target for entry in batch.values()):
                raise RecoveryRequired(
                    f"{self._shard}: its pending requests have the format {format_name}, which "
                    "blackbox cannot write again; run rebind with --pending drop, and let callers "
                    "send the requests again"
                )

    def _check_all_seen(self) -> None:
        """Raise PositionsMoved if an entry was missed."""
        self.index.due(0, 1)  # raises PositionsMoved
        # Removals by a frozen owner move entries to a lower rank, behind the reader.
        rank = 0
        while found := self.index.pending(rank, AT_ONCE):
            rank += len(found)
            if any(offset not in self._seen for offset in found):
                raise PositionsMoved(
                    f"{self._shard}: an earlier owner changed the index in the meantime"
                )

    def _left(self, there: Mapping[int, Entry]) -> dict[int, Entry]:
        # These records of callers are later than the request. Written again, it would end them.
        ends = self.newer.ends
        return {o: entry for o, entry in there.items() if not ends(self._shard, o, entry)}

    def _send(self, writer: ShardWriter, batch: Mapping[int, Entry]) -> None:
        """Send a batch. With exactly-once delivery raises Refused; without, sends what is refused once more."""
        failed: dict[int, Refusal] = {}
        nowhere: Places = {}
        for offset, entry in batch.items():
            if refusal := writer.send(self._outgoing(offset, entry), nowhere):
                failed[offset] = refusal
        failed |= writer.flush()
        if failed and self.exactly_once:
            writer.abort()
            raise Refused(failed)
        # Without a transaction, accepted records stay: refused ones are sent again, each alone.
        if len(batch) == 1 and failed:
            self._note(failed)
        for offset in failed:
            self._send(writer, {offset: batch[offset]})

    def _find_refused(self, writer: ShardWriter) -> bool:
        """Find the records that Kafka refuses, in aborted transactions; returns whether one was found."""
        known = len(self._refused) + self._refusals.total()
        for batch in self.batches():
            left = self._left(batch)
            # Kafka refuses the neighbours of a record in a batch as well: try each alone.
            if self._is_refused(writer, left):
                for offset, entry in left.items():
                    while self._is_refused(writer, {offset: entry}):
                        pass  # in its next form
        return len(self._refused) + self._refusals.total() > known

    def _is_refused(self, writer: ShardWriter, batch: Mapping[int, Entry]) -> bool:
        try:
            with _begun(writer):
                self._send(writer, batch)
        except Refused as refused:
            if len(batch) == 1:
                self._note(refused.suspects)
            return True
        writer.abort()
        return False

    def _note(self, refused: Mapping[int, Refusal]) -> None:
        self._check_refusals(refused)
        for offset, (reason, detail) in refused.items():
            # The first refusal makes it a dead letter, each further one a smaller dead letter.
            self._refusals[offset] += offset in self._refused
            if self._refusals[offset] == FORMS:
                raise RecoveryRequired(f"{self._shard}: not all records were written: {detail}")
            self._refused.setdefault(offset, (reason, detail))

    def _check_refusals(self, refused: Mapping[int, Refusal]) -> None:
        for reason, detail in refused.values():
            if reason not in OF_THE_RECORD:
                kind = NotAllowed if reason == Reason.NOT_AUTHORIZED else JournalLost
                raise kind(f"{self._shard}: not all records were written: {detail}")

    def _outgoing(self, offset: int, entry: Entry) -> Outgoing:
        now_ms = Clock().earliest_ms()
        asked = rewritten_request(self._shard, offset, entry, self.partition, now_ms)
        why = self._why_dead(offset, entry)
        return asked if why is None else self._letter(asked, entry, why)

    def _why_dead(self, offset: int, entry: Entry) -> Refusal | None:
        if entry.reason is not None:
            return entry.reason, entry.detail or ""
        if self.is_unknown:
            return Reason.OUTCOME_UNKNOWN, OUTCOME_UNKNOWN
        # A recurring request is written again also then, or it would not recur any more.
        if entry.expires_ms is not None and entry.expires_ms < self._began_ms and not entry.recurs:
            detail = f"due {self._began_ms - entry.due_ms} ms ago, which exceeds expires_after"
            return Reason.EXPIRED, detail
        # by this run, or by an earlier one that was interrupted
        holder = self.holders.get(entry.caller_id or "", self._shard)
        if holder != self._shard or self.newer.written_again(entry):
            return Reason.REFUSED, ID_TAKEN
        return self._refused.get(offset)

    def _letter(self, asked: Outgoing, entry: Entry, why: Refusal) -> Outgoing:
        """The dead letter of a request, in a form that can be replayed, unless it was an invalid record."""
        self._check_letters()
        record = as_record(self._shard, asked.offset, entry)
        if entry.left_bytes:
            why = why[0], f"{why[1]}; {RECORD_GONE}"
        forms = list(dead_letters(self._shard, self.dead_letter_topic, record, *why))
        return forms[self._refusals[asked.offset]]

    def _check_letters(self) -> None:
        self._takes_letters = self._takes_letters or bool(
            self.topics.partitions([self.dead_letter_topic], to="Write")
        )
        if not self._takes_letters:
            raise RecoveryRequired(
                f"{self._shard}: some requests become dead letters, but the topic "
                f"{self.dead_letter_topic} does not exist; create it, or start a service, which "
                "creates it"
            )


@contextmanager
def _begun(writer: ShardWriter) -> Iterator[None]:
    """A transaction that is aborted when something in it fails."""
    # Left open, it would hold up read_committed readers of its partitions for up to 15 minutes.
    writer.begin()
    try:
        yield
    except Refused:  # it has been aborted
        raise
    except BaseException:
        with suppress(RecoveryRequired):
            writer.abort()
        raise
