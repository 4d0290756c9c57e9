"""The HTTP API of kafka-message-scheduler, with the same answers."""

from __future__ import annotations

import socket
from base64 import b64encode
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import orjson
from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

from blackbox.admin.admin import Admin
from blackbox.admin.pending import Found
from blackbox.api.access import Access
from blackbox.api.answers import Failure
from blackbox.api.health import Health
from blackbox.api.requests import FAILURES
from blackbox.config.settings import Settings
from blackbox.records.entry import Entry

SCHEDULES_AT_ONCE = 100
"""How many schedules are read at once; each message may have a megabyte or more."""


class OfKafka(BaseModel):
    bootstrap_servers: str
    topics: list[str]
    history_topic: str


class Info(BaseModel):
    hostname: str
    address: list[str]
    server_address: str
    kafka: OfKafka


class Schedule(BaseModel):
    """A pending schedule; `value` is base64, times are unix seconds."""

    id: str
    epoch: int
    timestamp: int
    topic: str
    target_topic: str = Field(alias="target-topic")
    target_key: str = Field(alias="target-key")
    value: str | None


def routes(health: Health, admin: Admin, access: Access, settings: Settings) -> APIRouter:
    """`/liveness`, `/info` and `/schedules`."""
    router = APIRouter(responses=FAILURES)
    looks = [Depends(access.turn)]

    @router.get("/liveness", responses={500: {"model": Failure}})
    async def liveness() -> dict[str, bool]:
        """200 while due messages are delivered, else 500."""
        if health.is_live():
            return {"live": True}
        stuck = ", ".join(map(str, health.stuck()))
        return JSONResponse({"error": f"nothing is delivered from {stuck}"}, 500)  # type: ignore[return-value]

    @router.get("/info", dependencies=looks)
    def info() -> Info:
        """Host, addresses and topics of this service."""
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

    @router.get("/schedules", dependencies=looks, response_model=list[Schedule])
    def schedules() -> StreamingResponse:
        """All pending schedules, the soonest first."""
        found = admin.each(settings.schedule_topics, at_once=SCHEDULES_AT_ONCE, whole=True)
        first = list(islice(found, 1))  # raises before the answer begins if Kafka or Redis is down
        return StreamingResponse(_array(chain(first, found)), media_type="application/json")

    return router


def _array(found: Iterator[Found]) -> Iterator[bytes]:
    before = b"["
    for place, pending in found:
        entry = pending.entry
        if entry is not None and entry.reason is None:
            yield before + orjson.dumps(_schedule(place.shard.topic, entry))
            before = b",\n"
    yield b"[]" if before == b"[" else b"]"


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
    """When the schedule was written: the last such header; blackbox appends its own to the caller's."""
    written = [value for name, value in entry.headers if name == "scheduler-timestamp"]
    return int(written[-1] or 0) if written else 0
