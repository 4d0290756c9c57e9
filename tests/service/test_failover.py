"""Redis fails over, or loses a node, or moves a slot: nothing is lost, doubled or early."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.cluster import ClusterServers
from tests.servers.sentinel import SentinelServers
from tests.service.test_cli import blackbox
from tests.world import PARTITIONS, ServiceProcess, World, both_engines, until

pytestmark = [pytest.mark.service, pytest.mark.fault, pytest.mark.timeout(600)]

FAILOVERS = int(os.environ.get("BLACKBOX_TEST_FAILOVERS", "2"))
ALL_OPEN_S = 120.0


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[SentinelServers]:
    with SentinelServers(tmp_path / "sentinel", sentinels=3) as servers:
        yield servers


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterServers]:
    with ClusterServers(tmp_path / "cluster") as servers:
        yield servers


def under_load(world: World, service: ServiceProcess) -> None:
    """Requests come due for some seconds, and some have been delivered."""
    before = service.metric("blackbox_delivered_total")
    world.ask(3000, within_s=6)
    until("some are delivered", lambda: service.metric("blackbox_delivered_total") > before + 300)


def wait_all_open(service: ServiceProcess) -> None:
    def all_open() -> bool:
        return service.metric("blackbox_shard_open") == PARTITIONS

    until("every shard is open again", all_open, ALL_OPEN_S)


def shard_keys(world: World) -> list[str]:
    return [f"blackbox:{{{world.requests}-{partition}}}:" for partition in range(PARTITIONS)]


@both_engines
def test_a_primary_that_dies_under_load(world: World, sentinels: SentinelServers) -> None:
    service = world.start_service(redis_url=sentinels.url).wait_ready()
    for _ in range(FAILOVERS):
        under_load(world, service)
        dead = sentinels.kill_primary()
        wait_all_open(service)
        dead.start()
        sentinels.wait_replicated()
    verdict = world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict


def test_a_primary_that_dies_with_what_its_replica_never_got(
    world: World, sentinels: SentinelServers
) -> None:
    service = world.start_service(redis_url=sentinels.url).wait_ready()
    world.ask(1000, within_s=20)
    sentinels.stop_replicating()
    under_load(world, service)
    sentinels.kill_primary()
    wait_all_open(service)
    verdict = world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict


def test_a_failover_that_an_operator_orders(world: World, sentinels: SentinelServers) -> None:
    service = world.start_service(redis_url=sentinels.url).wait_ready()
    for _ in range(FAILOVERS):
        under_load(world, service)
        sentinels.fail_over()
        wait_all_open(service)
        sentinels.wait_replicated()
    verdict = world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict


@both_engines
def test_slots_that_move_to_other_nodes_under_load(world: World, cluster: ClusterServers) -> None:
    keys = shard_keys(world)
    cluster.spread(keys)
    service = world.start_service(redis_url=cluster.url).wait_ready()
    for turn in range(1, FAILOVERS + 1):
        under_load(world, service)
        cluster.spread([*keys[turn:], *keys[:turn]])
        wait_all_open(service)
    verdict = world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict


def test_a_node_that_dies_under_load_and_comes_back(world: World, cluster: ClusterServers) -> None:
    cluster.spread(shard_keys(world))
    service = world.start_service(redis_url=cluster.url).wait_ready()
    for node in cluster.nodes:
        under_load(world, service)
        node.kill()
        until("it noticed", lambda: service.get("/readyz")[0] == 503)
        node.start()
        cluster.wait_well()
        wait_all_open(service)
    verdict = world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict


@pytest.mark.parametrize("servers", ["sentinels", "cluster"])
def test_operators_see_and_check_what_is_there(
    world: World, servers: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(servers).url
    world.start_service(redis_url=url).wait_ready()
    world.ask(8, within_s=600, from_s=300)
    environment = world.environment(redis_url=url)

    def pending() -> bool:
        totals = json.loads(blackbox(environment, "status", "--json").out)["totals"]
        return bool(totals["pending"] == 8)

    until("all are pending", pending)
    partition, offset = next(iter(world.asked.values())).place
    shown = blackbox(environment, "show", f"{world.requests}/{partition}@{offset}", "--json")
    assert json.loads(shown.out)["state"] == "pending"
    checked = blackbox(environment, "check", "--json")
    assert checked.code == 0, checked.errors
    nodes = 3 if servers == "cluster" else 1
    texts = [finding["text"] for finding in json.loads(checked.out)]
    assert texts == []
    assert nodes
