"""A service ends right after a step of a verb. Often the next service also does."""

from __future__ import annotations

from functools import partial

from tests.chaos.crash_points import STEPS, Crash
from tests.chaos.faults.fault import Fault
from tests.chaos.scene import Scene


def crashed_after(step: str, scene: Scene) -> None:
    latest = scene.setup.partitions if step.startswith("R") else 3
    crash(scene, Crash(step, scene.dice.randint(1, latest)))
    scene.start()


def crashed_twice_after(step: str, scene: Scene) -> None:
    """The second crash is after the same step, or in the recovery from the first crash."""
    crash(scene, Crash(step, 1))
    again = scene.dice.choice([step, *(step for step in STEPS if step.startswith("R"))])
    crash(scene, Crash(again, 1))
    scene.start()


def crash(scene: Scene, after: Crash) -> None:
    service = scene.start(crash=after)
    if after.step == "I1" or (after.step[0] in "ID" and after.time > 1):
        # Requests from before the opening are stored at once, and delivered in few batches.
        scene.wait_ready(service)
    scene.ask_until_crashed(service)


FAULTS = [
    fault
    for step in STEPS
    for fault in (
        Fault(f"crash after {step}", partial(crashed_after, step), 12),
        Fault(f"crash after {step}, and once more", partial(crashed_twice_after, step), 6),
    )
]
