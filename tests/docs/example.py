"""The request that all examples use: the first one of the README."""

from __future__ import annotations

from blackbox.formats import Options, make_format
from blackbox.records.request import Record, Request, Shard

SHARD, OFFSET = Shard("TB", 3), 1234
WRITTEN_MS = 1_767_225_600_000
RECORD = Record(
    OFFSET,
    WRITTEN_MS,
    None,
    b'{"topic": "reminders", "message": {"invoice": 7}, "countdown": 90}',
    [("CALLER_SERVICE", b"billing")],
)


def _parsed() -> Request:
    options = Options(max_countdown_s=34_560_000, own_topics=lambda name: False)
    found = make_format("countdown", options).parse(RECORD, WRITTEN_MS)
    assert isinstance(found, Request)
    return found


REQUEST = _parsed()
DUE_MS = REQUEST.due_ms
