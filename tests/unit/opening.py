"""What the tests of recovery share: short ways to write the journals and to read the results."""

from __future__ import annotations

from collections.abc import Callable

from blackbox.core.recovery import Recovered, Recovery
from blackbox.records.receipt import Receipt, decode
from blackbox.records.request import Request
from tests.contract.held import NOW_MS
from tests.support.fakes import FakeJournal

Make = Callable[..., Recovery]
Written = Callable[..., None]


def request(caller_id: str | None = None, due_ms: int = NOW_MS) -> Request:
    return Request("orders", b"hi", due_ms, None, [], None, caller_id, None)


def delivered(*offsets: int, at_ms: int = 1, read: int = 0) -> Receipt:
    places = [(offset, offset) for offset in offsets]
    return Receipt(at_ms, delivered={"orders/0": places}, read=read)


def counts(recovered: Recovered) -> tuple[int, int, int]:
    """Outcomes applied, outcomes found void, requests lost to retention."""
    return recovered.outcomes, recovered.missing, recovered.gone


def barriers(journal: FakeJournal) -> list[Receipt]:
    found = [decode(value) for value in journal.receipt_records if value is not None]
    return [receipt for receipt in found if receipt.barrier]
