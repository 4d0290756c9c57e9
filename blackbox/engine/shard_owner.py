"""The owner of one shard: a thread that opens it, dispatches and recovers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from threading import Event, Lock, Thread

from tenacity import Retrying, stop_when_event_set, wait_random_exponential
from tenacity.nap import sleep_using_event

from blackbox.core.batch_limit import BatchLimit
from blackbox.core.dispatched import Dispatched
from blackbox.core.intake import Taken
from blackbox.core.parsing import Parsed
from blackbox.core.plan import Batch, Binding, Positions
from blackbox.core.rebuild import Rebuild
from blackbox.core.recovery import Recovered
from blackbox.engine.linger import Linger, Pace
from blackbox.engine.metrics import Metrics
from blackbox.engine.shard_session import MarkHandover, ShardSession
from blackbox.records.clock import MAX_SKEW_MS, Clock, ShardClock
from blackbox.records.errors import RecoveryRequired, Refused
from blackbox.records.receipt import Mark
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.engine.shard_owner")

SHORT_RUN_S = 5.0
LONGEST_PAUSE_S = 10.0  # between openings, if a shard must recover again within SHORT_RUN_S
MOST_DOUBLED = 8  # of 0.05 s: beyond LONGEST_PAUSE_S, and far from a power that no float can hold


@dataclass(eq=False, repr=False)
class ShardOwner:
    """Owns one shard from `start` to `stop`, through any number of recoveries."""

    shard: Shard
    open_session: Callable[[ShardOwner], ShardSession]
    _: KW_ONLY
    clock: Clock
    metrics: Metrics
    wake_up: bool
    stuck_after_s: float
    opened: Callable[[ShardOwner, int], None]
    closed: Callable[[ShardOwner], None]
    ended: Callable[[ShardOwner], None]
    linger: Linger
    batch_limit: BatchLimit = field(default_factory=BatchLimit)

    def __post_init__(self) -> None:
        self._session: ShardSession | None = None
        self.is_open = False
        self._recovery_reason: Exception | None = None
        self._problem = ""
        self._recovered: Recovered | None = None
        self._lock = Lock()
        self._stopping = Event()
        self._wake = Event()
        self._pace = Pace(self.linger)
        self._mark_handover = MarkHandover(self.shard, self.poll)
        self._next_due_ms: int | None = None
        self._progress_s = time.monotonic()
        self._is_kafka_behind = False
        self._thread = Thread(target=self._run, name=str(self.shard), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the tick in flight, then give the shard up."""
        self._stopping.set()
        self._pace.hurry()
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait until the shard is given up; False when that takes longer."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_stuck(self) -> bool:
        """Whether the shard made no progress for `stuck_after_s`."""
        return time.monotonic() - self._progress_s > self.stuck_after_s

    @property
    def positions(self) -> Positions | None:
        session = self._session
        return session.index.positions if session is not None and self.is_open else None

    @property
    def binding(self) -> Binding | None:
        """The binding of the index while the shard is open, else None."""
        recovered = self._recovered
        return recovered.binding if recovered is not None and self.is_open else None

    @property
    def why_not_open(self) -> str:
        """Why the last attempt to open it failed; empty while it is open, or opens for the first time."""
        return "" if self.is_open else self._problem

    def find_low_water(self, walk_s: float, stopping: Event) -> Mark | None:
        """Find the lowest pending request, in about `walk_s`, and let the owner's thread write the mark.

        None when the shard is not open. Raises RecoveryRequired when it has to be tried again, also when
        `stopping` is set.
        """
        session = self._session
        if session is None or not self.is_open:
            return None
        return self._mark_handover.walk_and_wait(
            session, walk_s, lambda pause_s: stopping.wait(pause_s) or self._session is not session
        )

    def poll(self) -> None:
        self._wake.set()

    def recover(self, reason: Exception) -> None:
        self._recovery_reason = reason
        self._pace.hurry()
        self._wake.set()

    def take(self, batch: Parsed, while_busy: Callable[[], None] | None = None) -> bool:
        """Give a batch of request records to intake; False when the shard is not open, or must recover.

        `while_busy` may be called while Redis is busy with the batch. Raises IndexFull when Redis has no
        room; RecoveryRequired is left to the owner's own thread.
        """
        session = self._session
        if session is None or not self.is_open or self._recovery_reason is not None:
            return False  # the batch is read again once the shard has been reopened
        position = session.index.positions.requests
        if position < batch.start:
            self.opened(self, position)  # something before it was not stored: read from there again
            return False
        try:
            taken = session.intake.store(batch, self.clock.latest_ms(), while_busy)
            self._record_taken(session, taken)
        except RecoveryRequired as reason:
            if self._session is session:  # otherwise the shard has been recovered since
                self.recover(reason)
            return False
        return True

    def _record_taken(self, session: ShardSession, taken: Taken) -> None:
        self.metrics.taken(self.shard, taken)
        self.metrics.positions(self.shard, session.index.positions)
        if taken.first_due_ms is not None:
            self.wake_at(taken.first_due_ms)

    def wake_at(self, due_ms: int) -> None:
        """Look at the index at this due time, if nothing is known to be due before it."""
        if self.wake_up:
            with self._lock:
                if self._next_due_ms is None or due_ms < self._next_due_ms:
                    self._next_due_ms = due_ms
                    self._wake.set()

    def apply_while_opening(self, batch: Batch, opening: Rebuild | None) -> Taken:
        """Apply requests that the index does not know yet, for recovery."""
        assert self._session is not None
        taken = self._session.intake.parse_and_store(batch, self.clock.latest_ms(), opening)
        self._record_taken(self._session, taken)
        return taken

    def _run(self) -> None:
        retrying = Retrying(
            wait=wait_random_exponential(multiplier=0.1, max=10),
            stop=stop_when_event_set(self._stopping),
            sleep=sleep_using_event(self._stopping),  # a stop must not wait for the backoff
            reraise=True,
        )
        short_runs = 0
        while not self._stopping.is_set():
            began, makes_progress = time.monotonic(), False
            try:
                retrying(self._open)
                began = time.monotonic()  # a run is measured without its opening, which may be long
                self._dispatch_until_recovery()
            except Exception as reason:
                makes_progress = isinstance(reason, Refused)  # what was refused is out of the way
                if not self._stopping.is_set():
                    self._log_failure(reason)
            finally:
                self._close_session()
            is_short = time.monotonic() - began < SHORT_RUN_S and not makes_progress
            short_runs = min(short_runs + 1, MOST_DOUBLED) if is_short else 0
            self._stopping.wait(min(LONGEST_PAUSE_S, 0.05 * 2**short_runs) if short_runs else 0)
        self.ended(self)

    def _open(self) -> None:
        began = time.monotonic()
        try:
            # Set before recovery, which stores requests through it (`apply_while_opening`).
            self._session = session = self.open_session(self)
            recovered = session.recovery.open()
            session.note_recovered(recovered)
            session.journal.close()  # seldom needed from now on; its next use opens it again
            self._recovery_reason = None
            self._pace.resume()
            # `lose` waits 3 s, a rebuild takes minutes: the shard may have another owner by now.
            if self._stopping.is_set():
                raise RecoveryRequired(f"{self.shard}: released while it was being opened")
            try:
                self._tick(session)  # a shard that cannot deliver is not open
            except Refused as refused:  # now out of the way: it opens again without a pause
                self._recovery_reason = refused
            self.metrics.recovered(self.shard, recovered)
            if recovered.gone:  # counted now: an opening that fails reports them again
                session.index.forget_gone()
        except Exception as reason:
            self._log_failure(reason)
            self._close_session()
            raise
        self._recovered = recovered  # before it is open: the caretaker compares its binding
        self.is_open = True
        self.opened(self, session.index.positions.requests)
        logger.info(
            "%s: open after %.3f s at request %d, receipt %d; %d outcomes read, %d void",
            self.shard, time.monotonic() - began, *session.index.positions,
            recovered.outcomes, recovered.missing,
        )  # fmt: skip

    def _dispatch_until_recovery(self) -> None:
        session = self._session
        assert session is not None
        while not self._stopping.is_set():
            # Cleared before anything is looked at: a wake-up that comes during the tick is kept.
            self._wake.clear()
            with self._lock:  # so that intake wakes this thread for what the tick misses
                self._next_due_ms = None
            if self._recovery_reason is not None:
                raise self._recovery_reason
            began = time.monotonic()
            did = self._tick(session)
            self._mark_handover.write(session)  # only this thread may use the producer
            if not did.is_full:
                self._wait(session.clock, did, began)

    def _tick(self, session: ShardSession) -> Dispatched:
        try:
            did = session.dispatch.tick(session.clock.earliest_ms())
        except Refused:
            self._record_metrics(session, session.dispatch.done)
            raise
        self._record_metrics(session, did)
        return did

    def _record_metrics(self, session: ShardSession, did: Dispatched) -> None:
        now_ms = session.clock.earliest_ms()
        # A shard is stuck if requests are due and ticks neither end nor postpone any of them.
        is_idle = did.oldest_ms is None or did.oldest_ms > now_ms
        if did.due_ms or did.dead or did.postponed or is_idle:
            self._progress_s = time.monotonic()
        self.metrics.dispatched(self.shard, did, now_ms)
        self.metrics.positions(self.shard, session.index.positions)
        self._compare_clocks(session.clock)

    def _compare_clocks(self, clock: ShardClock) -> None:
        behind_ms = clock.behind_ms()
        self.metrics.show(self.shard, kafka_clock_behind_seconds=behind_ms / 1000)
        was_behind, self._is_kafka_behind = self._is_kafka_behind, behind_ms > MAX_SKEW_MS
        if self._is_kafka_behind and not was_behind:
            logger.warning(
                "%s: Kafka's clock is %d ms behind those of Redis and this host; deliveries are "
                "late by as much, except countdowns that began by Kafka's clock; synchronise all "
                "with NTP, and slew Kafka's clock: a step would make these countdowns early",
                self.shard, behind_ms,
            )  # fmt: skip

    def _wait(self, clock: ShardClock, did: Dispatched, began: float) -> None:
        """Wait until the next due time or the next poll, and at least as long as the linger demands."""
        with self._lock:
            known_ms = [ms for ms in (self._next_due_ms, did.next_due_ms) if ms is not None]
            self._next_due_ms = min(known_ms, default=None)
        self._pace.wait(began, has_sent=bool(did.due_ms or did.dead))
        while not self._wake.is_set():
            wait_s = None
            if self.wake_up and self._next_due_ms is not None:
                # Calculated again after each wait: the clock that counts may be behind this host's.
                wait_s = (self._next_due_ms - clock.earliest_ms()) / 1000
                if wait_s <= 0:
                    return
            self._wake.wait(wait_s)

    def _log_failure(self, reason: Exception) -> None:
        self._problem = str(reason)
        if isinstance(reason, RecoveryRequired):
            logger.warning("%s; recovering", reason)
        else:
            logger.exception("%s: unexpected error; recovering", self.shard)

    def _close_session(self) -> None:
        session, self._session = self._session, None  # first: others must not use closed parts
        was_open, self.is_open = self.is_open, False
        self._mark_handover.cancel()
        if was_open:
            self.closed(self)
        if session is not None:
            session.close()
