"""Reads over HTTP: what they wait for, and what they share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from blackbox.admin.admin import Admin, Stats
from blackbox.api import cache, requests, stats
from blackbox.api.turns import Turns
from blackbox.config.settings import load
from blackbox.core.plan import Positions
from blackbox.core.request_status import RequestStatus
from blackbox.index.redis_servers import RedisServers
from blackbox.records.request import Shard, request_id

SHARD = Shard("TB", 0)


def get(router: APIRouter, *paths: str) -> list[httpx.Response]:
    """The answers to these requests, which are sent at the same time."""
    app = FastAPI()
    app.include_router(router)

    async def talk() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await asyncio.gather(*map(client.get, paths))

    return asyncio.run(talk())


class Behind:
    """A lookup of one shard, whose intake reads the request `order-17` as soon as somebody waits for it."""

    def __init__(self) -> None:
        self.has_waited = False

    def shards(self) -> Iterator[Shard]:
        yield SHARD

    def pending_under(self, caller_id: str) -> list[tuple[Shard, int]]:
        return [(SHARD, 0)] if self.has_waited else []

    def request_ends(self) -> dict[Shard, int]:
        self.has_waited = True
        return {SHARD: 1}

    @property
    def inspector(self) -> Any:
        return self

    def positions(self, shard: Shard) -> Positions:
        return Positions(1, 0)

    def status(self, shard: Shard, offset: int) -> RequestStatus:
        return RequestStatus(request_id(shard, offset), shard.source(offset), "pending")


@pytest.mark.parametrize(
    ("used", "has_waited", "status"),
    [(0.5, True, 200), (0.84, True, 200), (0.85, False, 404), (1.1, False, 404)],
)
def test_a_lookup_waits_for_intake_unless_redis_is_full(
    monkeypatch: pytest.MonkeyPatch, used: float, has_waited: bool, status: int
) -> None:
    admin, lookup = Admin(load(kafka_bootstrap_servers="127.0.0.1:1")), Behind()
    monkeypatch.setattr(admin, "_lookup", lambda: lookup)
    monkeypatch.setattr(RedisServers, "memory_used", lambda _: used)

    [answer] = get(requests.routes(admin, Turns()), "/requests/order-17")

    assert (answer.status_code, lookup.has_waited) == (status, has_waited)


class CountedAdmin:
    """An admin that counts how often it computes statistics."""

    def __init__(self) -> None:
        self.computed = 0

    def stats(self, now_ms: int, edges_ms: Sequence[int]) -> Stats:
        self.computed += 1
        return Stats({}, Counter({"shop": self.computed}), Counter(), self.computed, [0] * 60)


def test_all_viewers_of_the_page_share_one_computation_of_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stats, "KEPT_S", 3600.0)
    admin = CountedAdmin()
    router = stats.routes(cast(Admin, admin), Turns())

    answers = [*get(router, *["/stats"] * 6), *get(router, "/stats")]

    assert [answer.status_code for answer in answers] == [200] * 7
    assert {answer.json()["counted"] for answer in answers} == {1}
    assert admin.computed == 1


def test_statistics_are_at_most_a_second_old(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(cache, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    admin = CountedAdmin()
    router = stats.routes(cast(Admin, admin), Turns())

    for age_s, computed in ((0.0, 1), (0.9, 1), (1.0, 2)):
        clock.now_s = 100.0 + age_s
        get(router, "/stats")
        assert admin.computed == computed
