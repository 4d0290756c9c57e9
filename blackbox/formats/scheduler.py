"""The format `scheduler`: schedules whose terms are in headers; see `docs/scheduler.md`."""

from __future__ import annotations

import re

from blackbox.formats.format import (
    Format,
    Options,
    RefusedError,
    caller_of,
    first_header,
    header_text,
    shown,
    start_ms,
)
from blackbox.records.request import Cancel, Headers, Reason, Record, Request

EPOCH = "scheduler-epoch"
TARGET_TOPIC = "scheduler-target-topic"
TARGET_KEY = "scheduler-target-key"
KEY = "scheduler-key"  # blackbox adds it
# As many as a key in S3 may have. The index holds an id twice, and as JSON, which can take six
# times as much.
MAX_ID_BYTES = 1024
_SECOND = re.compile(rb"[+-]?[0-9]{1,19}")
_MOST = (1 << 63) - 1


class Scheduler(Format):
    """Reads records whose key is the schedule's id, and whose value is the message."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._topic = options.topic
        self._source = options.topic.encode() + b"/"
        self._grace_s = options.grace_s

    def _read(self, record: Record, latest_ms: int) -> Request | Cancel | None:
        if record.value is None and self._is_tombstone(record):
            return None
        schedule_id = _schedule_id(record.key)
        if record.value is None:
            return Cancel(schedule_id)
        return self._request(schedule_id, record, latest_ms)

    def _is_tombstone(self, record: Record) -> bool:
        """Whether blackbox wrote this record, which has no value, when a schedule had ended."""
        # The last header of blackbox's own tombstone names the record that it ends.
        name, source = record.headers[-1] if record.headers else ("", None)
        if name != "blackbox-source" or not (source or b"").startswith(self._source):
            return False
        # A cancel with the headers of another schedule's message has them as well. The last of
        # these is blackbox's own; a schedule that was refused has none.
        return first_header(record.headers[::-1], KEY) in (None, record.key)

    def _request(self, schedule_id: str, record: Record, latest_ms: int) -> Request:
        epoch_s = _epoch_s(first_header(record.headers, EPOCH))
        began_ms = start_ms(record, latest_ms)
        due_ms = self._due_ms(epoch_s * 1000, began_ms, f"{EPOCH} {epoch_s}")
        expires_ms = None if self._grace_s is None else (epoch_s + self._grace_s) * 1000
        return Request(
            self._target(_target_topic(record.headers), TARGET_TOPIC),
            record.value,
            due_ms,
            first_header(record.headers, TARGET_KEY),
            [*record.headers, *self._added(record)],
            caller_of(record.headers),
            schedule_id,
            expires_ms,
        )

    def _added(self, record: Record) -> Headers:
        written_s = max(record.timestamp_ms, 0) // 1000
        return [
            ("scheduler-timestamp", str(written_s).encode()),
            (KEY, record.key),
            ("scheduler-topic", self._topic.encode()),
        ]


def _target_topic(headers: Headers) -> str:
    given = header_text(headers, TARGET_TOPIC)
    if not given:
        what = "missing" if given is None else "empty"
        detail = f"{TARGET_TOPIC} is {what}; give the topic to deliver to"
        raise RefusedError(Reason.BAD_TOPIC, detail)
    return given


def _schedule_id(key: bytes | None) -> str:
    if key is not None and len(key) > MAX_ID_BYTES:
        limit = f"the id of a schedule may have at most {MAX_ID_BYTES}"
        detail = f"the key has {len(key)} bytes; {limit}; give a shorter one, such as a hash of it"
        raise RefusedError(Reason.BAD_ID, detail)
    try:
        text = (key or b"").decode()
    except UnicodeDecodeError:
        given = f"the key is {shown(key)}, which is not UTF-8"
        detail = f"{given}; give the id of the schedule as UTF-8"
        raise RefusedError(Reason.BAD_ID, detail) from None
    if not text.strip():
        given = "missing" if key is None else f"{shown(text)}, which is blank"
        raise RefusedError(Reason.BAD_ID, f"the key is {given}; give the id of the schedule")
    return text


def _epoch_s(given: bytes | None) -> int:
    if given is not None and _SECOND.fullmatch(given) and 0 <= int(given) <= _MOST:
        return int(given)
    what = "missing" if given is None else shown(given)
    detail = f"{EPOCH} is {what}; give a non-negative Unix second such as 1769842800"
    raise RefusedError(Reason.BAD_DUE_TIME, detail)
