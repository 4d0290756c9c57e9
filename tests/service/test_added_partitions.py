"""The request topic gets more partitions: an id may then be pending in two of them."""

from __future__ import annotations

import json
from functools import partial
from typing import NamedTuple

import httpx
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from blackbox import Client
from blackbox.records.request import locate
from tests.service.conftest import Serve
from tests.service.test_api import ask, asked, state
from tests.service.test_cli import blackbox
from tests.support.world import World, until

pytestmark = pytest.mark.service

AFTERWARDS = 7
IDS = [f"order-{number}" for number in range(16)]


class Grown(NamedTuple):
    """A service with added partitions, and ids that are pending twice: in the former and in the new partition."""

    world: World
    service: httpx.Client
    twice: dict[str, tuple[str, str]]


@pytest.fixture
def grown(world: World, serve: Serve) -> Grown:
    service = serve()
    before = {id: ask(service, asked(world, 3600, id=id, message="before")) for id in IDS}
    until("they are pending", lambda: pending(service) == len(IDS))
    admin = AdminClient({"bootstrap.servers": world.kafka.bootstrap_servers})
    for future in admin.create_partitions([NewPartitions(world.requests, AFTERWARDS)]).values():
        future.result()

    def shards() -> int:
        return len(service.get("/stats").json()["shards"])

    until("it knows the new ones", lambda: shards() == AFTERWARDS)
    until("it has opened them", lambda: world.services[0].metric("blackbox_shard_open") == 7)
    until("its producer knows them", lambda: written_to(world, service) >= 4)
    after = {id: ask(service, asked(world, 3600, id=id, message="after")) for id in IDS}
    twice = {
        id: (before[id], after[id])
        for id in IDS
        if locate(before[id], [world.requests])[0] != locate(after[id], [world.requests])[0]
    }
    assert len(twice) > 4
    for id in after.values():
        until("it is pending", partial(is_taken_in, service, id))
    return Grown(world, service, twice)


def is_taken_in(service: httpx.Client, id: str) -> bool:
    found = service.get(f"/requests/{id}")
    return found.status_code == 200 and found.json()["state"] != "unread"


def pending(service: httpx.Client) -> int:
    return int(service.get("/stats").json()["pending"])


def written_to(world: World, service: httpx.Client) -> int:
    ids = [ask(service, asked(world, 0, message="probe")) for _ in range(20)]
    return max(locate(id, [world.requests])[0].partition for id in ids)


@pytest.mark.proof
def test_an_id_pending_in_two_partitions_is_changed_in_both(
    grown: Grown,
) -> None:
    world, service, twice = grown
    [shown, cancelled, moved, by_client, by_command, *_] = twice

    def states(id: str) -> list[str]:
        return [state(service, one) for one in twice[id]]

    assert states(shown) == ["pending"] * 2, "requests in another partition are not replaced"
    assert service.get(f"/requests/{shown}").json()["id"] == twice[shown][1]
    lines = blackbox(world.environment(), "show", "--json", shown).lines
    assert [json.loads(line)["id"] for line in lines] == list(reversed(twice[shown]))

    done = service.delete(f"/requests/{cancelled}").json()
    assert (done["outcome"], len(done["others"])) == ("cancelled", 1)
    assert states(cancelled) == ["ended"] * 2

    done = service.patch(f"/requests/{moved}", json={"countdown": 7200}).json()
    assert done["outcome"] == "rescheduled"
    assert states(moved) == ["ended"] * 2
    assert state(service, done["request"]["id"]) == "pending"
    assert service.get(f"/requests/{moved}").json()["id"] == done["request"]["id"]

    assert blackbox(world.environment(), "cancel", by_command).code == 0
    assert states(by_command) == ["ended"] * 2

    with Client(world.kafka.bootstrap_servers, request_topic=world.requests) as client:
        client.cancel(by_client)
    until("both are cancelled", lambda: states(by_client) == ["ended"] * 2)
    log = world.services[0].log.read_text()
    assert log.count("does not replace one that is pending in the former partition") == 1


@pytest.mark.proof
def test_a_cancel_also_ends_a_request_just_written_to_the_new_partition(
    grown: Grown,
) -> None:
    world, service, twice = grown
    for id in twice:
        assert service.delete(f"/requests/{id}").json()["outcome"] == "cancelled"
    before = {id: locate(first, [world.requests])[0] for id, (first, _) in twice.items()}
    for id, shard in before.items():
        request = asked(world, 3600, id=id)
        world.send_raw(json.dumps(request), partition=shard.partition)
        world.flush()
        until("it is pending", partial(is_taken_in, service, id))
        newer = ask(service, request)
        assert service.delete(f"/requests/{id}").json()["outcome"] == "cancelled"
        until("it is stored", partial(is_taken_in, service, newer))
        assert state(service, newer) == "ended"
