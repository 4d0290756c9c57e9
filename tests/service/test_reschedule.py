"""A pending request gets another due time; a delivered one is not delivered again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import httpx
import pytest
import redis

from blackbox import AsyncClient, Client, TooLate
from blackbox.admin.admin import Admin
from blackbox.admin.changes import Changes
from blackbox.embedded import EmbeddedRedis
from blackbox.records.request import request_id
from tests.service.conftest import Serve
from tests.service.test_api import ask, asked, state
from tests.service.test_cli import blackbox
from tests.service.test_undeliverable import reasons
from tests.support.world import World, both_engines_at_length, read_all, until

pytestmark = pytest.mark.service

SOON = timedelta(milliseconds=300)


@pytest.fixture
def service(serve: Serve) -> httpx.Client:
    return serve()


@pytest.fixture
def client(world: World) -> Iterator[Client]:
    with Client(
        world.kafka.bootstrap_servers, caller="shop", request_topic=world.requests
    ) as client:
        yield client


def delivered(world: World, target: int = 0) -> list[bytes | None]:
    return [m.value() for m in read_all(world.kafka.bootstrap_servers, world.targets[target])]


@pytest.mark.proof
def test_a_cancel_after_a_reschedule_is_reported_as_too_late(
    world: World, service: httpx.Client, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = ask(service, asked(world, 3600))
    named = ask(service, asked(world, 3600, id="named"))
    admin, moved = Admin(world.settings()), []
    write_cancel = Changes._write_cancel

    def write_after_a_reschedule(changes: Changes, *cancel: Any) -> int:
        shard, offset = cancel[:2]
        moved.append(client.reschedule(request_id(shard, offset), timedelta(seconds=4)))
        return write_cancel(changes, *cancel)

    monkeypatch.setattr(Changes, "_write_cancel", write_after_a_reschedule)
    with closing(admin):
        late, in_time = admin.cancel(id), admin.cancel("named")
    assert late.outcome == "too-late"
    assert late.request is not None
    assert (late.request.id, late.request.detail) == (id, f"replaced by {moved[0]}")
    assert in_time.outcome == "cancelled"  # a cancel by caller id ends every request with that id
    until("it is delivered", lambda: state(service, moved[0]) == "delivered")
    assert state(service, moved[1]) == state(service, named) == "ended"


@both_engines_at_length
def test_a_pending_request_is_rescheduled_over_http_by_either_id(
    world: World, service: httpx.Client
) -> None:
    number = '{"topic": "%s", "message": 1.10, "countdown": 3600, "id": "order-17"}'
    [first] = service.post("/requests", content=number % world.targets[0]).json()["ids"]
    answer = service.patch("/requests/order-17", json={"countdown": 7200})
    assert (answer.status_code, answer.json()["outcome"]) == (200, "rescheduled")
    later = answer.json()["request"]
    assert (later["caller_id"], later["target"]) == ("order-17", world.targets[0])
    assert state(service, first) == "ended"

    sooner = service.patch(f"/requests/{later['id']}", json={"countdown": 0.3}).json()["request"]
    until("it is delivered", lambda: delivered(world) == [b"1.10"])
    assert state(service, sooner["id"]) == "delivered"
    assert service.patch("/requests/order-17", json={"countdown": 1}).status_code == 404
    answer = service.patch(f"/requests/{sooner['id']}", json={"countdown": 1})
    assert answer.json()["outcome"] == "too-late"
    assert reasons(world) == {}


def test_an_invalid_time_is_refused_and_changes_nothing(
    world: World, service: httpx.Client
) -> None:
    id = ask(service, asked(world, 3600))
    until("it is pending", lambda: state(service, id) == "pending")
    for due in ({}, {"countdown": 1, "at": 2}, {"countdown": "soon"}, {"at": "soon"}):
        assert service.patch(f"/requests/{id}", json=due).status_code == 422, due
    answer = service.patch(f"/requests/{id}", json={"countdown": 10**9})
    assert "BLACKBOX_MAX_COUNTDOWN_S" in answer.json()["error"]
    assert state(service, id) == "pending"


def test_a_replacement_of_a_delivered_request_becomes_a_dead_letter(
    world: World, service: httpx.Client, client: Client
) -> None:
    id = client.send_later("k", "once", world.targets[0], timedelta(0), id="daily")
    until("it is delivered", lambda: delivered(world) == [b"once"])
    pending = client.send_later("k", "next", world.targets[0], timedelta(hours=1), id="daily")
    world.send_raw(
        json.dumps(asked(world, 0, message="twice", id="daily")),
        [("blackbox-replaces", id.encode())],
        partition=partition_of(id),
    )
    world.flush()
    until("it is a dead letter", lambda: reasons(world) == {"too-late": 1})
    assert delivered(world) == [b"once"]
    assert state(service, pending) == client.get(pending).state == "pending"
    [letter] = service.get("/dead-letters").json()["letters"]
    replayed = service.post("/dead-letters/replay", json={"places": [letter["place"]]}).json()
    assert "could deliver twice" in replayed["left"][letter["place"]]
    with pytest.raises(TooLate, match="is no longer pending"):
        client.reschedule(id, SOON)


def partition_of(id: str) -> int:
    return int(id.replace("-", "")[10:12] + id.replace("-", "")[13:16], 16)


@pytest.mark.proof
def test_the_client_reschedules_without_a_service(
    world: World, client: Client, serve: Serve
) -> None:
    id = client.send_later(None, b"\x00\xff", world.targets[0], timedelta(hours=1))
    again = client.reschedule(id, timedelta(hours=2))
    last = client.reschedule(again, SOON)
    assert [client.get(one).state for one in (id, again, last)] == ["ended", "ended", "pending"]
    serve()
    until("it is delivered", lambda: delivered(world) == [b"\x00\xff"])
    assert client.get(last).state == "delivered"
    [message] = read_all(world.kafka.bootstrap_servers, world.targets[0])
    assert [*dict(message.headers() or [])] == [
        "CALLER_SERVICE", "blackbox-id", "blackbox-due-ms", "blackbox-source",
    ]  # fmt: skip


def test_the_async_client_reschedules(world: World, service: httpx.Client) -> None:
    async def moved() -> str:
        brokers = world.kafka.bootstrap_servers
        async with AsyncClient(brokers, request_topic=world.requests) as client:
            id = await client.send_later(None, "m", world.targets[0], timedelta(hours=1))
            return await client.reschedule(id, SOON)

    id = asyncio.run(moved())
    until("it is delivered", lambda: state(service, id) == "delivered")


def test_the_command_prints_the_new_id_or_too_late(world: World, service: httpx.Client) -> None:
    id = ask(service, asked(world, 3600))
    done = blackbox(world.environment(), "reschedule", id, "--countdown", "0")
    assert done.code == 0, done.errors
    until("it is delivered", lambda: state(service, done.out.strip()) == "delivered")
    late = blackbox(world.environment(), "reschedule", done.out.strip(), "--countdown", "0")
    assert (late.code, late.out.startswith("too late: ")) == (1, True)


@pytest.mark.proof
def test_a_rebuilt_index_keeps_replacements_and_dead_letters(
    fragile_world: World, own_redis: EmbeddedRedis
) -> None:
    world = fragile_world
    service = world.start_service().wait_ready()
    with Client(world.kafka.bootstrap_servers, request_topic=world.requests) as client:
        gone = client.send_later(None, "gone", world.targets[0], timedelta(0))
        until("it is delivered", lambda: delivered(world) == [b"gone"])
        kept = client.send_later(None, "kept", world.targets[0], timedelta(hours=1), id="kept")
        moved = client.reschedule(kept, timedelta(seconds=6))
        world.send_raw(
            json.dumps(asked(world, 0, message="twice")),
            [("blackbox-replaces", gone.encode())],
            partition=partition_of(gone),
        )
        world.flush()
        until("it is a dead letter", lambda: reasons(world) == {"too-late": 1})
        until("one is pending", lambda: service.metric("blackbox_pending") == 1)
        with redis.Redis.from_url(own_redis.url) as admin:
            admin.flushall()
        until("it is delivered", lambda: client.get(moved).state == "delivered")
    assert sorted(map(str, delivered(world))) == ["b'gone'", "b'kept'"]
    assert reasons(world) == {"too-late": 1}
