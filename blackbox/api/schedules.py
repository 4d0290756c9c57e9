"""The HTTP API of kafka-message-scheduler, with the same answers."""

from __future__ import annotations

import socket
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import orjson
from fastapi import APIRouter, Depends
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

from blackbox.admin.admin import Admin
from blackbox.admin.pending import Cursor, FoundPending, PendingFilter
from blackbox.api.answers import Failure
from blackbox.api.health import Health
from blackbox.api.openapi import FAILURES
from blackbox.api.turns import SCHEDULES_WITHIN_S, Turns
from blackbox.config.settings import Settings
from blackbox.records.entry import Entry

SCHEDULES_AT_ONCE = 1000

ReadPage = Callable[[Cursor | None], tuple[bytes, Cursor | None]]
"""A page of schedules as JSON behind this place, and where the next one begins."""


class OfKafka(BaseModel):
    """The brokers and topics of this service."""

    bootstrap_servers: str
    topics: list[str]
    history_topic: str


class Info(BaseModel):
    """This service."""

    hostname: str
    address: list[str] = Field(description="the addresses of this host")
    server_address: str = Field(description="where this API listens, host:port")
    kafka: OfKafka


class Schedule(BaseModel):
    """A pending schedule."""

    id: str
    epoch: int = Field(description="when it is due, unix seconds")
    timestamp: int = Field(description="when it was written, unix seconds")
    topic: str = Field(description="the request topic")
    target_topic: str = Field(alias="target-topic")
    target_key: str = Field(alias="target-key")
    value: str | None = Field(description="the message, base64")


def routes(health: Health, admin: Admin, turns: Turns, settings: Settings) -> APIRouter:
    router = APIRouter(responses=FAILURES)
    looks = [Depends(turns.read)]

    @router.get(
        "/liveness",
        responses={500: {"model": Failure, "description": "delivery has stopped for a shard"}},
    )
    # A coroutine without a turn: it answers while all threads wait for Kafka or Redis.
    async def liveness() -> dict[str, bool]:
        """Report whether due messages are delivered."""
        if health.is_live():
            return {"live": True}
        stuck = ", ".join(map(str, health.stuck()))
        return JSONResponse({"error": f"delivery has stopped for {stuck}"}, 500)  # type: ignore[return-value]

    @router.get("/info", dependencies=looks)
    def info() -> Info:
        """Return host, addresses and topics of this service."""
        name = socket.gethostname()
        try:
            addresses = sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)})
        except OSError:
            addresses = []
        return Info(
            hostname=name,
            address=addresses,
            server_address=f"{settings.http_host}:{settings.http_port}",
            kafka=OfKafka(
                bootstrap_servers=settings.kafka_bootstrap_servers,
                topics=settings.schedule_topics,
                history_topic=settings.history_topic,
            ),
        )

    @router.get("/schedules", response_model=list[Schedule])
    async def schedules() -> StreamingResponse:
        """List all pending schedules, the soonest first."""

        def read(after: Cursor | None) -> tuple[bytes, Cursor | None]:
            topics = settings.schedule_topics
            found, next_ = admin.page(PendingFilter(), after, SCHEDULES_AT_ONCE, topics, whole=True)
            return b",\n".join(_schedules(found)), next_

        async with turns.schedules(SCHEDULES_WITHIN_S):
            # Read before the answer begins: only now can a failure still become a 503.
            first = await run_in_threadpool(read, None)
        return StreamingResponse(_array(turns, read, *first), media_type="application/json")

    return router


async def _array(
    turns: Turns, read: ReadPage, text: bytes, next_: Cursor | None
) -> AsyncIterator[bytes]:
    before = b"["
    while True:
        if text:
            yield before
            yield text
            before = b",\n"
        # Only the connection holds the page while the client takes it. No turn is held either, or a
        # slow client would shut out all others.
        text = b""
        if next_ is None:
            break
        yield b"\n"  # returns when the client has taken the page
        # Without limit: the status has been sent, so 503 cannot be answered any more.
        async with turns.schedules(None):
            text, next_ = await run_in_threadpool(read, next_)
    yield b"[]" if before == b"[" else b"]"


def _schedules(found: Iterable[FoundPending]) -> Iterator[bytes]:
    for place, pending in found:
        if pending.entry is not None and pending.entry.reason is None:
            yield orjson.dumps(_schedule(place.shard.topic, pending.entry))


def _schedule(topic: str, entry: Entry) -> dict[str, Any]:
    headers: dict[str, str] = {}
    for name, value in entry.headers:
        text = value.decode(errors="replace") if isinstance(value, bytes) else value or ""
        headers.setdefault(name, text)
    value = entry.message
    return {
        "id": entry.caller_id,
        "epoch": int(headers.get("scheduler-epoch") or 0),
        "timestamp": _timestamp_s(entry),
        "topic": topic,
        "target-topic": entry.target,
        "target-key": (entry.key or b"").decode(errors="replace"),
        "value": None if value is None else b64encode(value).decode(),
    }


def _timestamp_s(entry: Entry) -> int:
    # The last one: a caller's record may have this header already, and blackbox appends its own.
    written = [value for name, value in entry.headers if name == "scheduler-timestamp"]
    return int(written[-1] or 0) if written else 0
