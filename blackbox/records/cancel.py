"""Cancels and replacements by id: records in the partition of the request, whose last header names it.

A cancel has nothing else in it. A replacement is a request like any other of its topic, and takes
the place of the one it names if that is still pending. If not, it becomes a dead letter.
"""

from __future__ import annotations

from uuid import UUID

from blackbox.records.request import Cancel, Headers, Invalid, Reason, Record

HEADER = "blackbox-cancel"
REPLACES = "blackbox-replaces"
"""The last header of such a record: the id of the request."""


def cancels(headers: Headers) -> bool:
    """Whether the record with these headers cancels a request by its id."""
    # the last header: a message that blackbox delivers to a request topic ends with blackbox's own
    return bool(headers) and headers[-1][0] == HEADER


def replaces(headers: Headers) -> bool:
    """Whether the record with these headers replaces a request by its id."""
    return bool(headers) and headers[-1][0] == REPLACES


def cancel_of(record: Record) -> Cancel | Invalid:
    """The request that a cancel or a replacement ends."""
    name, value = record.headers[-1]
    text = (value or b"").decode(errors="replace")
    try:
        # UUID() accepts other spellings too; ids are compared as text
        if UUID(text).version == 8:
            return Cancel(None, str(UUID(text)))
    except ValueError:
        pass
    detail = f"the header {name} is {text[:80]!r}; give an id that blackbox assigned"
    return Invalid(Reason.BAD_CANCEL, detail)


def as_request(record: Record) -> Record:
    """A replacement as a request of its topic."""
    return record._replace(headers=record.headers[:-1])
