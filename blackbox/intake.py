"""The first verb: requests from the journal enter the index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol

from blackbox.entry import Entry
from blackbox.formats import Format
from blackbox.plan import Batch, Change, Plan, View, resolve
from blackbox.request import Cancel, Invalid, Reason, Record, Request


class Index(Protocol):
    """What intake needs of a shard's index."""

    def store(
        self,
        start: int,
        end: int,
        caller_ids: Sequence[str],
        make_plan: Callable[[View], Plan],
        now_ms: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> Plan: ...


@dataclass(frozen=True, slots=True)
class Taken:
    """What one pass did. `first_due_ms` is the earliest due time it stored, if any."""

    accepted: int
    invalid: int
    cancelled: int
    replaced: int
    first_due_ms: int | None


class Parsed(NamedTuple):
    """A batch that has been read: what each record of the offsets `start` to `end` - 1 asks for."""

    start: int
    end: int
    changes: Sequence[tuple[int, Change]]


class Intake:
    """Applies batches of one shard's request records to its index, in journal order."""

    def __init__(self, contract: Format, index: Index) -> None:
        self._contract = contract
        self._index = index

    def apply(self, batch: Batch, latest_ms: int) -> Taken:
        """Store one batch; the same batch again changes nothing.

        1. parse each record; an invalid one becomes an entry that is due at once, which dispatch
           moves to the dead-letter topic;
        2. compare the labels in Redis with the position the batch was read from;
        3. in one MULTI: entries, replacements and cancels, then the label `requests`.

        `latest_ms` is the later of Redis' and this host's clock: a record's timestamp beyond it
        counts as it. Raises LabelsMoved when Redis is behind the batch, IndexFull when Redis has
        no room (nothing was stored), IndexLost when the outcome is unknown.
        """
        return self.store(parse(self._contract, batch, latest_ms), latest_ms)

    def store(
        self, parsed: Parsed, now_ms: int, meanwhile: Callable[[], None] | None = None
    ) -> Taken:
        """Steps 2 and 3. `meanwhile` is called while Redis is busy: time to parse the next batch."""
        start, end, changes = parsed
        caller_ids = sorted({c.caller_id for _, c in changes if c.caller_id is not None})

        def make_plan(view: View) -> Plan:
            return resolve(changes, view)

        plan = self._index.store(start, end, caller_ids, make_plan, now_ms, meanwhile)
        return _taken(plan)

    def reread(self, record: Record) -> Entry:
        """The entry of a request whose stored form was lost."""
        [(_, change)] = parse(self._contract, Batch(0, 1, [record]), record.timestamp_ms).changes
        if isinstance(change, Cancel):
            raise ValueError(f"the record at offset {record.offset} is a cancel, not a request")
        return Entry(*change) if isinstance(change, Request) else change


def parse(contract: Format, batch: Batch, latest_ms: int) -> Parsed:
    """Step 1: what a batch's records ask for; touches nothing."""
    read = contract.parse
    changes: list[tuple[int, Change]] = []
    for record in batch.records:
        asked: Request | Cancel | Invalid = (
            read(record, latest_ms)
            if record.unreadable is None
            else Invalid(Reason.BAD_HEADERS, record.unreadable)
        )
        if isinstance(asked, Invalid):
            due_ms = min(record.timestamp_ms, latest_ms)
            changes.append((record.offset, refused_entry(record, asked, due_ms)))
        else:
            changes.append((record.offset, asked))
    return Parsed(batch.start, batch.end, changes)


def refused_entry(record: Record, invalid: Invalid, due_ms: int) -> Entry:
    """The entry of a request that can only become a dead letter: the record's own content."""
    return Entry(
        target="",
        message=record.value,
        due_ms=due_ms,
        key=record.key,
        headers=record.headers,
        reason=invalid.reason,
        detail=invalid.detail,
    )


def _taken(plan: Plan) -> Taken:
    puts = plan.puts.values()
    invalid = list(map(type, puts)).count(Entry)
    return Taken(
        accepted=len(puts) - invalid,
        invalid=invalid,
        cancelled=plan.cancelled,
        replaced=plan.replaced,
        first_due_ms=min(map(attrgetter("due_ms"), puts), default=None),
    )
