"""Redis fails over, or loses a node, or moves a slot: nothing is lost, duplicated or early."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import redis

from blackbox.config.check import finding
from blackbox.embedded import EmbeddedRedis
from blackbox.embedded.tcp_ports import free_port
from tests.servers.redis_cluster import ClusterServers
from tests.servers.sentinel import SentinelServers
from tests.service.test_cli import blackbox
from tests.support.world import PARTITIONS, ServiceProcess, World, both_engines_at_length, until

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


@pytest.mark.proof
@both_engines_at_length
def test_a_killed_primary_under_load_loses_and_duplicates_nothing(
    world: World, sentinels: SentinelServers
) -> None:
    service = world.start_service(redis_url=sentinels.url).wait_ready()
    for _ in range(FAILOVERS):
        under_load(world, service)
        dead = sentinels.kill_primary()
        wait_all_open(service)
        dead.start()
        sentinels.wait_replicated()
    verdict = world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict


@pytest.mark.proof
def test_a_killed_primary_with_unreplicated_data_loses_and_duplicates_nothing(
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


@pytest.mark.proof
def test_a_manual_failover_under_load_loses_and_duplicates_nothing(
    world: World, sentinels: SentinelServers
) -> None:
    service = world.start_service(redis_url=sentinels.url).wait_ready()
    for _ in range(FAILOVERS):
        under_load(world, service)
        sentinels.fail_over()
        wait_all_open(service)
        sentinels.wait_replicated()
    verdict = world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict


@pytest.mark.proof
def test_moved_slots_under_load_lose_and_duplicate_nothing(
    world: World, cluster: ClusterServers
) -> None:
    keys = shard_keys(world)
    cluster.spread(keys)
    service = world.start_service(redis_url=cluster.url).wait_ready()
    for turn in range(1, FAILOVERS + 1):
        under_load(world, service)
        cluster.spread([*keys[turn:], *keys[:turn]])
        wait_all_open(service)
    verdict = world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict


@pytest.mark.proof
def test_a_killed_and_restarted_node_loses_and_duplicates_nothing(
    world: World, cluster: ClusterServers
) -> None:
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


def delivered(world: World) -> int:
    return sum(message.topic() in world.targets for message in world.received())


@pytest.mark.proof
@both_engines_at_length
def test_shards_of_other_nodes_deliver_while_a_node_is_down(world: World, tmp_path: Path) -> None:
    with ClusterServers(tmp_path / "cluster", needs_all=False) as servers:
        servers.spread(shard_keys(world))
        service = world.start_service(redis_url=servers.url).wait_ready()
        dead = servers.nodes[2]
        dead.kill()
        until("it noticed", lambda: service.get("/readyz")[0] == 503)
        for shard in (2, 0, 1, 3):
            world.ask(200, within_s=1, partition=shard)
        until("the others are delivered", lambda: delivered(world) == 600)
        dead.start()
        wait_all_open(service)
        verdict = world.wait_delivered()
        assert verdict.is_exact, verdict


def pending_in(environment: Mapping[str, str]) -> object:
    totals = blackbox(environment, "status", "--json").json["totals"]
    assert isinstance(totals, dict)
    return totals["pending"]


def refused_in(environment: Mapping[str, str], server: EmbeddedRedis) -> list[str]:
    """The refusals of `check` once this server evicts keys."""
    assert blackbox(environment, "check").code == 0
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    checked = blackbox(environment, "check", "--json")
    assert checked.code == 1
    return [found["text"] for found in json.loads(checked.out) if found["severity"] == "refuse"]


EVICTION = finding("eviction", policy="allkeys-lru").text


@pytest.mark.proof
def test_operator_commands_work_behind_sentinels(world: World, sentinels: SentinelServers) -> None:
    environment = run_operator_commands(world, sentinels.url)
    assert refused_in(environment, sentinels.primary) == [EVICTION]


def test_operator_commands_work_on_every_node_of_a_cluster(
    world: World, cluster: ClusterServers
) -> None:
    cluster.spread(shard_keys(world))
    environment = run_operator_commands(world, cluster.url)
    evicting = cluster.nodes[1]
    assert refused_in(environment, evicting) == [f"127.0.0.1:{evicting.port}: {EVICTION}"]


def run_operator_commands(world: World, url: str) -> Mapping[str, str]:
    """Store eight requests with a service, and run commands for one of them."""
    environment = world.environment(redis_url=url)
    world.start_service(redis_url=url).wait_ready()
    world.ask(8, within_s=600, from_s=300)
    until("all are pending", lambda: pending_in(environment) == 8)
    partition, offset = next(iter(world.asked.values())).place
    name = f"{world.requests}/{partition}@{offset}"
    assert blackbox(environment, "show", name, "--json").json["state"] == "pending"
    return environment


def test_check_warns_of_the_address_of_a_single_cluster_node(
    world: World, cluster: ClusterServers
) -> None:
    environment = world.environment(redis_url=cluster.nodes[0].url)
    found = json.loads(blackbox(environment, "check", "--json").out)
    assert finding("one_node").text in [finding["text"] for finding in found]


def test_check_warns_of_a_node_that_does_not_answer(world: World, cluster: ClusterServers) -> None:
    dead = cluster.nodes[2]
    dead.kill()
    environment = world.environment(redis_url=cluster.url)
    found = json.loads(blackbox(environment, "check", "--json").out)
    said = [finding["text"] for finding in found if "their shards stay closed" in finding["text"]]
    assert len(said) == 1
    assert said[0].startswith(f"127.0.0.1:{dead.port}: not checked: Redis does not answer TIME")


def test_sentinels_that_do_not_answer_are_named_without_a_password(world: World) -> None:
    url = f"redis+sentinel://:hunter2@127.0.0.1:{free_port()}/shop?sentinel_password=hunter3"
    answer = blackbox(world.environment(redis_url=url), "status")
    assert answer.code == 1
    assert "check that Redis runs at shop (sentinels 127.0.0.1:" in answer.errors[0]
    assert "hunter" not in "".join(answer.errors)
