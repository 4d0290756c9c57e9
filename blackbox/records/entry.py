"""The stored form of a request: one JSON line, a newline, then the message bytes untouched."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from blackbox.records.refusal_causes import INVALID, TOO_LATE, rule_of
from blackbox.records.request import EVIDENT, Reason, Request

HeaderValues = Sequence[tuple[str, bytes | str | None]]


class Entry(NamedTuple):
    """A request in the index.

    target     -- the topic that the message goes to
    message    -- the message; None: a tombstone
    due_ms     -- when it is due, epoch ms
    key        -- the key of the message
    headers    -- its headers, without those of blackbox
    caller     -- the caller, by the header `CALLER_SERVICE`
    caller_id  -- the caller's id for the request
    expires_ms -- when it expires, epoch ms
    recurs     -- `every <ms>`, or `cron <time zone> <five fields>`
    attempts   -- how often delivery was postponed because the target could not take the message
    alone      -- true: it gets a transaction of its own, as the broker has refused a batch with it
    reason     -- it can only become a dead letter, with this reason; if it was invalid when it was
                  read, key, message and headers are those of the record
    detail     -- explains the reason; without a reason, why it was postponed
    origin     -- the offset of the request itself, if its member is a carried record
    waits      -- how often in a row it was postponed because its target was unreachable or paused
    shortened  -- how many forms of its dead letter the broker has refused; after the last one, all
                  forms are sent again if it has follow-ups, beside smaller follow-ups
    left_bytes -- the size of a refused record, whose key, message and headers stay in Kafka until its
                  dead letter is written
    """

    target: str
    message: bytes | None
    due_ms: int
    key: bytes | None = None
    headers: HeaderValues = ()
    caller: str | None = None
    caller_id: str | None = None
    expires_ms: int | None = None
    recurs: str | None = None
    attempts: int = 0
    alone: bool = False
    reason: str | None = None
    detail: str | None = None
    origin: int | None = None
    waits: int = 0
    shortened: int = 0
    left_bytes: int = 0

    @property
    def cause(self) -> str | None:
        """With this, all of it can be made again from its record, so Redis has no payload of it."""
        # only its payload says which caller id it holds
        if self.left_bytes == 0 or self.caller_id is not None:
            return None
        if self.reason in EVIDENT:
            return INVALID
        return TOO_LATE if self.reason == Reason.TOO_LATE else rule_of(self.detail)


def encode(entry: Entry | Request) -> bytes:
    """Serialise an entry, or a request as a new entry; inverse of `decode`."""
    if isinstance(entry, Request):
        target, message, due_ms, key, headers, caller, caller_id, expires_ms, recurs = entry
        # the usual request, without the work for fields that it does not have
        is_usual = headers and caller is not None and message is not None
        if is_usual and key is None and caller_id is None and expires_ms is None and recurs is None:
            head = {
                "target": target,
                "due_ms": due_ms,
                "headers": _texts(headers),
                "caller": caller,
            }
            line = orjson.dumps(head, option=orjson.OPT_APPEND_NEWLINE)
            # so no escaped NUL: finding that takes ten times as long
            if _BACKSLASH not in line:
                return line + (message or b"")
    return _encode_unusual(*entry)


_NUL, _BACKSLASH = b"\\u0000", ord("\\")


def _encode_unusual(
    target: str,
    message: bytes | None,
    due_ms: int,
    key: bytes | None,
    headers: HeaderValues,
    caller: str | None,
    caller_id: str | None,
    *seldom: Any,
) -> bytes:
    head: dict[str, Any] = {"target": target, "due_ms": due_ms}
    if headers:
        head["headers"] = _texts(headers)
    if caller is not None:
        head["caller"] = caller
    if key is not None:
        head["key"] = _text(key)
    if message is None:
        head["tombstone"] = True
    if caller_id is not None:
        head["caller_id"] = caller_id
    # a Request has fewer fields than an Entry: those after `recurs` are absent
    for name, value, absent in zip(_SELDOM, seldom, _ABSENT, strict=False):
        if value != absent:
            head[name] = value
    line = orjson.dumps(head, option=orjson.OPT_APPEND_NEWLINE)
    # the Kafka client cuts off text at a NUL, but not bytes
    if headers and _NUL in line:
        head["headers"] = [(name, _text(value, without="\0")) for name, value in headers]
        line = orjson.dumps(head, option=orjson.OPT_APPEND_NEWLINE)
    return line + (message or b"")


_USUAL_FIELDS = 4
_FIRST_SELDOM = Entry._fields.index("expires_ms")
_SELDOM = Entry._fields[_FIRST_SELDOM:]
_ABSENT = tuple(Entry._field_defaults[name] for name in _SELDOM)


def decode(stored: bytes) -> Entry:
    """Parse a stored entry; header values come back as text where they were UTF-8 without NUL.

    Raises ValueError when the bytes were not written by `encode`.
    """
    # JSON escapes a newline, so the first one ends the line whatever the message contains
    line, newline, message = stored.partition(b"\n")
    if not newline:
        raise ValueError(f"not an entry: no newline in {stored[:60]!r}")
    try:
        head = orjson.loads(line)
        # the four fields of the usual request, and no value within them that is an object
        if (
            len(head) == _USUAL_FIELDS
            and "headers" in head
            and "caller" in head
            and line.find(b"{", 1) < 0
        ):
            headers = [(name, value) for name, value in head["headers"]]
            return Entry(head["target"], message, head["due_ms"], None, headers, head["caller"])
        return _entry(head, message)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"not an entry: {stored[:60]!r} ({error!r})") from None


def _entry(head: dict[str, Any], message: bytes) -> Entry:
    take = head.pop
    tombstone = take("tombstone", False)
    key = take("key", None)
    headers = take("headers", ())
    return Entry(
        take("target"),
        None if tombstone else message,
        take("due_ms"),
        None if key is None else _bytes(key),
        [(name, value if type(value) is str else _value(value)) for name, value in headers],
        take("caller", None),
        **head,
    )


def _texts(headers: HeaderValues) -> list[tuple[str, Any]]:
    try:
        return [(name, value.decode()) for name, value in headers]  # type: ignore[union-attr]
    except (UnicodeDecodeError, AttributeError):
        return [(name, _text(value)) for name, value in headers]


def _text(value: bytes | str | None, without: str | None = None) -> Any:
    if value is None:
        return None
    try:
        text = value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        text = None
    if text is not None and (without is None or without not in text):
        return text
    whole = value.encode() if isinstance(value, str) else value
    return {"base64": b64encode(whole).decode()}


def _value(stored: Any) -> bytes | str | None:
    return b64decode(stored["base64"], validate=True) if isinstance(stored, dict) else stored


def _bytes(stored: Any) -> bytes:
    value = _value(stored)
    return value.encode() if isinstance(value, str) else value or b""
