"""The second verb, dispatch: deliver what is due and remove it from the index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from blackbox.core.delivery_transaction import DeliveryTransaction
from blackbox.core.dispatched import Dispatched
from blackbox.core.doubtful import Doubtful
from blackbox.core.due_batch import DueBatch
from blackbox.core.idle_receipts import IdleReceipts
from blackbox.core.plan import DueEntries, Postponed
from blackbox.core.ports import DispatchIndex, Writer
from blackbox.core.rate_limit import next_turn_ms, park_over_rate, within_rates
from blackbox.core.settlement import Settlement
from blackbox.core.triage import Triage
from blackbox.records.entry import Entry
from blackbox.records.errors import IndexFull, Refused, TooEarly
from blackbox.records.outgoing import Refusal
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.core.dispatch")


@dataclass(slots=True)
class Dispatch:
    """Delivers what is due in one shard.

    `triage` decides what happens to each request. `counted` selects the requests of callers whose
    pending ones are counted. `is_clock_outdated` returns whether Kafka's clock must be read again;
    then a receipt is written even if there is nothing to deliver. `done` is what the last tick did,
    even if it raised. `cluster` is Kafka's id of the cluster, by which the rates of targets are counted.
    """

    index: DispatchIndex
    writer: Writer
    triage: Triage
    batch_limit: int = 1000
    counted: Callable[[Mapping[int, Entry]], Mapping[str, Sequence[int]]] = lambda ended: {}
    is_clock_outdated: Callable[[], bool] = lambda: False
    done: Dispatched = field(default_factory=Dispatched)
    cluster: str = ""
    _known: int = 0
    _next: tuple[Dispatched, DueBatch] | None = None
    _removed: int = 0
    _paused: frozenset[str] | None = None
    _has_released: bool = False
    _has_skipped: bool = False
    _doubtful: Doubtful = field(init=False)
    _idle_receipts: IdleReceipts = field(init=False)

    def __post_init__(self) -> None:
        self._doubtful = Doubtful(self.index, self.writer, self.triage.journal)
        has_rules = self.triage.rates is not None
        self._idle_receipts = IdleReceipts(
            self.index, self.writer, has_rules, self.is_clock_outdated
        )

    @property
    def shard(self) -> Shard:
        return self.triage.shard

    def tick(self, now_ms: int) -> Dispatched:
        """Deliver one batch of what is due at `now_ms`: D1 to D5 of `docs/how-it-works.md`.

        Messages that cannot be delivered now are postponed, out of the head of the queue. Raises
        RecoveryRequired when an outcome is unknown or the positions are not the ones last seen.
        """
        self.done = Dispatched()
        self._known = self.index.positions.requests
        if self._next and self.index.gone(self._next[1].offsets(), self._removed):
            self._next = None  # something in it was cancelled or replaced since
        did, batch = self._next or self._read(now_ms)  # D1
        self._next = None
        if self._doubtful.claims and now_ms >= self._doubtful.check_at_ms:
            self._doubtful.check(now_ms, self._known)
            # again: the check may have ended some of the batch, and released others
            did, batch = self._read(now_ms)
        self.done = did
        if rates := self.triage.rates:
            park_over_rate(batch, rates, self.cluster, self.index.parked(), now_ms)
        contended = self.triage.follow_ups.contended(batch.entries(), now_ms)
        later = [batch.take_out(some) for some in contended if some]
        if batch:
            # no read-ahead while a parked backlog comes out: it is apart from what is due
            is_whole = not batch.alone and not later
            reads_ahead = did.is_full and is_whole and not self._has_released
            reads_ahead = reads_ahead and not self._release(now_ms) and not self._has_skipped
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
        if rates and not rates.limited().keys().isdisjoint(self.index.parked().values()):
            turn_ms = next_turn_ms(self.shard, now_ms)
            did.next_due_ms = min(turn_ms, did.next_due_ms or turn_ms)
        return did

    def _read(self, now_ms: int) -> tuple[Dispatched, DueBatch]:
        self._removed = self.index.removed  # before the read: a removal during it counts as later
        due = self.index.due(now_ms, self.batch_limit, release=self._release(now_ms))
        self._has_skipped = False
        return self._triaged(due, now_ms)

    def _release(self, now_ms: int) -> Mapping[str, int]:
        """The targets whose parked entries come out, and how many at most."""
        # none before the first read, which shows which targets are paused
        parked = self.index.parked() if self._paused is not None else {}
        if not parked:
            return {}
        targets = self.triage.released(parked.values(), self._paused or ())
        released = dict.fromkeys(targets, self.batch_limit)
        return within_rates(released, self.triage.rates, self.cluster, self.shard, now_ms)

    def _read_ahead(self, now_ms: int, before: DueBatch) -> tuple[Dispatched, DueBatch] | None:
        """Read the batch after one that is still being delivered; None: that must be delivered first."""
        in_flight = before.ready.keys() | before.dead.keys()
        removed = self.index.removed  # before the read, as in `_read`
        due = self.index.due(now_ms, self.batch_limit, in_flight | before.postponed.keys())
        if self.index.gone(before.offsets(), self._removed):
            # Some of what is passed over was cancelled or replaced since it was read. As many others
            # were skipped in its place, and would be delivered after later ones.
            return None
        self._removed = removed
        # What is in flight is skipped by rank. Reading some of it again means that as many others
        # were skipped, which came in later and were due earlier: the next read begins with them.
        self._has_skipped = due.left_out > 0
        due = due._replace(
            # look again at once: requests that come in during the delivery do not wait for a poll
            is_full=True,
            pending=due.pending - len(in_flight),
            parked={**before.parked, **due.parked},  # `before.parked` is not in Redis yet
            backlogs=due.backlogs.union(before.parked.values()),
        )
        return self._triaged(due, now_ms)

    def _triaged(self, due: DueEntries, now_ms: int) -> tuple[Dispatched, DueBatch]:
        # This read left out what is parked for a target that has just been resumed: `release` came
        # from an earlier look, in which the target was paused. So look again at once.
        was_resumed = bool(due.parked) and (self._paused is None or bool(self._paused - due.paused))
        self._paused, self._has_released = due.paused, bool(due.released)
        self._doubtful.claims = due.doubtful
        did = Dispatched(
            is_full=due.is_full or was_resumed,
            next_due_ms=due.next_due_ms,
            oldest_ms=due.oldest_ms,
            pending=due.pending,
            in_doubt=len(due.doubtful),
        )
        return did, self.triage.sort(due, now_ms) if due.entries else DueBatch()

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
                self.index.mark_in_flight((), self._removed)
                self._postpone_all(batch.postponed, did, now_ms)
                return
            did.is_full |= bool(delivery.left_out)  # then look again at once
            # while Kafka takes this batch; `flush` waits for it
            if reads_ahead:
                self._next = self._read_ahead(now_ms, batch)
            failed = delivery.flush()
            # after the flush: only then are the offsets of the follow-ups known
            superseded = delivery.take_back_superseded()
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
            self._next = None  # what is postponed may have to go before it
            self._postpone(failed, delivery, did, now_ms)

    def _leave_pending(
        self, early: TooEarly, batch: DueBatch, did: Dispatched, now_ms: int
    ) -> None:
        """Leave the batch pending: by Kafka's clock, which is known now, it was not due yet."""
        logger.warning("%s", early)
        self._next = None
        self.index.mark_in_flight((), self._removed)
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
        self._next = None
        self.index.mark_in_flight((), self._removed)
        parked = {**self.index.parked(), **batch.parked}  # `batch.parked` is not in Redis yet
        changes = self.triage.postpone(sent, superseded, parked, now_ms)
        self._postpone_all(batch.postponed | changes, did, now_ms)
        # without what has come due since: new ids could be superseded each time
        for part in self.triage.follow_ups.parts(sent, superseded):
            self._deliver(batch.take_out(part), did, now_ms)

    def _mark_in_flight(self, batch: DueBatch) -> bool:
        """Mark the batch as in flight, except what was cancelled or replaced; return whether any is left."""
        for offset in self.index.mark_in_flight([*batch.ready, *batch.dead], self._removed):
            batch.ready.pop(offset, None)
            batch.dead.pop(offset, None)
        if not batch:
            self.index.mark_in_flight((), self._removed)
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
        changes = self.triage.postpone(sent, refused, parked, now_ms, apart, crowded)
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
