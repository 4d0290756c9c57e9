"""Requests after which dispatch writes a record to a request topic, and what intake would read there."""

from __future__ import annotations

from collections.abc import Iterator

from blackbox.core.plan import Batch, Bounds
from blackbox.formats import Options, make_format
from blackbox.records.request import Record
from tests.contract.held import NOW_MS
from tests.unit.dispatch.entries import to

COUNTDOWN = make_format("countdown", Options(max_countdown_s=1000, own_topics=lambda topic: False))
RECURS = to(caller_id="a", recurs="every 60000")
SCHEDULES = make_format(
    "scheduler", Options(max_countdown_s=1000, own_topics=lambda topic: False, topic="TB")
)
CANCEL_A = b'{"id": "a", "cancel": true}'


class Log:
    """The request topic above the position, including uncommitted records."""

    def __init__(self, *records: Record) -> None:
        self._records = records

    def request_bounds(self) -> Bounds:
        return Bounds(0, max((record.offset + 1 for record in self._records), default=0))

    def requests(self, start: int, end: int) -> Iterator[Batch]:
        yield Batch(start, end, [r for r in self._records if start <= r.offset < end])


def cancel_of(caller_id: str, offset: int) -> Record:
    return Record(offset, NOW_MS, b"", b'{"id": "%s", "cancel": true}' % caller_id.encode(), [])
