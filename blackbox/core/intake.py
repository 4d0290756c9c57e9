"""The first verb, intake: requests from the journal enter the index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from blackbox.core.parsing import Parsed, parse_batch, touched_by
from blackbox.core.plan import Batch, Plan, Tail, View
from blackbox.core.ports import Admission, IntakeIndex, Rulings
from blackbox.core.rebuild import Rebuild, outcome_unknown
from blackbox.core.resolve import resolve
from blackbox.core.upcoming import Upcoming, upcoming
from blackbox.formats import Format
from blackbox.records.entry import Entry
from blackbox.records.refusal_causes import BrokenRule
from blackbox.records.request import NOT_ADMITTED


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of one pass. `first_due_ms` is the earliest due time it stored, if any.

    `carried` came from the cold tier, and were accepted before. `refused` counts the requests that
    were not admitted, by reason and caller. `kafka_ahead_ms` is how much later than both local clocks the
    broker timestamped the last record, 0 if it is earlier.
    """

    accepted: int
    invalid: int
    cancelled: int
    replaced: int
    first_due_ms: int | None
    carried: int = 0
    refused: Mapping[tuple[str, str], int] = field(default_factory=dict)
    # a matter of clocks: two passes that did the same are equal
    kafka_ahead_ms: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Intake:
    """Applies batches of one shard's request records to its index, in journal order.

    Requests due beyond the horizon stay out of it; None: there is no cold tier. Without an
    `admission`, callers are not limited. `check_log` raises Shortened if Kafka now has another
    record where this one was read.
    """

    format: Format
    index: IntakeIndex
    horizon_ms: int | None
    admission: Admission | None = None
    check_log: Callable[[Tail], None] = lambda tail: None

    def store(
        self,
        parsed: Parsed,
        now_ms: int,
        while_busy: Callable[[], None] | None = None,
        opening: Rebuild | None = None,
    ) -> Taken:
        """Store a parsed batch, steps I2 and I3; while Redis is busy, call `while_busy`."""
        rulings, shard = parsed.rulings, self.index.shard
        checked_tail: Tail | None = None
        over: Mapping[int, BrokenRule] | None = None

        def make_plan(view: View) -> Plan:
            nonlocal over, checked_tail
            if parsed.tail is not None and view.tail is not None and view.tail != checked_tail:
                is_again = parsed.start < view.positions.requests
                # A log loses its end only when another leader begins. The first record of a batch
                # that begins below the position does not show whether one did.
                if is_again or view.tail.may_be_lost(parsed.epoch):
                    self.check_log(view.tail)
                checked_tail = view.tail
            changes = parsed.changes
            if rulings is not None:
                if over is None:  # counted once, however often the plan is made
                    over = rulings.over_quota(shard, parsed.end, parsed.epochs, view)
                changes = rulings.applied(changes, over, view.judged)
            if opening is not None:
                view = view._replace(too_late=opening.too_late)
            plan = resolve(changes, view)
            plan.tail = parsed.tail
            if rulings is not None:
                plan.counted = rulings.counted_of(plan.puts)
            return plan

        ended = None if opening is None else opening.ended
        touched = touched_by(parsed.changes)
        plan = self.index.store(
            parsed.start, parsed.end, touched, make_plan, now_ms, while_busy, ended
        )
        return _taken(plan, rulings, parsed.kafka_ahead_ms)

    def parse_and_store(
        self, batch: Batch, latest_ms: int, opening: Rebuild | None = None
    ) -> Taken:
        """Store one batch, while a shard is opened and in the Spark engine: the steps I1 to I3.

        The same again changes nothing. `latest_ms` is the later of Redis' and this host's clock. A later
        timestamp that the broker did not set counts as `latest_ms`. Raises PositionsMoved when Redis is
        behind the batch, IndexFull when Redis has no room (nothing was stored), IndexLost when the outcome
        is unknown, Shortened when the log has lost its end and other records took its place.
        """
        rulings = None if self.admission is None else self.admission.rulings()
        # I1. An invalid record becomes an entry that is due at once: dispatch writes the dead
        # letter in the transaction of a receipt, so it has one outcome even after a crash.
        parsed = parse_batch(self.format, batch, latest_ms, self.horizon_ms, rulings)
        if opening is not None and opening.unknown_before_ms is not None:
            parsed = outcome_unknown(batch, parsed, opening.unknown_before_ms)
        return self.store(parsed, latest_ms, opening=opening)

    def upcoming(self, batch: Batch, latest_ms: int) -> Iterator[Upcoming]:
        """The requests that this batch replaces, cancels or carries on, before it can be stored."""
        return upcoming(parse_batch(self.format, batch, latest_ms, self.horizon_ms).changes)


def _taken(plan: Plan, rulings: Rulings | None, kafka_ahead_ms: int | None) -> Taken:
    puts = plan.puts.values()
    bad = [put for put in puts if type(put) is Entry and put.reason is not None]
    refused = Counter(
        (put.reason or "", rulings.name_of(put.caller))
        for put in bad
        if rulings is not None and put.reason in NOT_ADMITTED
    )
    carried = sum(offset in plan.puts or offset in plan.to_cold for offset in plan.carried)
    return Taken(
        accepted=max(0, len(puts) - len(bad) + len(plan.to_cold) - carried),
        invalid=len(bad) - refused.total(),
        refused=refused,
        cancelled=plan.cancelled,
        replaced=plan.replaced,
        first_due_ms=min(map(attrgetter("due_ms"), puts), default=None),
        carried=carried,
        kafka_ahead_ms=kafka_ahead_ms,
    )
