"""The first verb, intake: requests from the journal enter the index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from blackbox.core import interpret
from blackbox.core.offset_set import OffsetSet
from blackbox.core.plan import (
    UNKNOWN_EPOCH,
    Batch,
    Carried,
    Change,
    Cold,
    Plan,
    Replacement,
    Tail,
    Touched,
    View,
)
from blackbox.core.ports import Index
from blackbox.core.resolve import resolve
from blackbox.formats import Format
from blackbox.formats.terms import start_ms
from blackbox.records.entry import Entry
from blackbox.records.outgoing import Refusal
from blackbox.records.request import NOT_ADMITTED, Cancel, Record
from blackbox.rules.admission import Admission
from blackbox.rules.rules import QuotaRequest, Rules


@dataclass(frozen=True, slots=True)
class Taken:
    """What one pass did. `first_due_ms` is the earliest due time it stored, if any.

    `carried` came from the cold tier, and were accepted before. `refused` counts the requests that
    were not admitted, by reason and caller. `kafka_ahead_ms` is how much later than both local clocks the
    broker timestamped the last record, 0 if it is earlier. It is a matter of clocks, so it is not
    compared: two passes that did the same are equal.
    """

    accepted: int
    invalid: int
    cancelled: int
    replaced: int
    first_due_ms: int | None
    carried: int = 0
    refused: Mapping[tuple[str, str], int] = field(default_factory=dict)
    kafka_ahead_ms: int | None = field(default=None, compare=False)


class Rebuild(NamedTuple):
    """How requests are read while an index is rebuilt.

    `ended` have an outcome. Replacements by id in `too_late` ended nothing. A request that was due
    before `unknown_before_ms`, or a replacement by id that was written before it, may have had an
    outcome that is gone.
    """

    ended: OffsetSet
    unknown_before_ms: int | None = None
    too_late: Container[int] = frozenset()


class Upcoming(NamedTuple):
    """What requests that stay in Kafka end, by caller ids and ids; carried ones as (offset, previous, origin).

    `replacement` is the replacement by id after them, as (offset, id, caller id), if there is one.
    """

    touched: Touched
    carried: Sequence[tuple[int, int, int]]
    replacement: tuple[int, str, str | None] | None


class Parsed(NamedTuple):
    """A parsed batch: what each record of the offsets `start` to `end` - 1 asks for.

    `refused` maps places in `changes` to the dead letters of requests that `rules` do not admit.
    `quota_requests` are the requests that count against a quota. `epoch` is the leader epoch of the first
    record, `tail` is the last one.
    """

    start: int
    end: int
    changes: Sequence[tuple[int, Change]]
    rules: Rules | None = None
    refused: Mapping[int, Change] = {}
    quota_requests: Sequence[QuotaRequest] = ()
    tail: Tail | None = None
    epoch: int = UNKNOWN_EPOCH
    kafka_ahead_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Intake:
    """Applies batches of one shard's request records to its index, in journal order.

    Requests due beyond the horizon stay out of it; None: there is no cold tier. Without an
    `admission`, callers are not limited. `check_log` raises Shortened if Kafka now has another
    record where this one was read.
    """

    format: Format
    index: Index
    horizon_ms: int | None
    admission: Admission | None = None
    check_log: Callable[[Tail], None] = lambda tail: None

    def apply(self, batch: Batch, latest_ms: int, opening: Rebuild | None = None) -> Taken:
        """Store one batch; storing the same batch again changes nothing.

        1. parse each record. An invalid one becomes an entry that is due at once, which dispatch
           moves to the dead-letter topic. One beyond the horizon only sets a bit;
        2. compare the positions in Redis with the position the batch was read from;
        3. in one MULTI: entries, replacements and cancels, then the position `requests`.

        `latest_ms` is the later of Redis' and this host's clock. A later timestamp that the broker
        did not set counts as `latest_ms`. Raises PositionsMoved when Redis is behind the batch,
        IndexFull when Redis has no room (nothing was stored), IndexLost when the outcome is
        unknown, Shortened when the log has lost its end and other records took its place.
        """
        rules = None if self.admission is None else self.admission.rules()
        parsed = parse(self.format, batch, latest_ms, self.horizon_ms, rules)
        if opening is not None and opening.unknown_before_ms is not None:
            changes = interpret.outcome_unknown(batch, parsed.changes, opening.unknown_before_ms)
            parsed = parsed._replace(changes=changes, refused={}, quota_requests=())
        return self.store(parsed, latest_ms, opening=opening)

    def store(
        self,
        parsed: Parsed,
        now_ms: int,
        while_busy: Callable[[], None] | None = None,
        opening: Rebuild | None = None,
    ) -> Taken:
        """Store a parsed batch, steps 2 and 3 of `apply`; while Redis is busy, call `while_busy`."""
        rules = parsed.rules
        checked_tail: Tail | None = None
        over: dict[int, Refusal] | None = None

        def make_plan(view: View) -> Plan:
            nonlocal over, checked_tail
            if parsed.tail is not None and view.tail is not None and view.tail != checked_tail:
                is_again = parsed.start < view.positions.requests
                if is_again or view.tail.may_be_lost(parsed.epoch):
                    self.check_log(view.tail)
                checked_tail = view.tail
            if over is None:
                over = self._over_quota(parsed, view)
            changes = _with_refusals(parsed, over, view.judged)
            if opening is not None:
                view = view._replace(too_late=opening.too_late)
            plan = resolve(changes, view)
            plan.tail = parsed.tail
            if rules is not None and rules.counted:
                plan.counted = rules.counted_of(plan.puts)
            return plan

        ended = None if opening is None else opening.ended
        touched = touched_by(parsed.changes)
        plan = self.index.store(
            parsed.start, parsed.end, touched, make_plan, now_ms, while_busy, ended
        )
        return _taken(plan, rules, parsed.kafka_ahead_ms)

    def _over_quota(self, parsed: Parsed, view: View) -> dict[int, Refusal]:
        if self.admission is None:
            return {}
        new = [
            one
            for one in parsed.quota_requests
            if one.record.offset >= view.judged and one.record.offset not in view.skipped
        ]
        return self.admission.over_quota(self.index.shard, parsed.end, new) if new else {}

    def upcoming(self, batch: Batch, latest_ms: int) -> Iterator[Upcoming]:
        """What this batch replaces, cancels or carries on, before it can be stored.

        Each part but the last ends with a replacement by id, which counts only if the request it
        names is pending then.
        """
        changes = parse(self.format, batch, latest_ms, self.horizon_ms).changes
        first = 0
        for at, (offset, change) in enumerate(changes):
            if type(change) is Replacement:
                yield _upcoming(changes[first:at], (offset, change.id, change.caller_id))
                first = at + 1
        yield _upcoming(changes[first:], None)

    def reread(self, record: Record) -> Entry:
        """The entry of a request whose stored form was lost."""
        return interpret.reread(self.format, record)


def parse(
    format: Format,
    batch: Batch,
    latest_ms: int,
    horizon_ms: int | None,
    rules: Rules | None = None,
) -> Parsed:
    """Parse what a batch's records ask for (step 1); no side effects. Without `rules` all is allowed."""
    changes: list[tuple[int, Change]] = []
    refused: dict[int, Change] = {}
    counted: list[QuotaRequest] = []
    for record in batch.records:
        change, request = interpret.interpret_record(format, record, latest_ms, horizon_ms)
        if change is None:
            continue
        if rules is not None and request is not None:
            written_ms = start_ms(record, latest_ms)
            refusal = rules.refusal(request, written_ms)
            name, rule = rules.of(request.caller)
            if refusal is not None:
                refused[len(changes)] = interpret.not_admitted(
                    record, request, change, refusal, written_ms
                )
            elif rule.has_quota and interpret.counts(change, request, record):
                counted.append(QuotaRequest(len(changes), name, record, request, written_ms))
        changes.append((record.offset, change))
    last = batch.records[-1] if batch.records else None
    epoch, last_epoch = batch.epochs
    tail = None if last is None else Tail.of(last, last_epoch)
    ahead_ms = max(0, last.timestamp_ms - latest_ms) if last and last.has_broker_time else None
    return Parsed(batch.start, batch.end, changes, rules, refused, counted, tail, epoch, ahead_ms)


