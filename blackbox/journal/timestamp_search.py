"""The search for the first young record of a partition in which some records have timestamps of the future."""

from __future__ import annotations

from collections.abc import Callable

RecordFrom = Callable[[int], tuple[int, int] | None]
"""The offset and the timestamp (epoch ms) of the first record at or behind an offset, if there is one."""

MOST_PASSED_OVER = 100
"""More records of the future one after the other are not passed over: what is in doubt stays."""


def first_within(
    record_from: RecordFrom, start: int, end: int, since_ms: int, latest_ms: int
) -> int:
    """The first offset from `start` on whose record has a timestamp from `since_ms` to `latest_ms`, or `end`.

    Kafka's own search stops at the first record that is late enough. If the clock of a broker was ahead for a
    moment, that may be one from the future, with years of traffic behind it. Apart from such records,
    timestamps are taken to grow with the offsets.
    """
    low, high = start, end
    while low < high:
        middle = (low + high) // 2
        found = _of_the_past(record_from, middle, high, latest_ms)
        if found is not None and found[1] < since_ms:
            low = found[0] + 1
        else:
            high = middle
    return low


def _of_the_past(
    record_from: RecordFrom, offset: int, end: int, latest_ms: int
) -> tuple[int, int] | None:
    for _ in range(MOST_PASSED_OVER):
        found = record_from(offset)
        if found is None or found[0] >= end:
            return None
        if found[1] <= latest_ms:
            return found
        offset = found[0] + 1
    return None
