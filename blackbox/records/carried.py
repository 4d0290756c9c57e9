"""The cold tier: requests that are due far ahead stay in the journal, out of the index.

A request is cold when it was due further ahead than the horizon at the time it was written. The
index remembers it by one bit. Before it is due, promotion writes its record again at the end of the
same partition, with a header that names the request. Intake puts that record into the index if the
bit is still set. So the journal alone decides what is in the index, and a record that was written
twice, or too late, changes nothing.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import orjson

from blackbox.records.cancel import as_request, replaces
from blackbox.records.request import END_OF_TIMES_MS, MAX_OFFSET, Headers, Record

HEADER = "blackbox-carried"
"""The last header of a carried record."""

# The lengths of a name and of a value, as Kafka writes them, have at most five bytes each.
LENGTHS_BYTES = 10

# A request was written before it is written again, but brokers' clocks may step back in between.
MAX_STEP_BACK_MS = 86_400_000


class Carry(NamedTuple):
    """The request that a carried record stands for.

    `previous` is the offset of the record it takes the place of. `origin` is the offset of the
    request as its caller wrote it, from which its id is made, and `timestamp_ms` when that was
    written. `is_cold`: it was only written again before retention removes the previous record, and
    stays out of the index.
    """

    previous: int
    origin: int
    timestamp_ms: int
    is_cold: bool


def carried(headers: Headers) -> bool:
    # the last header: no delivered message ends with it
    return bool(headers) and headers[-1][0] == HEADER


def carry_of(record: Record) -> Carry:
    """The header of a carried record, parsed. Raises ValueError for one that promotion did not write."""
    value = record.headers[-1][1] or b""
    try:
        # callers can write this header too: everything is checked
        previous, origin, timestamp_ms, is_cold = orjson.loads(value)
        numbers = (previous, origin, timestamp_ms)
        # not isinstance, which takes true for an int
        if not all(type(number) is int for number in numbers) or type(is_cold) is not bool:
            raise ValueError
        if not 0 <= origin <= previous < record.offset <= MAX_OFFSET:
            raise ValueError
        if not 0 <= timestamp_ms <= _latest_ms(record):
            raise ValueError
    except (ValueError, TypeError):
        why = f"the header {HEADER} is {value[:80]!r}; only blackbox may write it; remove it"
        raise ValueError(why) from None
    return Carry(previous, origin, timestamp_ms, is_cold)


def _latest_ms(record: Record) -> int:
    """The latest time at which the request of this carried record can have been written."""
    # with a later one no request is cold, and there is no room in an index or a table for its due time
    last_ms = END_OF_TIMES_MS - 1
    if not record.has_broker_time:  # its timestamp says nothing, as its writer chose it
        return last_ms
    return min(last_ms, record.timestamp_ms + MAX_STEP_BACK_MS)


def carry_on(record: Record, *, is_cold: bool) -> Headers:
    """The headers under which this record is written again."""
    if carried(record.headers):
        # the id and the start of the countdown stay those of the request as its caller wrote it
        _, origin, timestamp_ms, _ = carry_of(record)
        own = record.headers[:-1]
    else:
        origin, timestamp_ms, own = record.offset, record.timestamp_ms, record.headers
    value = orjson.dumps([record.offset, origin, timestamp_ms, is_cold])
    return [*own, (HEADER, value)]


def removed_record(offset: int) -> Record:
    """The record that promotion writes for a cold request whose record Kafka has removed: nothing but the header."""
    return Record(offset, 0, None, None, [])


def stands_for_removed(record: Record) -> bool:
    """Whether this carried record is that of a request whose own record Kafka had removed."""
    return record.key is None and record.value is None and len(record.headers) == 1


def record_bytes(record: Record) -> int:
    """How much of a producer's and a topic's limit this record takes, at most, without compression."""
    size = len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:
        size += len(name.encode()) + len(value or b"") + LENGTHS_BYTES
    return size


def original_record(record: Record) -> Record:
    """A carried record as its caller wrote it, at its own place. Raises as `carry_of`."""
    carry = carry_of(record)
    asked = record._replace(timestamp_ms=carry.timestamp_ms, headers=record.headers[:-1])
    # it replaced another request when its own record was read, not again now
    return as_request(asked) if replaces(asked.headers) else asked


def original_if_carried(record: Record) -> Record:
    """Any record as its caller wrote it; one with a forged header as it is."""
    with suppress(ValueError):
        return original_record(record) if carried(record.headers) else record
    return record