def touched_by(changes: Sequence[tuple[int, Change]]) -> Touched:
    """What must be read from the index before these changes can be planned."""
    caller_ids = {change.caller_id for _, change in changes if change.caller_id is not None}
    cold = [(offset, change) for offset, change in changes if _may_be_cold(change)]
    previous = [change.previous for _, change in cold if isinstance(change, Carried)]
    cancelled = {c.id for _, c in changes if type(c) is Cancel and c.id is not None}
    replaced = {c.id for _, c in changes if type(c) is Replacement}
    return Touched(
        sorted(caller_ids),
        [*previous, *(offset for offset, _ in cold)],
        sorted(cancelled | replaced),
        sorted(replaced),
        [offset for offset, change in changes if type(change) in (Carried, Replacement)],
        [change.origin for _, change in changes if type(change) is Carried],
    )


def _upcoming(
    changes: Sequence[tuple[int, Change]], replacement: tuple[int, str, str | None] | None
) -> Upcoming:
    others = [one for one in changes if type(one[1]) is not Carried]
    carried = [(o, c.previous, c.origin) for o, c in changes if type(c) is Carried]
    return Upcoming(touched_by(others), carried, replacement)


def _may_be_cold(change: Change) -> bool:
    content = change.content if type(change) is Replacement else change
    return type(content) in (Cold, Carried)


def _with_refusals(
    parsed: Parsed, over: Mapping[int, Refusal], judged_before: int
) -> Sequence[tuple[int, Change]]:
    """The changes, with dead letters for what is refused; requests judged before are left as they are."""
    if not parsed.refused and not over:
        return parsed.changes
    judged = list(parsed.changes)
    for place, letter in parsed.refused.items():
        offset, _ = judged[place]
        if offset >= judged_before:
            judged[place] = offset, letter
    for place, _, record, request, written_ms in parsed.quota_requests:
        if record.offset in over:
            offset, change = judged[place]
            letter = interpret.not_admitted(record, request, change, over[offset], written_ms)
            judged[place] = offset, letter
    return judged


def _taken(plan: Plan, rules: Rules | None, kafka_ahead_ms: int | None) -> Taken:
    puts = plan.puts.values()
    bad = [put for put in puts if type(put) is Entry and put.reason is not None]
    refused = Counter(
        (put.reason or "", rules.of(put.caller)[0])
        for put in bad
        if rules is not None and put.reason in NOT_ADMITTED
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
