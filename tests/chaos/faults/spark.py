"""Faults with the Spark engine: of its driver, its Python workers, its JVM, and its index in Redis."""

from __future__ import annotations

from tests.chaos.faults.fault import Fault
from tests.chaos.faults.low_water import ours
from tests.chaos.faults.redis import COPY, PUT_BACK, client
from tests.chaos.scene import Scene
from tests.support.world import until


def driver_killed(scene: Scene) -> None:
    service = scene.start()
    scene.wait_ready(service)
    scene.ask(within_s=3)
    scene.within(0, 3)
    scene.kill(service)
    scene.start()


def worker_killed(scene: Scene) -> None:
    service = scene.start()
    scene.wait_ready(service)
    scene.ask(within_s=3)
    for _ in range(3):
        scene.last(0, 1)
        scene.dice.choice(until("Python workers are there", service.python_workers)).kill()


def jvm_killed(scene: Scene) -> None:
    service = scene.start()
    scene.wait_ready(service)
    scene.ask(within_s=3)
    scene.within(0, 3)
    until("a JVM is there", service.jvm).kill()
    until("the service has ended", lambda: service.process.poll() is not None)
    scene.kill(service)
    scene.start()


def index_lost(scene: Scene) -> None:
    """Redis loses all data, or all data since a copy, after journals were trimmed."""
    service = scene.start()
    scene.wait_ready(service)
    scene.ask(within_s=5)
    with client(scene) as asked:
        scene.within(0.5, 3)
        before = scene.trims()
        copy = asked.eval(COPY, 0, ours(scene)) if scene.dice.random() < 0.5 else []
        scene.wait_trimmed(before)
        asked.eval(PUT_BACK, 0, ours(scene), *copy)
        scene.last(0, 3)
        if scene.dice.random() < 0.3:
            scene.kill(service)
            scene.start()


FAULTS = [
    Fault("Spark driver killed", driver_killed, 4, "spark", may_revive=True),
    Fault("Spark's Python workers killed", worker_killed, 4, "spark", may_revive=True),
    Fault("Spark's JVM killed", jvm_killed, 2, "spark", may_revive=True),
    Fault("Spark's index lost after a trim", index_lost, 4, "spark", may_revive=True),
]
