"""Topics that are created again, and another consumer group. `blackbox rebind` decides. Redis may be lost afterwards."""

from __future__ import annotations

from blackbox.journal.topics import receipts_topic
from tests.chaos.faults.fault import Fault
from tests.chaos.faults.low_water import LONG_S, OWN
from tests.chaos.faults.redis import client
from tests.chaos.scene import Scene
from tests.support.world import ServiceProcess

REBIND_S = 2.5
"""The approximate duration of a rebind."""


def requests_created_again(scene: Scene) -> None:
    """The request topic is created again while callers write. Only Redis has the pending requests."""
    begun(scene)
    scene.wait_taken_in()
    ends_services(scene, 0.5)
    scene.create_requests_again()
    if scene.dice.random() < 0.7:
        scene.ask(LONG_S)
    goes_on_after_rebind(scene)


def receipts_created_again(scene: Scene) -> None:
    """The receipts topic is created again. Only Redis has the outcomes, so it must not be lost."""
    [service] = begun(scene)
    scene.wait_ready(service)  # it has created the receipts topic
    scene.within(0.5, 4)
    scene.stop(service)
    scene.delete(receipts_topic(scene.world.requests))
    scene.start()
    scene.wait_logged("blackbox rebind")
    scene.rebind()
    scene.ask()


def group_changed(scene: Scene) -> None:
    [service] = begun(scene)
    scene.wait_ready(service)  # it has created the receipts, which a rebind needs
    scene.within(0.5, 4)
    ends_services(scene, 1)
    scene.settings["group_id"] = f"{scene.world.name}.others"
    if scene.dice.random() < 0.3:
        loses_redis(scene)
    goes_on_after_rebind(scene)


def begun(scene: Scene) -> list[ServiceProcess]:
    scene.settings["hot_horizon_s"] = 0  # Redis has only a bit of a cold request
    scene.start()
    scene.ask(LONG_S)
    return scene.running()


def ends_services(scene: Scene, probability: float) -> None:
    for service in scene.running():
        if scene.dice.random() < probability:
            (scene.kill if scene.dice.random() < 0.5 else scene.stop)(service)


def goes_on_after_rebind(scene: Scene) -> None:
    if not scene.running() and scene.dice.random() < 0.5:
        scene.start()
    is_interrupted = scene.dice.random() < 0.4
    scene.rebind(killed_after_s=scene.dice.uniform(0, REBIND_S) if is_interrupted else None)
    for _ in range(scene.dice.randint(0, 2)):
        loses_redis(scene)
        scene.last(0, 1.5)
    if not scene.running():
        scene.start()
    scene.ask()


def loses_redis(scene: Scene) -> None:
    with client(scene) as asked:
        asked.flushall()


FAULTS = [
    Fault("request topic created again", requests_created_again, 30, OWN),
    Fault("receipts created again", receipts_created_again, 12, OWN),
    Fault("another group", group_changed, 12, OWN),
]
