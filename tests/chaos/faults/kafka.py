"""A broker that freezes or dies, for a group of schedules at once."""

from __future__ import annotations

import os
import signal

from tests.chaos.faults.fault import Fault
from tests.chaos.scene import Scene


def frozen(scene: Scene) -> None:
    scene.start()
    scene.ask(within_s=3)
    scene.within(0.2, 2)
    with scene.without_kafka():
        scene.together(lambda: os.kill(scene.kafka.pid, signal.SIGSTOP))
        scene.last(1, 12)
        scene.together(lambda: os.kill(scene.kafka.pid, signal.SIGCONT))


def killed(scene: Scene) -> None:
    scene.start()
    scene.ask(within_s=3)
    scene.within(0.2, 2)
    with scene.without_kafka():
        scene.together(scene.kafka.kill)
        scene.last(0, 2)
        scene.together(scene.kafka.start)


def killed_beside_a_service(scene: Scene) -> None:
    service = scene.start()
    scene.ask(within_s=3)
    scene.within(0.2, 2)
    with scene.without_kafka():
        scene.together(scene.kafka.kill)
        scene.kill(service)
        scene.start()
        scene.together(scene.kafka.start)


FAULTS = [
    Fault("Kafka frozen", frozen, 24, "frail kafka"),
    Fault("Kafka killed and started", killed, 32, "frail kafka"),
    Fault("Kafka and the service killed", killed_beside_a_service, 16, "frail kafka"),
]
