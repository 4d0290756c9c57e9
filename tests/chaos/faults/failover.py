"""A Redis of several servers. The primary fails over, with or without the last writes. Slots move, and nodes of a
cluster fail.
"""

from __future__ import annotations

from tests.chaos.faults.fault import Fault
from tests.chaos.faults.redis import begun, both
from tests.chaos.scene import Scene
from tests.chaos.servers import frozen
from tests.servers.redis_cluster import ClusterServers
from tests.servers.sentinel import SentinelServers
from tests.support.world import until


def primary_killed(scene: Scene) -> None:
    servers = with_sentinels(scene)
    servers.kill_primary().start()


def primary_killed_unreplicated(scene: Scene) -> None:
    """The replica does not get the last writes."""
    scene.start()
    servers = sentinels(scene)
    servers.stop_replicating()
    scene.ask()
    scene.within(0.2, 2)
    servers.kill_primary().start()


def failed_over(scene: Scene) -> None:
    """A failover that an operator starts."""
    with_sentinels(scene).fail_over()


def primary_frozen(scene: Scene) -> None:
    """The earlier primary returns. For a short time, two servers act as the primary."""
    servers = with_sentinels(scene)
    before = servers.primary
    with frozen(before):
        until("the replica is promoted", lambda: servers.primary is not before)
        scene.last(0, 2)


def slots_moved(scene: Scene) -> None:
    servers = with_cluster(scene)
    for _ in range(scene.dice.randint(1, 3)):
        servers.move(some_key(scene), scene.dice.choice(servers.nodes))
        scene.last(0, 1)


def node_killed(scene: Scene) -> None:
    servers = with_cluster(scene)
    node = servers.node_of(some_key(scene))
    node.kill()
    scene.last(0, 3)
    node.start()
    servers.wait_well()


def node_frozen(scene: Scene) -> None:
    servers = with_cluster(scene)
    with frozen(servers.node_of(some_key(scene))):
        scene.last(0.2, 4)


def with_sentinels(scene: Scene) -> SentinelServers:
    begun(scene)
    return sentinels(scene)


def sentinels(scene: Scene) -> SentinelServers:
    assert isinstance(scene.redis_servers, SentinelServers)
    return scene.redis_servers


def with_cluster(scene: Scene) -> ClusterServers:
    begun(scene)
    assert isinstance(scene.redis_servers, ClusterServers)
    return scene.redis_servers


def some_key(scene: Scene) -> str:
    """A key of one of the shards."""
    shard = scene.dice.randrange(scene.world.partitions)
    return f"blackbox:{{{scene.world.requests}-{shard}}}:due"


FAULTS = [
    Fault("primary of Redis killed", primary_killed, 12, "sentinels"),
    Fault(
        "primary of Redis killed, with what its replica never got",
        primary_killed_unreplicated,
        12,
        "sentinels",
    ),
    Fault(
        "primary of Redis killed, then the service",
        both(primary_killed),
        8,
        "sentinels",
    ),
    Fault("Redis failed over by order", failed_over, 8, "sentinels"),
    Fault(
        "primary of Redis frozen until replaced", primary_frozen, 12, "sentinels", may_revive=True
    ),
    Fault("slots of a Redis Cluster moved", slots_moved, 12, "redis cluster"),
    Fault("node of a Redis Cluster killed", node_killed, 12, "redis cluster"),
    Fault("node of a Redis Cluster frozen", node_frozen, 8, "redis cluster"),
]
