"""Services that are killed, frozen, stopped and started."""

from __future__ import annotations

from tests.chaos.faults.fault import Fault
from tests.chaos.scene import Scene


def killed(scene: Scene) -> None:
    service = scene.start()
    scene.ask()
    scene.within(0, 2.5)
    scene.kill(service)
    scene.start()


def one_of_two_killed(scene: Scene) -> None:
    services = [scene.start(), scene.start()]
    scene.ask()
    scene.within(0.3, 2.5)
    scene.kill(scene.dice.choice(services))


def killed_again_and_again(scene: Scene) -> None:
    """The service is killed several times, mostly while it opens its shards."""
    scene.ask(within_s=4)
    for _ in range(scene.dice.randint(3, 5)):
        service = scene.start()
        scene.last(0.1, 2.5)
        scene.kill(service)
    scene.start()


def stopped(scene: Scene) -> None:
    service = scene.start()
    scene.ask()
    scene.within(0, 2)
    scene.stop(service)
    scene.start()


def replaced(scene: Scene) -> None:
    """The next service starts first, as in a rolling update."""
    service = scene.start()
    scene.ask()
    scene.within(0, 1)
    scene.start()
    scene.last(0, 1.5)
    scene.stop(service)


def frozen_past_its_session(scene: Scene) -> None:
    """A frozen service continues its work after other services own its shards."""
    services = [scene.start(), scene.start()]
    scene.ask(within_s=3)
    scene.within(0, 2)
    frozen = scene.dice.choice(services)
    frozen.freeze()
    scene.last(2.2, 4)
    frozen.thaw()


def frozen_alone_past_its_session(scene: Scene) -> None:
    service = scene.start()
    scene.ask()
    scene.within(0.2, 2)
    service.freeze()
    scene.last(2, 3)
    if scene.dice.random() < 0.7:
        scene.start()
        scene.last(0, 2)
    service.thaw()


def frozen_briefly(scene: Scene) -> None:
    service = scene.start()
    scene.ask()
    scene.within(0.2, 1.5)
    for _ in range(2):
        service.freeze()
        scene.last(0.1, 1.2)
        service.thaw()
        scene.last(0, 0.3)


def coming_and_going(scene: Scene) -> None:
    """The group rebalances every one or two seconds."""
    scene.start()
    scene.ask(within_s=5)
    for _ in range(scene.dice.randint(3, 4)):
        scene.last(0.5, 2)
        services = scene.running()
        if len(services) < 2 or (len(services) < 4 and scene.dice.random() < 0.5):
            scene.start()
        else:
            end = scene.dice.choice([scene.stop, scene.stop, scene.kill])
            end(scene.dice.choice(services))


FAULTS = [
    Fault("service killed", killed, 90),
    Fault("one of two services killed", one_of_two_killed, 50),
    Fault("service killed while it opens, again and again", killed_again_and_again, 40),
    Fault("service stopped (SIGTERM)", stopped, 40),
    Fault("service replaced by another", replaced, 30),
    Fault("service frozen past its session, beside another", frozen_past_its_session, 60),
    Fault("service frozen past its session", frozen_alone_past_its_session, 40, may_revive=True),
    Fault("service frozen briefly", frozen_briefly, 20),
    Fault("services come and go", coming_and_going, 30),
]
