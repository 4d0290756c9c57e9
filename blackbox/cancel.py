"""Cancels by id: a record of any request topic, in the partition of the request, with one header.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from uuid import UUID

from blackbox.request import Cancel, Headers, Invalid, Reason, Record

HEADER = "blackbox-cancel"
"""The last header of such a record: the id of the request."""


def cancels(headers: Headers) -> bool:
    """Whether the record with these headers cancels the request of an id."""
    return bool(headers) and headers[-1][0] == HEADER


def cancel_of(record: Record) -> Cancel | Invalid:
    """What such a record asks for."""
    text = (record.headers[-1][1] or b"").decode(errors="replace")
    try:
        if UUID(text).version == 8:
            return Cancel(None, str(UUID(text)))
    except ValueError:
        pass
    detail = f"the header {HEADER} is {text[:80]!r}; give an id as blackbox gives it"
    return Invalid(Reason.BAD_CANCEL, detail)
