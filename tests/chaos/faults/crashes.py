"""A service ends right after a step of a verb; often the next one does, too."""

from __future__ import annotations

from functools import partial

from tests.chaos.crash_points import STEPS, Crash
from tests.chaos.faults.fault import Fault
from tests.chaos.scene import Scene


def crashed_after(step: str, scene: Scene) -> None:
    latest = scene.setup.partitions if step.startswith("R") else 3
    service = scene.start(crash=Crash(step, scene.dice.randint(1, latest)))
    scene.ask()
    scene.wait_crashed(service)
    scene.start()


def crashed_twice_after(step: str, scene: Scene) -> None:
    """The second time after the same step, or in the recovery from the first."""
    service = scene.start(crash=Crash(step, 1))
    scene.ask()
    scene.wait_crashed(service)
    again = scene.dice.choice([step, *(step for step in STEPS if step.startswith("R"))])
    service = scene.start(crash=Crash(again, 1))
    scene.ask(wave=1)
    scene.wait_crashed(service)
    scene.start()


FAULTS = [
    fault
    for step in STEPS
    for fault in (
        Fault(f"crash after {step}", partial(crashed_after, step), 12),
        Fault(f"crash after {step}, and once more", partial(crashed_twice_after, step), 6),
    )
]
