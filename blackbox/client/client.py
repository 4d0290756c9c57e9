"""Request delayed messages from any Python program."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar, TypeVarTuple

from blackbox.client.pending_write import ACKNOWLEDGED_WITHIN_S, PendingWrite
from blackbox.client.request_value import request_value
from blackbox.client.request_writer import RequestWriter
from blackbox.client.rescheduling import ReplacementRecord
from blackbox.client.state_reader import State, StateReader
from blackbox.core.journal_search import LOOK_UP_S
from blackbox.records.request import Shard, request_id

ACKNOWLEDGEMENTS_POLLED_EVERY_S = 0.002

Found = TypeVar("Found")
Given = TypeVarTuple("Given")


class TooLate(Exception):
    """The request cannot be rescheduled: it is not pending."""


class Later(NamedTuple):
    """A message to be delivered to `topic`, at an instant or after a delay.

    `value`: str and bytes are delivered unchanged, None as a tombstone, anything else as JSON.
    `when`: an aware datetime, or a timedelta from the time Kafka accepts the request. A later request
    with the same `id` replaces this one. After `expires_after` it becomes a dead letter instead. With
    `every`, or `cron` and its `timezone`, it is delivered repeatedly until its `id` is cancelled;
    `when` may then be None.
    """

    key: str | bytes | None
    value: Any
    topic: str
    when: datetime | timedelta | None
    id: str | None = None
    headers: Mapping[str, str] | None = None
    expires_after: timedelta | None = None
    every: timedelta | None = None
    cron: str | None = None
    timezone: str | None = None


class _BaseClient:
    def __init__(
        self,
        bootstrap_servers: str,
        *,
        caller: str | None = None,
        request_topic: str = "TB",
        kafka_settings: Mapping[str, str] | None = None,
    ) -> None:
        self._writer = RequestWriter(
            bootstrap_servers,
            caller=caller,
            request_topic=request_topic,
            kafka_settings=kafka_settings,
        )
        self._reader = StateReader(self._writer.access, request_topic)

    def _write(self, messages: Iterable[Later | tuple[Any, ...]]) -> list[PendingWrite]:
        # All values before the first write: after an error of one of them, nothing has been written.
        asked = [(_value(message), message.id) for message in (Later(*one) for one in messages)]
        return [self._writer.write(value, key=id) for value, id in asked]

    def _write_replacement(
        self, id: str, found: tuple[Shard, ReplacementRecord] | None
    ) -> PendingWrite:
        if found is None:
            raise TooLate(f"{id} is no longer pending; get(id) returns its state")
        return self._writer.write_replacement(*found)


class Client(_BaseClient):
    """Writes requests in the format `countdown` to `request_topic`. Use it from one thread only.

    with Client("localhost:9092", caller="orders") as client:
        client.send_later("customer-7", {"order": 17}, "reminders", timedelta(seconds=90))
    """

    def send_later(
        self,
        key: str | bytes | None,
        value: Any,
        topic: str,
        when: datetime | timedelta | None,
        *,
        id: str | None = None,
        headers: Mapping[str, str] | None = None,
        expires_after: timedelta | None = None,
        every: timedelta | None = None,
        cron: str | None = None,
        timezone: str | None = None,
    ) -> str:
        """Request one message; returns the request's id once Kafka has acknowledged it.

        The parameters are the fields of `Later`. Raises NotSent when Kafka does not accept the
        request; MaybeSent, a NotSent, when it may nevertheless have been written; ValueError for a
        datetime without a time zone, or a number that JSON cannot express.
        """
        message = Later(key, value, topic, when, id, headers, expires_after, every, cron, timezone)
        [found] = self.send_many([message])
        return found

    def send_many(self, messages: Iterable[Later | tuple[Any, ...]]) -> list[str]:
        """Request many messages; returns their ids in the same order, once Kafka has acknowledged all.

        A tuple holds the fields of a `Later`. Raises NotSent when Kafka does not accept one of them,
        MaybeSent when one of those may have been written; others may have been accepted. Nothing is
        written after any other exception, such as that of an invalid message or of the iterable.
        """
        return self._ids(self._write(messages))

    def cancel(self, id: str) -> str:
        """Write a cancel of the pending request with this id; it may come too late.

        `id` is the id that `send_later` returned, or the caller's own id. With the caller's own id,
        a cancel record goes to every partition of the request topic; if there are several, two go to
        the partition of the key. Returns the id of the first one, once Kafka has acknowledged all of
        them. Raises NotSent.
        """
        return self._ids(self._writer.write_cancel(id))[0]

    def reschedule(
        self, id: str, when: datetime | timedelta, *, timeout_s: float = LOOK_UP_S
    ) -> str:
        """Deliver the pending request with this id, as `send_later` returned it, at another time.

        Returns the new id once Kafka has acknowledged the new request. If the message is delivered
        before a service has read the new request, it is still delivered only once: the new request
        becomes a dead letter, `too-late`. Raises TooLate when the request is not pending, NotSent, and
        what `get` raises.
        """
        found = self._reader.replacement(id, when, timeout_s)
        return self._ids([self._write_replacement(id, found)])[0]

    def get(self, id: str, *, timeout_s: float = LOOK_UP_S) -> State:
        """Look up, in Kafka alone, the state of the request with this id, as `send_later` returned it.

        Raises ValueError for any other id, including the caller's own. Raises LookupFailed when Kafka does
        not answer, does not let this caller read, or reading for `timeout_s` did not find the state.
        """
        return self._reader.get(id, timeout_s)

    def _ids(self, writes: list[PendingWrite]) -> list[str]:
        self._writer.wait_for(writes)
        return [one.id for one in writes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()
        self._reader.close()


class AsyncClient(_BaseClient):
    """`Client` for the coroutines of one event loop.

    async with AsyncClient("localhost:9092", caller="orders") as client:
        await client.send_later("customer-7", {"order": 17}, "reminders", timedelta(seconds=90))
    """

    _polling: asyncio.Task[None] | None = None

    @cached_property
    def _lookups(self) -> ThreadPoolExecutor:
        # Look-ups share one consumer, and a cancelled one goes on in its thread. With a thread of their own,
        # others that wait for it take none of the loop's few threads.
        return ThreadPoolExecutor(1, "blackbox-lookup")

    async def send_later(
        self,
        key: str | bytes | None,
        value: Any,
        topic: str,
        when: datetime | timedelta | None,
        *,
        id: str | None = None,
        headers: Mapping[str, str] | None = None,
        expires_after: timedelta | None = None,
        every: timedelta | None = None,
        cron: str | None = None,
        timezone: str | None = None,
    ) -> str:
        """As `Client.send_later`."""
        message = Later(key, value, topic, when, id, headers, expires_after, every, cron, timezone)
        [found] = await self.send_many([message])
        return found

    async def send_many(self, messages: Iterable[Later | tuple[Any, ...]]) -> list[str]:
        """As `Client.send_many`."""
        return await self._ids(self._write(messages))

    async def cancel(self, id: str) -> str:
        """As `Client.cancel`."""
        # write_cancel uses the count for 5 s. Counting may wait for Kafka, and not in the loop.
        await asyncio.to_thread(self._writer.partitions)
        return (await self._ids(self._writer.write_cancel(id)))[0]

    async def reschedule(
        self, id: str, when: datetime | timedelta, *, timeout_s: float = LOOK_UP_S
    ) -> str:
        """As `Client.reschedule`."""
        found = await self._look_up(self._reader.replacement, id, when, timeout_s)
        [new_id] = await self._ids([self._write_replacement(id, found)])
        return new_id

    async def get(self, id: str, *, timeout_s: float = LOOK_UP_S) -> State:
        """As `Client.get`; one at a time."""
        return await self._look_up(self._reader.get, id, timeout_s)

    async def _look_up(self, what: Callable[[*Given], Found], *given: *Given) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._lookups, what, *given)

    async def _ids(self, writes: list[PendingWrite]) -> list[str]:
        # On a timeout `check` raises MaybeSent, which says what to do.
        with suppress(TimeoutError):
            async with asyncio.timeout(ACKNOWLEDGED_WITHIN_S):
                while not all(one.is_settled for one in writes):
                    await self._next_poll()
        self._writer.check(writes)
        return [request_id(*one.place_if_known) for one in writes]

    async def _next_poll(self) -> None:
        # One poll serves all waiting coroutines. Cancelling one of them must not cancel the poll.
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())
        await asyncio.shield(self._polling)

    async def _poll(self) -> None:
        await asyncio.sleep(ACKNOWLEDGEMENTS_POLLED_EVERY_S)
        self._writer.poll()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self._writer.close)
        await self._look_up(self._reader.close)
        self._lookups.shutdown(wait=False)


def _value(message: Later) -> bytes:
    when, expires_after = message.when, message.expires_after
    # JSON has numbers, too, but the id is also the key of the record.
    if not isinstance(message.id, str | None):
        raise TypeError(f"the id {message.id!r} is not text; give a str")
    return request_value(
        message.topic,
        message.value,
        countdown_s=when.total_seconds() if isinstance(when, timedelta) else None,
        at=None if isinstance(when, timedelta) else when,
        id=message.id,
        key=message.key,
        headers=message.headers,
        expires_after_s=None if expires_after is None else expires_after.total_seconds(),
        every_s=None if message.every is None else message.every.total_seconds(),
        cron=message.cron,
        timezone=message.timezone,
    )
