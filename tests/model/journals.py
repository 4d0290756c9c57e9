"""What the journals say of a shard. What the product decides in pure functions, it is asked."""

from __future__ import annotations

from functools import cache

from blackbox import receipt as product
from blackbox.plan import Change, Labels, View, resolve
from blackbox.request import Cancel, Request
from tests.model.state import NOBODY, Index, Receipt, Record, below, mask, members

Records = tuple[Record, ...]


@cache
def requests_of(records: Records) -> int:
    """Which of the records are requests."""
    return mask(at for at, r in enumerate(records) if r in (Record.REQUEST, Record.NAMED))


@cache
def ended_in(records: Records) -> int:
    """The requests that a later one of these records cancels or replaces."""
    named = [at for at, r in enumerate(records) if r in (Record.NAMED, Record.CANCEL)]
    return requests_of(records) & mask(named[:-1])


def delivered_in(log: tuple[Receipt, ...]) -> int:
    """The requests whose message a consumer sees."""
    delivered = 0
    for receipt in log:
        delivered |= receipt.delivered & ~receipt.lost
    return delivered


@cache
def outcomes(log: tuple[Receipt, ...]) -> tuple[int, ...]:
    """What each receipt ends, as whoever reads all of them judges (`receipt.settled`)."""
    receipts = [
        product.Receipt(0, dead=members(receipt.delivered), void=members(receipt.void))
        for receipt in log
    ]
    return tuple(mask(receipt.removals()) for _, receipt in product.settled(enumerate(receipts)))


@cache
def planned(records: Records, seen: Index, start: int, end: int) -> tuple[int, int, int]:
    """What a batch puts, what it ends, and who has the caller id then (`plan.resolve`)."""
    changes = [
        (at, asked) for at in range(start, end) if (asked := _asked(records[at])) is not None
    ]
    holders = {} if seen.holder == NOBODY else {"name": seen.holder}
    labels = Labels(seen.requests, seen.receipts)
    plan = resolve(changes, View(labels, members(seen.skip), holders))
    holder = plan.holders.get("name")
    return mask(plan.puts), mask(set(plan.removals)), NOBODY if holder is None else holder


@cache
def defined(records: Records, log: tuple[Receipt, ...], requests: int, receipts: int) -> Index:
    """The index that these labels stand for."""
    removed = 0
    for ended in outcomes(log)[:receipts]:
        removed |= ended
    read = records[:requests]
    entries = requests_of(read) & ~ended_in(read) & ~removed
    named = [at for at in members(entries) if records[at] is Record.NAMED]
    return Index(
        requests, receipts, entries, max(named, default=NOBODY), removed & ~below(requests)
    )


def _asked(record: Record) -> Change | None:
    if record is Record.GAP:
        return None
    if record is Record.CANCEL:
        return Cancel("name")
    caller_id = "name" if record is Record.NAMED else None
    return Request("orders", b"", 0, None, [], None, caller_id, None)
