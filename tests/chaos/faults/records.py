"""Batches and records of callers that the Kafka client cannot read."""

from __future__ import annotations

from tests.chaos.faults.fault import Fault
from tests.chaos.scene import Scene
from tests.support.raw_record import DISTANT, SILENT, write_raw
from tests.support.unreadable_batch import write_unreadable_batch


def unreadable_batches(scene: Scene) -> None:
    """Batches that cannot be decompressed, or that no client assembles; owners are killed beside them."""
    scene.start()
    scene.ask(within_s=3)
    world = scene.world
    for _ in range(scene.dice.randint(1, 4)):
        scene.last(0, 0.5)
        count, partition = scene.dice.randint(1, 9), scene.dice.randrange(world.partitions)
        where = world.kafka.bootstrap_servers, world.requests
        if scene.dice.random() < 0.5:
            offsets = write_unreadable_batch(*where, count, partition)
        else:
            records = scene.dice.choices([SILENT, DISTANT], k=count)
            offsets = write_raw(*where, records, partition)
        scene.unreadable += [(partition, offset) for offset in offsets]
        if scene.dice.random() < 0.5:
            scene.last(0, 0.5)
            scene.kill(scene.dice.choice(scene.running()))
            scene.start()


FAULTS = [Fault("batches and records that cannot be read, owners killed", unreadable_batches, 20)]
