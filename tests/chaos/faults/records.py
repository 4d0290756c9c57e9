"""Records of callers that the Kafka client cannot read."""

from __future__ import annotations

from tests.chaos.faults.fault import Fault
from tests.chaos.scene import Scene
from tests.unreadable_batch import write_unreadable_batch


def unreadable_batches(scene: Scene) -> None:
    """Batches that no client can decompress, between requests; owners are killed beside them."""
    scene.start()
    scene.ask(within_s=3)
    world = scene.world
    for _ in range(scene.dice.randint(1, 4)):
        scene.last(0, 0.5)
        count, partition = scene.dice.randint(1, 9), scene.dice.randrange(world.partitions)
        servers = world.kafka.bootstrap_servers
        offsets = write_unreadable_batch(servers, world.requests, count, partition)
        scene.unreadable += [(partition, offset) for offset in offsets]
        if scene.dice.random() < 0.5:
            scene.last(0, 0.5)
            scene.kill(scene.dice.choice(scene.running()))
            scene.start()


FAULTS = [Fault("batches that cannot be read, owners killed", unreadable_batches, 20)]
