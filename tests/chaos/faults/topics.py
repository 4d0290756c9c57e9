"""Topics that are deleted or grow during deliveries."""

from __future__ import annotations

import json
from contextlib import closing

from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from blackbox.admin.admin import Admin
from tests.chaos.faults.fault import Fault
from tests.chaos.scene import Scene
from tests.support.world import until


def target_deleted(scene: Scene) -> None:
    """A target is deleted. Messages that are not delivered by then become dead letters."""
    scene.world.create(NewTopic(scene.doomed_topic, 2))
    scene.is_doomed_asked = True
    scene.settings["retention_s"] = 3600  # only receipts show the deliveries to this topic
    scene.start()
    scene.ask()
    scene.within(0.3, 1.8)
    asked = admin(scene)
    [deleted] = asked.delete_topics([scene.doomed_topic]).values()
    deleted.result()


def partitions_added(scene: Scene) -> None:
    """Partitions are added. Each gets requests before the service knows it."""
    scene.start()
    scene.ask(within_s=3)
    scene.within(0, 2)
    first, count = scene.world.partitions, scene.world.partitions + scene.dice.randint(1, 2)
    asked = admin(scene)
    [added] = asked.create_partitions([NewPartitions(scene.world.requests, count)]).values()
    added.result()
    until("they can be written to", lambda: scene.world.writable_partitions() == count)
    scene.world.partitions = count
    for number in range(20):
        countdown_s = scene.dice.uniform(0, 2)
        body = f"grown-{number}"
        request = {"topic": scene.world.targets[0], "message": body, "countdown": countdown_s}
        scene.ask_this(json.dumps(request), scene.dice.randrange(first, count))


def targets_paused(scene: Scene) -> None:
    """Targets are paused and resumed. Owners that are killed have parked the requests."""
    scene.start()
    scene.ask(within_s=3)
    scene.within(0.2, 1)
    with closing(Admin(scene.world.settings())) as admin:
        for _ in range(scene.dice.randint(2, 4)):
            paused = scene.dice.choice(scene.world.targets)
            admin.pause(paused)
            scene.last(0.1, 1)
            if scene.dice.random() < 0.5:
                scene.kill(scene.dice.choice(scene.running()))
                scene.start()
            admin.resume(paused)
            scene.last(0, 0.5)


def admin(scene: Scene) -> AdminClient:
    return AdminClient({"bootstrap.servers": scene.kafka.bootstrap_servers})


FAULTS = [
    Fault("target topic deleted", target_deleted, 20),
    Fault("targets paused and resumed, owners killed", targets_paused, 30),
    Fault("partitions added to the request topic", partitions_added, 12),
]
