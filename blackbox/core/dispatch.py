"""The second verb, dispatch: deliver what is due and remove it from the index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from blackbox.core.batch_limit import BatchLimit
from blackbox.core.delivery_transaction import DeliveryTransaction
from blackbox.core.dispatched import Dispatched
from blackbox.core.doubtful import Doubtful
from blackbox.core.due_batch import DueBatch
from blackbox.core.due_reader import DueReader
from blackbox.core.idle_receipts import IdleReceipts
from blackbox.core.plan import Postponed
from blackbox.core.ports import DispatchIndex, Writer
from blackbox.core.rate_limit import next_turn_ms
from blackbox.core.refused_batch import postpone_refused
from blackbox.core.settlement import Settlement
from blackbox.core.triage import Triage
from blackbox.records.entry import Entry
from blackbox.records.errors import IndexFull, NotInTime, Refused, TooEarly
from blackbox.records.outgoing import Refusal
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.core.dispatch")


@dataclass(slots=True)
class Dispatch:
    """Delivers what is due in one shard.

    `triage` decides what happens to each request. `counted` selects the requests of callers whose
    pending ones are counted. `is_clock_outdated` returns whether Kafka's clock must be read again;
    then a receipt is written even if there is nothing to deliver. `done` is what the last tick did,
    even if it raised.
    """

    index: DispatchIndex
    writer: Writer
    triage: Triage
    batch_limit: BatchLimit = field(default_factory=BatchLimit)
    counted: Callable[[Mapping[int, Entry]], Mapping[str, Sequence[int]]] = lambda ended: {}
    is_clock_outdated: Callable[[], bool] = lambda: False
    done: Dispatched = field(default_factory=Dispatched)
    _reader: DueReader = field(init=False)
    _known: int = 0
    _doubtful: Doubtful = field(init=False)
    _idle_receipts: IdleReceipts = field(init=False)

    def __post_init__(self) -> None:
        self._reader = DueReader(self.index, self.triage, self.batch_limit)
        self._doubtful = Doubtful(self.index, self.writer, self.triage.journal)
        has_rules = self.triage.rates is not None
        self._idle_receipts = IdleReceipts(
            self.index, self.writer, has_rules, self.is_clock_outdated
        )

    @property
    def shard(self) -> Shard:
        return self.triage.shard

    def count_rates_in(self, cluster: str) -> None:
        """Count the rates of targets under Kafka's id of this cluster."""
        self._reader.cluster = cluster

    def tick(self, now_ms: int) -> Dispatched:
        """Deliver one batch of what is due at `now_ms`: D1 to D5 of `docs/how-it-works.md`.

        Messages that cannot be delivered now are postponed, out of the head of the queue. Raises
        RecoveryRequired when an outcome is unknown or the positions are not the ones last seen.
        """
        self.done = Dispatched()
        self._known = self.index.positions.requests
        did, batch = self._reader.next(now_ms)  # D1
        if self.index.doubtful and now_ms >= self._doubtful.check_at_ms:
            self._doubtful.check(now_ms, self._known)
            # again: the check may have ended some of the batch, and released others
            did, batch = self._reader.read(now_ms)
        self.done = did
        self._reader.park_over_rate(batch, now_ms)
        count = sum(map(len, (batch.ready, batch.dead, batch.alone)))
        try:
            self._deliver_all(batch, did, now_ms)
        except (NotInTime, Refused) as failed:
            if isinstance(failed, NotInTime) or failed.is_timeout:
                self.batch_limit.shrink(count)
                logger.warning(
                    "%s: Kafka did not take a batch of %d requests in time; the next one has %d at most",
                    self.shard, count, self.batch_limit.now,
                )  # fmt: skip
            raise
        if did.is_full:
            self.batch_limit.grow()
        rates = self.triage.rates
        if rates and not rates.limited().keys().isdisjoint(self.index.parked().values()):
            turn_ms = next_turn_ms(self.shard, now_ms)
            did.next_due_ms = min(turn_ms, did.next_due_ms or turn_ms)
        return did

    def _deliver_all(self, batch: DueBatch, did: Dispatched, now_ms: int) -> None:
        contended = self.triage.follow_ups.contended(batch.entries(), now_ms)
        later = [batch.take_out(some) for some in contended if some]
        if batch:
            is_whole = not batch.alone and not later
            reads_ahead = did.is_full and is_whole and self._reader.may_read_ahead(now_ms)
            self._deliver(batch, did, now_ms, reads_ahead=reads_ahead)
        else:
            self._postpone_all(batch.postponed, did, now_ms)
            self._idle_receipts.write_if_needed(self._known, now_ms)
        for offset, entry in batch.alone.items():
            one = {offset: entry}
            only = DueBatch(ready=one) if entry.reason is None else DueBatch(dead=one)
            self._deliver(only, did, now_ms)
        for part in later:
            self._deliver(part, did, now_ms)

    def _deliver(
        self, batch: DueBatch, did: Dispatched, now_ms: int, *, reads_ahead: bool = False
    ) -> None:
        # before the transaction begins: reading a long backlog could outlast it
        self.triage.follow_ups.read_backlog(self._known, dict(batch.entries()))
        # D1, second half. From here on a cancel is too late: its answer, and replacements by id, wait for the batch
        if not self._mark_in_flight(batch):
            self._postpone_all(batch.postponed, did, now_ms)
            return
        delivery = DeliveryTransaction(self.writer, self.triage, batch, self._known, now_ms)
        self.writer.begin()  # D2
        try:
            if not delivery.send():
                self.writer.abort()
                # nothing is settled: answers to cancels, and replacements by id, would wait for these
                self.index.mark_in_flight((), self._reader.removed)
                self._postpone_all(batch.postponed, did, now_ms)
                return
            did.is_full |= bool(delivery.left_out)  # then look again at once
            # while Kafka takes this batch; `flush` waits for it
            if reads_ahead:
                self._reader.read_ahead(batch, now_ms)
            failed = delivery.flush()
            # after the flush: only then are the offsets of the follow-ups known
            superseded = delivery.abort_if_superseded()
        except Refused as refused:
            # before the error requires recovery: the next owner would send the same batch again
            self._postpone(refused.suspects, delivery, did, now_ms)
            raise
        if superseded:
            self._send_without(superseded, delivery, batch, did, now_ms)
        else:
            self._commit_and_remove(delivery, failed, batch, did, now_ms)

    def _commit_and_remove(
        self,
        delivery: DeliveryTransaction,
        failed: Mapping[int, Refusal],
        batch: DueBatch,
        did: Dispatched,
        now_ms: int,
    ) -> None:
        """Commit the messages with their receipt, then remove from the index what was delivered.

        `failed`: at least once only.
        """
        sent = delivery.ready | delivery.dead
        ended = {offset: entry for offset, entry in sent.items() if offset not in failed}
        dead = {offset: entry for offset, entry in delivery.dead.items() if offset not in failed}
        delivered = [entry for offset, entry in ended.items() if offset not in dead]
        due_ms = [entry.due_ms for entry in delivered]
        # an entry that was read again may have a later due time
        latest_ms = min(max(due_ms, default=0), now_ms)
        try:
            # D3, D4
            position = self.writer.commit(delivery.receipt(dead), latest_ms)
        except TooEarly as early:
            self._leave_pending(early, batch, did, now_ms)
            return
        settlement = Settlement(
            removals={offset: entry.caller_id for offset, entry in ended.items()},
            receipts=position,
            postpone=batch.postponed,
            now_ms=now_ms,
            counted=self.counted(ended),
            origins=[entry.origin for entry in ended.values() if entry.origin is not None],
        )
        self.index.settle(settlement)  # D5
        self._idle_receipts.note(self._known, now_ms)
        did.due_ms += due_ms
        did.targets.update([entry.target for entry in delivered])
        did.dead.update([entry.reason or "" for entry in dead.values()])
        did.count_postponed(batch.postponed)
        # only at least once: a transaction that lacks a record is aborted as a whole
        if failed:
            self._reader.drop_ahead()  # what is postponed may have to go before it
            self._postpone(failed, delivery, did, now_ms)

    def _leave_pending(
        self, early: TooEarly, batch: DueBatch, did: Dispatched, now_ms: int
    ) -> None:
        """Leave the batch pending: by Kafka's clock, which is known now, it was not due yet."""
        logger.warning("%s", early)
        self._reader.drop_ahead()
        self.index.mark_in_flight((), self._reader.removed)
        self._postpone_all(batch.postponed, did, now_ms)
        first_ms = min(entry.due_ms for entry in (*batch.ready.values(), *batch.dead.values()))
        did.is_full, did.next_due_ms = False, min(first_ms, did.next_due_ms or first_ms)

    def _send_without(
        self,
        superseded: Mapping[int, Refusal],
        delivery: DeliveryTransaction,
        batch: DueBatch,
        did: Dispatched,
        now_ms: int,
    ) -> None:
        """Postpone the requests that a later record ends, and send the others at once."""
        # the shard stays open: opened again for each such record, it would deliver nothing else
        sent = delivery.ready | delivery.dead
        self._reader.drop_ahead()
        self.index.mark_in_flight((), self._reader.removed)
        parked = {**self.index.parked(), **batch.parked}  # `batch.parked` is not in Redis yet
        changes = postpone_refused(self.triage, sent, superseded, parked, now_ms)
        self._postpone_all(batch.postponed | changes, did, now_ms)
        # without what has come due since: new ids could be superseded each time
        for part in self.triage.follow_ups.parts(sent, superseded):
            self._deliver(batch.take_out(part), did, now_ms)

    def _mark_in_flight(self, batch: DueBatch) -> bool:
        """Mark the batch as in flight, except what was cancelled or replaced; return whether any is left."""
        for offset in self.index.mark_in_flight([*batch.ready, *batch.dead], self._reader.removed):
            batch.ready.pop(offset, None)
            batch.dead.pop(offset, None)
        if not batch:
            self.index.mark_in_flight((), self._reader.removed)
        return bool(batch)

    def _postpone(
        self,
        refused: Mapping[int, Refusal],
        delivery: DeliveryTransaction,
        did: Dispatched,
        now_ms: int,
    ) -> None:
        sent, parked = delivery.ready | delivery.dead, self.index.parked()
        apart, crowded = delivery.apart, delivery.crowded
        changes = postpone_refused(self.triage, sent, refused, parked, now_ms, apart, crowded)
        self._postpone_all(changes, did, now_ms)

    def _postpone_all(self, changes: Mapping[int, Postponed], did: Dispatched, now_ms: int) -> None:
        if changes:
            try:
                self.index.postpone(changes, now_ms)
            except IndexFull as full:
                logger.warning(
                    "%s: %s; %d deliveries are not postponed but retried at the next check",
                    self.shard, full, len(changes),
                )  # fmt: skip
                did.is_full = False  # else they are read again at once, without end
                return
            did.count_postponed(changes)
