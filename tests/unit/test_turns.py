"""Reads and changes over HTTP are limited separately, so that neither occupies all threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from threading import Event
from typing import Any, cast

import httpx
import pytest
from anyio import to_thread
from fastapi import FastAPI

from blackbox.admin.admin import Admin
from blackbox.admin.changes import Cancelled
from blackbox.admin.dead_letters import ClosedLetters
from blackbox.api import dead_letters, requests, schedules
from blackbox.api.access import Access
from blackbox.api.app import make_app
from blackbox.api.turns import CHANGES_AT_ONCE, READS_AT_ONCE, Turns
from blackbox.config.settings import load
from blackbox.core.request_status import RequestStatus
from blackbox.engine.metrics import Metrics
from tests.service.test_http import Patient


class SlowAdmin:
    """Lookups and replays wait for permission; cancels and sent requests are answered at once."""

    def __init__(self) -> None:
        self.may_find = Event()
        self.looked_up = 0
        self.cancelled = 0
        self.closed = 0

    def find(self, id: str) -> RequestStatus | None:
        self.looked_up += 1
        self.may_find.wait(30)
        return None

    def cancel(self, id: str) -> Cancelled:
        self.cancelled += 1
        if id == "slow":
            self.may_find.wait(30)
        return Cancelled(
            "undetermined", RequestStatus(id, "TB/0@1", "undetermined", detail="too much")
        )

    def send(self, values: Sequence[bytes], caller: str | None) -> list[str]:
        return ["id"] * len(values)

    def close_letters(self, places: Sequence[str], *, replay: bool) -> ClosedLetters:
        self.closed += 1
        self.may_find.wait(30)
        return ClosedLetters(list(places), {})


def test_lookups_do_not_occupy_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blackbox.api.turns.READ_WITHIN_S", 0.2)
    admin = SlowAdmin()
    app = FastAPI()
    app.include_router(requests.routes(cast(Admin, admin), Turns()))

    async def talk() -> tuple[Any, Any, list[Any]]:
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=30
        )
        async with client:
            slow = [asyncio.create_task(client.get(f"/requests/{n}")) for n in range(60)]
            refused, _ = await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
            cancelled = await client.delete("/requests/x")
            while sum(one.done() for one in slow) < 60 - READS_AT_ONCE:
                await asyncio.sleep(0.01)
            admin.may_find.set()
            return refused.pop().result(), cancelled, await asyncio.gather(*slow)

    refused, cancelled, all_of_them = asyncio.run(talk())
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert cancelled.status_code == 504
    assert "x was not changed: too much" in cancelled.text
    assert admin.looked_up == READS_AT_ONCE
    assert sum(one.status_code == 404 for one in all_of_them) == READS_AT_ONCE


def test_more_lookups_than_may_wait_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blackbox.api.turns.READ_WITHIN_S", 5)
    monkeypatch.setattr("blackbox.api.connections.MOST", 30)
    admin, waiting = SlowAdmin(), 30 // 3
    app = FastAPI()
    app.include_router(requests.routes(cast(Admin, admin), Turns()))

    async def talk() -> list[Any]:
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=30
        )
        async with client:
            slow = [asyncio.create_task(client.get(f"/requests/{n}")) for n in range(60)]
            while sum(one.done() for one in slow) < 60 - READS_AT_ONCE - waiting:
                await asyncio.sleep(0.01)
            admin.may_find.set()
            return await asyncio.gather(*slow)

    answers = asyncio.run(talk())
    refused = [one for one in answers if one.status_code == 503]
    assert {one.headers["Retry-After"] for one in refused} == {"1"}
    assert admin.looked_up == len(answers) - len(refused) == READS_AT_ONCE + waiting


def test_changes_that_wait_do_not_occupy_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blackbox.api.turns.CHANGE_WITHIN_S", 0.2)
    admin, turns = SlowAdmin(), Turns()
    app = FastAPI()
    app.include_router(requests.routes(cast(Admin, admin), turns))
    settings = load(kafka_bootstrap_servers="127.0.0.1:1")
    app.include_router(schedules.routes(Patient(), cast(Admin, admin), turns, settings))

    async def talk() -> tuple[Any, Any, Any, list[Any]]:
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=30
        )
        async with client:
            slow = [asyncio.create_task(client.delete("/requests/slow")) for n in range(60)]
            refused, _ = await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
            while sum(one.done() for one in slow) < 60 - CHANGES_AT_ONCE:
                await asyncio.sleep(0.01)
            alive, info = await client.get("/liveness"), await client.get("/info")
            admin.may_find.set()
            return refused.pop().result(), alive, info, await asyncio.gather(*slow)

    refused, alive, info, _ = asyncio.run(talk())
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert f"{CHANGES_AT_ONCE} changes" in refused.text
    assert (alive.status_code, info.status_code) == (200, 200)
    assert admin.cancelled == CHANGES_AT_ONCE


@pytest.mark.parametrize("how", ["replay", "discard"])
def test_dead_letters_that_wait_to_be_closed_do_not_delay_requests(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("blackbox.api.turns.CHANGE_WITHIN_S", 0.2)
    admin, turns, access = SlowAdmin(), Turns(), Access(["127.0.0.1"])
    app = FastAPI()
    app.include_router(requests.routes(cast(Admin, admin), turns))
    app.include_router(dead_letters.routes(cast(Admin, admin), access, turns))

    async def talk() -> tuple[Any, Any, list[Any]]:
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=30
        )
        async with client:
            path, named = f"/dead-letters/{how}", {"places": ["letters/0@1"]}
            slow = [asyncio.create_task(client.post(path, json=named)) for _ in range(60)]
            refused, _ = await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
            sent = await client.post("/requests", content=b"{}")
            while sum(one.done() for one in slow) < 60 - admin.closed:
                await asyncio.sleep(0.01)
            admin.may_find.set()
            return refused.pop().result(), sent, await asyncio.gather(*slow)

    refused, sent, all_of_them = asyncio.run(talk())
    assert sent.status_code == 201
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert "another replay or discard is in progress" in refused.text
    assert admin.closed == sum(one.status_code == 200 for one in all_of_them) == 1


def test_a_refusal_is_answered_while_all_threads_wait() -> None:
    settings = load(kafka_bootstrap_servers="127.0.0.1:1")
    app = make_app(Patient(), Metrics(), cast(Admin, SlowAdmin()), settings)

    async def talk() -> list[int]:
        threads = to_thread.current_default_thread_limiter()
        threads.total_tokens = 1
        await threads.acquire_on_behalf_of(app)
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=30
        )
        async with client, asyncio.timeout(5):
            unknown, invalid = await client.get("/unknown"), await client.get("/stats?step_ms=x")
            return [unknown.status_code, invalid.status_code]

    assert asyncio.run(talk()) == [404, 422]
