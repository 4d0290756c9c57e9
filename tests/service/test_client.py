"""Lookups of the Python client, from a real Kafka and nothing else."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from blackbox import AsyncClient, Client, State
from blackbox.client import LookupFailed
from blackbox.core.request_status import Place
from blackbox.embedded import EmbeddedStack
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.partition_reader import PartitionReader
from blackbox.records.errors import JournalLost
from blackbox.records.request import Shard, locate, request_id
from tests.support.world import World, read_all, until
from tests.support.year import HOUR_MS, Year

pytestmark = pytest.mark.service

FAR = timedelta(hours=1)
SOON = timedelta(milliseconds=1)

RULES = """
[callers.suspended]
admitted = false
"""


@pytest.fixture(scope="module")
def shop(stack: EmbeddedStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A world whose service all tests of this file share, except those that stop one."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "callers.toml").write_text(RULES)
    with World(stack.kafka, stack.redis, folder) as world:
        world.start_service(
            callers_file=folder / "callers.toml", max_countdown_s=7200, retries=0
        ).wait_ready()
        yield world


@pytest.fixture
def client(shop: World) -> Iterator[Client]:
    with client_of(shop) as client:
        yield client


def client_of(world: World, caller: str = "billing") -> Client:
    return Client(world.kafka.bootstrap_servers, caller=caller, request_topic=world.requests)


def until_it_is(client: Client, id: str, state: str) -> State:
    def found() -> State | None:
        now = client.get(id)
        return now if now.state == state else None

    return until(f"it is {state}", found, every_s=0.1)


def test_a_request_is_pending_before_its_due_time(shop: World, client: Client) -> None:
    due = datetime.now(UTC).replace(microsecond=0) + FAR
    id = client.send_later("k", "hi", shop.targets[0], due)
    assert client.get(id) == State(id, "pending", due)


def test_a_delivered_request_is_reported_with_the_place_of_its_message(
    shop: World, client: Client
) -> None:
    ids = client.send_many([(None, f"m{n}", shop.targets[0], SOON) for n in range(5)])
    told = [until_it_is(client, id, "delivered") for id in ids]
    there = {
        (message.topic(), message.partition(), message.offset()): message.value()
        for message in read_all(shop.kafka.bootstrap_servers, shop.targets[0])
    }
    for number, state in enumerate(told):
        at = state.delivered_to
        assert at is not None
        assert there[at.topic, at.partition, at.offset] == f"m{number}".encode()


def test_a_dead_request_is_reported_with_its_dead_letter_and_reason(
    shop: World, client: Client
) -> None:
    id = client.send_later(None, "hi", "no.such.topic", SOON)
    dead = until_it_is(client, id, "dead")
    assert (dead.reason, dead.delivered_to) == ("unknown-topic", None)
    assert dead.detail is not None
    [letter] = [
        message
        for message in read_all(shop.kafka.bootstrap_servers, shop.dead_letters)
        if dead.dead_letter == Place(shop.dead_letters, 0, message.offset() or 0)
    ]
    shard, offset = locate(id, [shop.requests])
    assert dict(letter.headers() or [])["blackbox-source"] == shard.source(offset).encode()


def test_a_request_dead_lettered_long_before_its_due_time_is_dead(shop: World) -> None:
    with client_of(shop, "suspended") as client:
        id = client.send_later(None, "hi", shop.targets[0], FAR)
        assert until_it_is(client, id, "dead").reason == "forbidden"
    fate = shop.services[0].get(f"/requests/{id}")[1]
    assert (json.loads(fate)["state"], json.loads(fate)["reason"]) == ("dead", "forbidden")


def test_an_expired_request_is_dead_with_the_reason_expired(shop: World, client: Client) -> None:
    past = datetime.now(UTC) - FAR
    id = client.send_later(None, "hi", shop.targets[0], past, expires_after=SOON)
    assert until_it_is(client, id, "dead").reason == "expired"


def test_cancelled_and_replaced_requests_have_ended(shop: World, client: Client) -> None:
    named = client.send_later(None, "hi", shop.targets[0], FAR, id="named")
    replaced = client.send_later(None, "hi", shop.targets[0], FAR, id="replaced")
    unnamed, kept = (client.send_later(None, n, shop.targets[0], FAR) for n in range(2))
    client.cancel("named")
    client.cancel(unnamed)
    newer = client.send_later(None, "hi", shop.targets[0], FAR, id="replaced")
    assert [client.get(id).state for id in (named, unnamed, replaced)] == ["ended"] * 3
    assert [client.get(id).state for id in (kept, newer)] == ["pending"] * 2


def test_a_replacement_that_the_service_refuses_replaces_nothing(
    shop: World, client: Client
) -> None:
    kept = client.send_later(None, "hi", shop.targets[0], FAR, id="kept")
    too_far = client.send_later(None, "hi", shop.targets[0], 3 * FAR, id="kept")
    assert until_it_is(client, too_far, "dead").reason == "too-far"
    assert client.get(kept).state == "pending"


def test_each_time_of_a_recurring_request_has_its_own_state(shop: World, client: Client) -> None:
    id = client.send_later(None, "hi", shop.targets[0], SOON, id="daily", every=FAR)
    until_it_is(client, id, "delivered")
    shard, offset = locate(id, [shop.requests])

    def next_time() -> State | None:
        later = (client.get(request_id(shard, offset + n)) for n in range(1, 20))
        return next((state for state in later if state.state == "pending"), None)

    pending = until("it recurs", next_time)
    client.cancel("daily")
    assert client.get(pending.id).state == "ended"
    assert client.get(id).state == "delivered"


def test_a_request_that_does_not_exist_is_unknown(shop: World, client: Client) -> None:
    for place in (Shard(shop.requests, 0), 10**9), (Shard(shop.requests, 99), 0):
        id = request_id(*place)
        assert client.get(id) == State(id, "unknown")


def test_a_lookup_times_out_and_names_the_remedy(shop: World, client: Client) -> None:
    id = client.send_later(None, "hi", shop.targets[0], FAR)
    with pytest.raises(LookupFailed, match="give a longer timeout_s, or ask a service"):
        client.get(id, timeout_s=0)
    with pytest.raises(LookupFailed, match="was not found"):
        client.reschedule(id, SOON, timeout_s=0)
    assert client.get(id).state == "pending"


def test_a_lookup_of_a_request_behind_an_open_transaction_keeps_to_its_limit(
    shop: World, client: Client
) -> None:
    before = client.send_later(None, "hi", shop.targets[0], FAR)
    shard, offset = locate(before, [shop.requests])
    assert client.get(before).state == "pending"
    access = KafkaAccess(shop.kafka.bootstrap_servers, "another")
    other = access.producer(f"{shop.name}-another")
    other.init_transactions(10)
    other.begin_transaction()
    other.produce(shop.requests, b"{}", partition=shard.partition)
    other.flush()
    began_s = time.monotonic()
    try:
        with pytest.raises(LookupFailed, match="an open transaction of another producer hides"):
            client.get(request_id(shard, offset + 1), timeout_s=1)
        took_s = time.monotonic() - began_s
        assert client.get(before).state == "pending"
    finally:
        other.abort_transaction(10)
    assert took_s < 4


def test_the_id_of_a_cancel_is_refused_by_a_lookup(client: Client) -> None:
    cancel = client.cancel("nobody")
    with pytest.raises(ValueError, match="is the id of a cancel, not of a request; give the id"):
        client.get(cancel)


def test_concurrent_coroutines_get_their_own_answers(shop: World) -> None:
    async def talk() -> list[str]:
        servers = shop.kafka.bootstrap_servers
        async with AsyncClient(servers, request_topic=shop.requests) as client:
            ids = await client.send_many([(None, n, shop.targets[0], FAR) for n in range(8)])
            for id in ids[::2]:
                await client.cancel(id)
            given_up = asyncio.create_task(client.get(ids[0]))
            await asyncio.sleep(0)
            given_up.cancel()
            return [state.state for state in await asyncio.gather(*map(client.get, ids))]

    assert asyncio.run(talk()) == ["ended", "pending"] * 4


def test_a_client_retries_a_lookup_with_a_new_consumer(
    shop: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = client.send_later(None, "hi", shop.targets[0], FAR)
    assert client.get(id).state == "pending"
    reader, first_since = client._reader._reader, PartitionReader.first_since
    slept = reader._consumer

    def of_an_earlier_leader(reader: PartitionReader, *at: Any) -> int | None:
        if reader._consumer is slept:
            raise JournalLost("Leader epoch is older than broker epoch")
        return first_since(reader, *at)

    monkeypatch.setattr(PartitionReader, "first_since", of_an_earlier_leader)
    assert client.get(id).state == "pending"
    assert reader._consumer is not slept


def test_lookups_need_kafka_but_no_service(world: World) -> None:
    with client_of(world) as client:
        before = client.send_later(None, "hi", world.targets[0], SOON, id="before")
        assert client.get(before).state == "pending", "no service has ever run or created receipts"
        service = world.start_service().wait_ready()
        until_it_is(client, before, "delivered")
        assert service.stop() == 0
        overdue = client.send_later(None, "hi", world.targets[0], SOON)
        cancelled = client.send_later(None, "hi", world.targets[0], FAR, id="cancelled")
        client.cancel("cancelled")
        states = [client.get(id).state for id in (before, overdue, cancelled)]
        assert states == ["delivered", "pending", "ended"]


@pytest.fixture
def year(stack: EmbeddedStack, tmp_path: Path) -> Iterator[Year]:
    with World(stack.kafka, stack.redis, tmp_path, partitions=1) as world:
        year = Year(world)
        yield year
        year.forget()
        year.client.close()


def test_a_cold_request_is_pending_and_then_delivered_under_its_own_id(year: Year) -> None:
    world, now_ms = year.world, year.began_ms
    with client_of(world) as client:
        far = timedelta(hours=9)
        kept, ended, late = (
            client.send_later(None, n, world.targets[0], far, id=n) for n in ("kept", "ended", "late")
        )  # fmt: skip
        year.pass_to(now_ms)
        assert client.get(kept).state == "pending"
        client.cancel(ended)
        year.pass_to(now_ms)
        assert year.promote(now_ms + 8 * HOUR_MS + HOUR_MS // 2) == 2
        assert [client.get(id).state for id in (kept, ended, late)] == ["pending", "ended", "pending"]  # fmt: skip
        client.cancel("late")
        year.pass_to(now_ms + 10 * HOUR_MS)
        assert [client.get(id).state for id in (ended, late)] == ["ended", "ended"]
        told = client.get(kept)

    [message] = year.messages()
    assert (told.id, told.state) == (kept, "delivered")
    assert told.delivered_to == Place(world.targets[0], message.partition() or 0, message.offset() or 0)  # fmt: skip
