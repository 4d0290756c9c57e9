"""Limits on how many callers read or make changes at once; others wait without using a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi.exceptions import HTTPException

from blackbox.api.connections import most_open

# Shares of the 40 threads that answer, so that reads and changes do not block each other: each may
# wait seconds for Kafka or Redis. Fewer reads, as a read uses much of the CPU core that delivers.
READS_AT_ONCE = 8
CHANGES_AT_ONCE = 24

READ_WITHIN_S = 2.0
CHANGE_WITHIN_S = 10.0
"""How long a read, or a change, waits for its turn."""

# One of each at a time: a page of schedules has megabytes, a read of the dead letters reads up to
# 10,000 records of each partition, and a replay or a discard may wait 30 s for open transactions.
SCHEDULES_WITHIN_S = 10.0
LETTERS_WITHIN_S = 10.0

# How many may wait, as parts of the connections. A connection that waits is not closed for a new
# one, so all that wait, and all that are answered, must leave room for probes. And the request of a
# client that has left stays until its turn.
SHARE = 3  # one in three for reads, and as many for changes
SMALL_SHARE = 32


class Turns:
    """Turns of all callers of one app. Each raises HTTPException 503 when others take too long or too many wait."""

    def __init__(self) -> None:
        self._reads = _Queue(READS_AT_ONCE, SHARE)
        self._changes = _Queue(CHANGES_AT_ONCE, SHARE)
        self._letters = _Queue(1, SMALL_SHARE)
        self._schedules = _Queue(1, SMALL_SHARE)
        self._closing_letters = _Queue(1, SMALL_SHARE)

    async def read(self) -> AsyncIterator[None]:
        async with self._reads.turn(READ_WITHIN_S, f"{READS_AT_ONCE} reads are in progress"):
            yield

    async def change(self) -> AsyncIterator[None]:
        busy = f"{CHANGES_AT_ONCE} changes are waiting for Kafka or Redis"
        async with self._changes.turn(CHANGE_WITHIN_S, busy):
            yield

    async def letters(self) -> AsyncIterator[None]:
        busy = "another read of the dead letters is in progress"
        async with self._letters.turn(LETTERS_WITHIN_S, busy):
            yield

    async def close_letters(self) -> AsyncIterator[None]:
        busy = "another replay or discard is in progress"
        async with self._closing_letters.turn(CHANGE_WITHIN_S, busy):
            yield

    def schedules(self, within_s: float | None) -> AbstractAsyncContextManager[None]:
        """For one page of schedules; None waits without limit."""
        return self._schedules.turn(within_s, "another read of schedules is in progress")


class _Queue:
    def __init__(self, at_once: int, share: int) -> None:
        self._places = asyncio.Semaphore(at_once)
        self._most_waiting = max(1, most_open() // share)
        self._waiting = 0

    @asynccontextmanager
    async def turn(self, within_s: float | None, busy: str) -> AsyncIterator[None]:
        # Without a limit of time, the status has been sent: 503 cannot be answered any more.
        if within_s is not None and self._waiting >= self._most_waiting:
            raise _busy(busy)
        self._waiting += 1
        try:
            # Only the wait has a limit; a change that has begun must report its outcome.
            async with asyncio.timeout(within_s):
                await self._places.acquire()
        except TimeoutError:
            raise _busy(busy) from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._places.release()


def _busy(why: str) -> HTTPException:
    return HTTPException(503, f"{why}; try again", {"Retry-After": "1"})
