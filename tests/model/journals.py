"""The content of an index as the journals define it. The model calls pure functions of the product."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from blackbox.core.plan import Carried, Change, Cold, Named, Positions, Replacement, View
from blackbox.core.resolve import resolve
from blackbox.records import receipt as product
from blackbox.records.entry import Entry
from blackbox.records.request import Cancel, Request
from tests.model.state import (
    NOBODY,
    NOWHERE,
    Index,
    Mark,
    Receipt,
    Record,
    State,
    below,
    mask,
    members,
)

Records = tuple[Record, ...]

NAMED_BY = {
    Record.REPLACES_0: 0,
    Record.REPLACES_1: 1,
    Record.NAMED_REPLACES_0: 0,
    Record.PROMOTES_0: 0,
    Record.PROMOTES_1: 1,
    Record.RENEWS_0: 0,
}
"""The record that a conditional one names."""

REPLACES = (Record.REPLACES_0, Record.REPLACES_1, Record.NAMED_REPLACES_0)
PROMOTES = (Record.PROMOTES_0, Record.PROMOTES_1)
CARRIED = (*PROMOTES, Record.RENEWS_0)
UNCONDITIONAL = (Record.REQUEST, Record.NAMED, Record.COLD)
WITH_CALLER_ID = (Record.NAMED, Record.COLD, Record.NAMED_REPLACES_0, *CARRIED)

_ENTRY = Entry("orders", b"", 0)
_LETTER = Entry("", b"", 0, reason="too-late")


@cache
def of_kind(records: Records, kinds: tuple[Record, ...]) -> int:
    """Which of the records are of these kinds."""
    return mask(at for at, record in enumerate(records) if record in kinds)


@cache
def origins(records: Records, offsets: int) -> int:
    """The same requests, as their callers wrote them."""
    return mask({_origin(records, at) for at in members(offsets)})


def _origin(records: Records, at: int) -> int:
    while records[at] in CARRIED:
        at = NAMED_BY[records[at]]
    return at


class Standing(NamedTuple):
    """Requests that no record has ended, hot and cold; which of them are dead letters; which one has the caller id."""

    hot: int
    cold: int
    letters: int
    holder: int


@cache
def standing(records: Records, counted: int) -> Standing:
    """The requests that these records leave, given which conditional ones counted."""
    hot = cold = letters = 0
    holder = NOBODY
    for at, record in enumerate(records):
        one, does_count = 1 << at, counted >> at & 1
        if record is Record.GAP:
            continue
        if record in CARRIED and not (does_count and (hot | cold) >> NAMED_BY[record] & 1):
            continue
        if record in REPLACES and not does_count:
            hot, letters = hot | one, letters | one
            continue
        ended = 1 << NAMED_BY[record] if record in NAMED_BY else 0
        if record is Record.CANCELS_0:
            ended = mask(one for one in range(at) if _origin(records, one) == 0)
        if (record in WITH_CALLER_ID or record is Record.CANCEL) and holder != NOBODY:
            ended |= 1 << holder
        if holder != NOBODY and ended >> holder & 1:
            holder = NOBODY
        hot, cold = hot & ~ended, cold & ~ended
        if record in (Record.COLD, Record.RENEWS_0):
            cold |= one
        elif record not in (Record.CANCEL, Record.CANCELS_0):
            hot |= one
        if record in WITH_CALLER_ID:
            holder = at
    return Standing(hot, cold, letters, holder)


def delivered_in(log: tuple[Receipt, ...]) -> int:
    """The requests whose message a consumer sees."""
    delivered = 0
    for receipt in log:
        delivered |= receipt.delivered & ~receipt.lost
    return delivered


@cache
def outcomes(log: tuple[Receipt, ...]) -> tuple[int, ...]:
    """The requests that each receipt ends, without void outcomes (`receipt.without_void`)."""
    receipts = [
        product.Receipt(0, dead=members(receipt.delivered), void=members(receipt.void))
        for receipt in log
    ]
    return tuple(
        mask(receipt.removals()) for _, receipt in product.without_void(enumerate(receipts))
    )


def union(sets: Iterator[int]) -> int:
    found = 0
    for one in sets:
        found |= one
    return found


def marks_in(state: State) -> Iterator[Mark]:
    """The committed marks, newest first; a journal's start only removes older ones."""
    for receipt in reversed(state.log):
        if receipt.mark is not None:
            yield receipt.mark


