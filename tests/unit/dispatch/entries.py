"""The requests that become due in the tests of dispatch, and what was written for them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count as numbers
from typing import Any

from blackbox.core.dispatch import Dispatch
from blackbox.core.interpret import MOST_REFUSED_BYTES, refused_entry
from blackbox.core.parking import bands_of
from blackbox.records import entry as entries
from blackbox.records.entry import Entry
from blackbox.records.outgoing import Outgoing
from blackbox.records.request import Invalid, Reason
from blackbox.rules.target_rates import TargetRates
from tests.contract.held import NOW_MS, held
from tests.support.fakes import FakeWriter, record

LETTERS = "dead-letters"
UNKNOWN = (Reason.UNKNOWN_TOPIC, "the topic 'orders' does not exist; create it")
TOO_LARGE = (Reason.TOO_LARGE, "larger than max.message.bytes")
LARGE = record(0, b"{" * (MOST_REFUSED_BYTES + 1))
NO_JSON = Invalid(Reason.NOT_JSON, "no JSON")
OVER_QUOTA = Invalid(Reason.QUOTA, "too many")

Make = Callable[..., Dispatch]
Pend = Callable[..., None]
Paced = Callable[[str], TargetRates]


def to(target: str = "orders", due_ms: int = NOW_MS, **more: Any) -> Entry:
    return Entry(target, more.pop("message", b"hello"), due_ms, **more)


def invalid() -> Entry:
    return refused_entry(record(0, b"{"), Invalid(Reason.NOT_JSON, "no JSON"), NOW_MS)


def letter(writer: FakeWriter, offset: int) -> Outgoing:
    [found] = [o for o in writer.committed if o.topic == LETTERS and o.offset == offset]
    return found


def told(outgoing: Outgoing) -> tuple[object, object]:
    headers = dict(outgoing.headers)
    return headers["blackbox-reason"], headers["blackbox-detail"]


def stored_entry(client: Any, offset: int) -> Entry:
    return entries.decode(held(client).payloads[offset])


def prefers_the_same_band(target: str) -> str:
    """Another target, which would be parked in the same band."""
    band = next(bands_of(target))
    return next(f"t{n}" for n in numbers() if next(bands_of(f"t{n}")) == band)
