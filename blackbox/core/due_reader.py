"""The reads of what is due: the next batch of a shard, or the one that was read while the last one was delivered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blackbox.core.batch_limit import BatchLimit
from blackbox.core.dispatched import Dispatched
from blackbox.core.due_batch import DueBatch
from blackbox.core.plan import DueEntries
from blackbox.core.ports import DispatchIndex
from blackbox.core.rate_limit import park_over_rate, within_rates
from blackbox.core.triage import Triage

Read = tuple[Dispatched, DueBatch]


@dataclass(slots=True)
class DueReader:
    """Reads batches of what is due, in the order of their due times, and lets parked requests out.

    `removed` is the index' attribute of this name before the last read: what was removed since, by a
    cancel or a replacement, may still be in the batch. `cluster` is Kafka's id of the cluster, by which
    the rates of targets are counted.
    """

    index: DispatchIndex
    triage: Triage
    batch_limit: BatchLimit
    cluster: str = ""
    removed: int = 0
    _ahead: Read | None = None
    _paused: frozenset[str] | None = None
    _has_released: bool = False
    _has_skipped: bool = False

    def next(self, now_ms: int) -> Read:
        """The batch that was read ahead, or else the one that is due now."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not self.index.gone(ahead[1].offsets(), self.removed):
            return ahead
        return self.read(now_ms)  # also if something in it was cancelled or replaced since

    def read(self, now_ms: int) -> Read:
        """The batch that is due now."""
        self.removed = self.index.removed  # before the read: a removal during it counts as later
        due = self.index.due(now_ms, self.batch_limit.now, release=self._release(now_ms))
        self._has_skipped = False
        return self._triaged(due, now_ms)

    def may_read_ahead(self, now_ms: int) -> bool:
        """Whether the next batch may be read while this one is being delivered."""
        # not while a parked backlog comes out: it is apart from what is due
        return not self._has_released and not self._release(now_ms) and not self._has_skipped

    def read_ahead(self, before: DueBatch, now_ms: int) -> None:
        """Read the batch after one that is still being delivered, unless that must be delivered first."""
        in_flight = before.ready.keys() | before.dead.keys()
        removed = self.index.removed  # before the read, as in `read`
        due = self.index.due(now_ms, self.batch_limit.now, in_flight | before.postponed.keys())
        if self.index.gone(before.offsets(), self.removed):
            # Some of what is passed over was cancelled or replaced since it was read. As many others
            # were skipped in its place, and would be delivered after later ones.
            return
        self.removed = removed
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
        self._ahead = self._triaged(due, now_ms)

    def drop_ahead(self) -> None:
        """Forget the batch that was read ahead: something may have to go before it."""
        self._ahead = None

    def park_over_rate(self, batch: DueBatch, now_ms: int) -> None:
        """Park what exceeds the rates of its targets."""
        if self.triage.rates:
            parked = self.index.parked()
            park_over_rate(batch, self.triage.rates, self.cluster, parked, now_ms)

    def _release(self, now_ms: int) -> Mapping[str, int]:
        """The targets whose parked entries come out, and how many at most."""
        # none before the first read, which shows which targets are paused
        parked = self.index.parked() if self._paused is not None else {}
        if not parked:
            return {}
        targets = self.triage.released(parked.values(), self._paused or ())
        released = dict.fromkeys(targets, self.batch_limit.now)
        return within_rates(released, self.triage.rates, self.cluster, self.triage.shard, now_ms)

    def _triaged(self, due: DueEntries, now_ms: int) -> Read:
        # This read left out what is parked for a target that has just been resumed: `release` came
        # from an earlier look, in which the target was paused. So look again at once.
        was_resumed = bool(due.parked) and (self._paused is None or bool(self._paused - due.paused))
        self._paused, self._has_released = due.paused, bool(due.released)
        did = Dispatched(
            is_full=due.is_full or was_resumed,
            next_due_ms=due.next_due_ms,
            oldest_ms=due.oldest_ms,
            pending=due.pending,
            in_doubt=len(due.doubtful),
        )
        return did, self.triage.divide(due, now_ms) if due.entries else DueBatch()