class Planned(NamedTuple):
    """An index after a batch, and the effects of the batch: see `plan.Plan`."""

    entries: int
    cold: int
    letters: int
    holder: int
    ended: int
    counted: int
    ignored: int
    moved: int
    was_ended: int


@cache
def planned(records: Records, seen: Index, start: int, end: int) -> Planned:
    """How a batch changes an index (`plan.resolve`)."""
    changes = [
        (at, asked) for at in range(start, end) if (asked := _asked(records, at)) is not None
    ]
    plan = resolve(changes, _view(records, seen))
    puts, ended = mask(plan.puts), mask(set(plan.removals))
    holder = plan.holders.get("name")
    late = mask(at for at, put in plan.puts.items() if type(put) is Entry and put.reason)
    ignored = mask(plan.ignored)
    return Planned(
        entries=(seen.entries | puts) & ~ended,
        cold=(seen.cold | mask(plan.to_cold)) & ~mask(plan.from_cold),
        letters=(seen.letters | late) & ~ended,
        holder=NOBODY if holder is None else holder,
        ended=ended & seen.entries,
        counted=of_kind(records, tuple(NAMED_BY)) & below(end) & ~below(start) & ~ignored,
        ignored=ignored,
        moved=plan.moved[0] if plan.moved.get(0) in plan.puts else seen.moved,
        was_ended=plan.cancelled_cold.get(0, seen.ended),
    )


def _view(records: Records, seen: Index) -> View:
    named = {
        str(at): Named(
            at,
            bool(seen.entries & ~seen.letters & 1 << at),
            "name" if seen.entries >> at & 1 and records[at] in WITH_CALLER_ID else None,
        )
        for at in range(len(records))
    }
    if seen.moved != NOWHERE:
        named["0"] = named[str(seen.moved)]._replace(origin=0)
    return View(
        Positions(seen.requests, seen.receipts),
        members(seen.skip),
        {} if seen.holder == NOBODY else {"name": seen.holder},
        members(seen.cold),
        seen.known_from,
        named,
        verdicts_below=seen.verdicts_below,
        ignored=members(seen.ignored),
        early=frozenset(members(seen.early)),
        cancelled_cold={} if seen.ended == NOWHERE else {0: seen.ended},
        has_cold=seen.cold != 0,
        renewed_below=Record.RENEWS_0 in records[seen.known_from : seen.requests],
    )


def _asked(records: Records, at: int) -> Change | None:
    record = records[at]
    caller_id = "name" if record in WITH_CALLER_ID else None
    hot, cold = _ENTRY._replace(caller_id=caller_id), Cold(caller_id)
    if record is Record.GAP:
        return None
    if record is Record.CANCEL:
        return Cancel("name")
    if record is Record.CANCELS_0:
        return Cancel(None, "0")
    if record in REPLACES:
        return Replacement(str(NAMED_BY[record]), caller_id, hot, _LETTER)
    if record in CARRIED:
        asked = hot if record in PROMOTES else cold
        return Carried(NAMED_BY[record], _origin(records, at), caller_id, asked)
    if record is Record.COLD:
        return cold
    return Request("orders", b"", 0, None, [], None, caller_id, None)


@cache
def defined(
    records: Records, log: tuple[Receipt, ...], counted: int, requests: int, receipts: int
) -> Index:
    """The index that these positions define, without fields that only its owners need."""
    removed = union(iter(outcomes(log)[:receipts]))
    left = standing(records[:requests], counted)
    return Index(
        requests,
        receipts,
        entries=left.hot & ~removed,
        holder=NOBODY if left.holder != NOBODY and removed >> left.holder & 1 else left.holder,
        skip=removed & ~below(requests),
        cold=left.cold & ~removed,
        letters=left.letters & ~removed,
    )
