"""Limits on how many callers read or make changes at once; others wait without using a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi.exceptions import HTTPException

# Shares of the 40 threads that answer, so that reads and changes do not block each other: each may
# wait seconds for Kafka or Redis. Fewer reads, as a read uses much of the CPU core that delivers.
READS_AT_ONCE = 8
CHANGES_AT_ONCE = 24

READ_WITHIN_S = 2.0
CHANGE_WITHIN_S = 10.0
"""How long a read, or a change, waits for its turn."""

# One of each at a time: a page of schedules has megabytes, and a read of the dead letters reads up
# to 10,000 records of each partition.
SCHEDULES_WITHIN_S = 10.0
LETTERS_WITHIN_S = 10.0


class Turns:
    """Turns of all callers of one app. Each raises HTTPException 503 when others take too long."""

    def __init__(self) -> None:
        self._reads = asyncio.Semaphore(READS_AT_ONCE)
        self._changes = asyncio.Semaphore(CHANGES_AT_ONCE)
        self._letters = asyncio.Semaphore(1)
        self._schedules = asyncio.Semaphore(1)

    async def read(self) -> AsyncIterator[None]:
        async with _turn(self._reads, READ_WITHIN_S, f"{READS_AT_ONCE} reads are in progress"):
            yield

    async def change(self) -> AsyncIterator[None]:
        busy = f"{CHANGES_AT_ONCE} changes are waiting for Kafka or Redis"
        async with _turn(self._changes, CHANGE_WITHIN_S, busy):
            yield

    async def letters(self) -> AsyncIterator[None]:
        busy = "another read of the dead letters is in progress"
        async with _turn(self._letters, LETTERS_WITHIN_S, busy):
            yield

    def schedules(self, within_s: float | None) -> AbstractAsyncContextManager[None]:
        """For one page of schedules; None waits without limit."""
        return _turn(self._schedules, within_s, "another read of schedules is in progress")


@asynccontextmanager
async def _turn(
    places: asyncio.Semaphore, within_s: float | None, busy: str
) -> AsyncIterator[None]:
    try:
        # Only the wait has a limit; a change that has begun must report its outcome.
        async with asyncio.timeout(within_s):
            await places.acquire()
    except TimeoutError:
        raise HTTPException(503, f"{busy}; try again", {"Retry-After": "1"}) from None
    try:
        yield
    finally:
        places.release()
