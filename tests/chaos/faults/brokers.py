"""Three brokers with replicas on each; two replicas must be in sync. One or all brokers die, or a coordinator fails
during a commit.
"""

from __future__ import annotations

from tests.chaos.brokers import Broker, Cluster
from tests.chaos.faults.fault import Fault
from tests.chaos.scene import Scene
from tests.support.world import until


def one_killed(scene: Scene) -> None:
    cluster = begun(scene)
    scene.together(scene.dice.choice(cluster.brokers).kill)
    scene.last(0, 4)
    scene.together(cluster.start)


def one_frozen(scene: Scene) -> None:
    cluster = begun(scene)
    scene.together(scene.dice.choice(cluster.brokers).freeze)
    scene.last(1, 6)
    scene.together(cluster.thaw)


def all_killed(scene: Scene) -> None:
    cluster = begun(scene)
    with scene.without_kafka():
        scene.together(cluster.kill)
        scene.last(0, 2)
        scene.together(cluster.start)


def coordinator_torn(scene: Scene) -> None:
    """The coordinator dies, its successor freezes after its election, and the third broker lags."""
    cluster = begun(scene)
    scene.together(lambda: tear(cluster, transactional_id(scene), scene))


def tear(cluster: Cluster, transactional_id: str, scene: Scene) -> None:
    coordinator = cluster.coordinator_of(transactional_id)
    third = next(b for b in cluster.brokers if b is not coordinator)
    third.freeze()
    until(
        "a replica is out of sync",
        lambda: third.number not in cluster.transaction_log(transactional_id).isrs,
    )
    coordinator.kill()
    third.thaw()
    successor = cluster.next_coordinator(transactional_id, coordinator)
    scene.last(0, 1)
    successor.freeze()
    scene.last(2, 6)
    coordinator.start()
    successor.thaw()


def transactional_id(scene: Scene) -> str:
    return f"{scene.world.name}/{scene.world.requests}-0"


def begun(scene: Scene) -> Cluster:
    """Start a service, and wait for a random time of the schedule."""
    assert isinstance(scene.kafka, Broker)
    scene.wait_ready(scene.start())
    scene.ask(within_s=6)
    scene.within(0.5, 3)
    return scene.kafka.cluster


FAULTS = [
    Fault("one of three brokers killed", one_killed, 16, "three brokers"),
    Fault("one of three brokers frozen", one_frozen, 16, "three brokers"),
    Fault("all three brokers killed", all_killed, 8, "three brokers"),
    Fault(
        "a transaction's coordinator torn out",
        coordinator_torn,
        16,
        "three brokers",
        exactly_once=True,
    ),
]
