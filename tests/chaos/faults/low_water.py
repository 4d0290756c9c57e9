"""Redis loses its data after the journals were trimmed, and again during the rebuild. A process is killed while it
writes a mark, trims or promotes.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from tests.chaos.crash_points import MARKING, PROMOTING, REBUILDING, Crash
from tests.chaos.faults.fault import Fault, Servers
from tests.chaos.faults.redis import COPY, PUT_BACK, client
from tests.chaos.scene import Scene

LONG_S = 5.0
"""Long enough for requests to be renewed and for journals to be trimmed."""

REBUILD_SEEN_S = 3.0


def trimmed(scene: Scene) -> None:
    """Start a service, and wait until a journal is trimmed."""
    scene.start()
    scene.ask(LONG_S)
    scene.wait_trimmed()
    scene.last(0, 1)


def emptied_after(scene: Scene) -> None:
    trimmed(scene)
    with client(scene) as asked:
        for _ in range(scene.dice.randint(1, 3)):
            asked.flushall()
            scene.last(0, 1.5)


def put_back_to_before(scene: Scene) -> None:
    """Restore the state of Redis from before the trim, under open connections or for the next service."""
    service = scene.start()
    scene.ask(LONG_S)
    scene.within(0.2, 2)
    with client(scene) as asked:
        before = scene.trims()
        copy = asked.eval(COPY, 0, ours(scene))
        scene.wait_trimmed(before + scene.dice.randint(0, 6))
        if is_killed := scene.dice.random() < 0.4:
            scene.kill(service)
        asked.eval(PUT_BACK, 0, ours(scene), *copy)
        if is_killed:
            scene.start()


def put_back_half_rebuilt(scene: Scene) -> None:
    """Restore the state of Redis from the middle of a rebuild. The journals were trimmed later."""
    trimmed(scene)
    with client(scene) as asked:
        asked.flushall()
        is_rebuilt(scene, asked)
        before = scene.trims()
        copy = asked.eval(COPY, 0, ours(scene))
        scene.ask(LONG_S)
        scene.wait_trimmed(before)
        asked.eval(PUT_BACK, 0, ours(scene), *copy)


def due_deleted(scene: Scene) -> None:
    """Redis loses only the due times of one shard."""
    scene.start()
    scene.ask(LONG_S)
    scene.within(0.2, 3)
    with client(scene) as asked:
        for _ in range(scene.dice.randint(1, 2)):
            asked.delete(key(scene, scene.dice.randrange(scene.world.partitions), "due"))
            scene.last(0, 1.5)


def emptied_while_rebuilt(scene: Scene) -> None:
    trimmed(scene)
    with client(scene) as asked:
        asked.flushall()
        for _ in range(scene.dice.randint(1, 2)):
            is_rebuilt(scene, asked)
            asked.flushall()


def killed_while_rebuilt(scene: Scene) -> None:
    """A signal kills the service at a random time. The next service may find an empty Redis again."""
    trimmed(scene)
    with client(scene) as asked:
        asked.flushall()
        is_rebuilt(scene, asked)
        for service in scene.running():
            scene.kill(service)
        if scene.dice.random() < 0.3:
            asked.flushall()
        scene.start()


def crashed_while_rebuilt(step: str, scene: Scene) -> None:
    """The service ends right after a step of the rebuild, once or twice."""
    trimmed(scene)
    for service in scene.running():
        scene.kill(service)
    scene.ask(LONG_S)  # some are cancelled and replaced while no service runs
    with client(scene) as asked:
        for time_of_it in range(scene.dice.randint(1, 2)):
            if time_of_it == 0 or "batch" not in step or scene.dice.random() < 0.5:
                asked.flushall()  # otherwise the next service continues the same rebuild
            crashed(scene, Crash(step, 1))
    scene.start()


def crashed_after(step: str, scene: Scene) -> None:
    if step in PROMOTING:
        scene.settings |= {"hot_horizon_s": 1, "renew_after_s": 1}
    crashed(scene, Crash(step, scene.dice.randint(1, 3)))
    if scene.dice.random() < 0.5:
        with client(scene) as asked:
            asked.flushall()
    scene.start()


def crashed(scene: Scene, after: Crash) -> None:
    scene.ask_until_crashed(scene.start(crash=after), LONG_S)


def is_rebuilt(scene: Scene, asked: Any) -> None:
    """Wait until a rebuild runs, or until it must have ended."""
    shards = [key(scene, number, "state") for number in range(scene.world.partitions)]
    deadline = time.monotonic() + REBUILD_SEEN_S
    while time.monotonic() < deadline:
        if any(asked.hexists(state, "rebuild") for state in shards):
            return


def key(scene: Scene, shard: int, name: str) -> str:
    return f"blackbox:{{{scene.world.requests}-{shard}}}:{name}"


def ours(scene: Scene) -> str:
    return f"blackbox:{{{scene.world.requests}-*"


OWN: Servers = "own redis"

FAULTS = [
    Fault("Redis emptied after a trim", emptied_after, 30, OWN),
    Fault("Redis put back to before a trim", put_back_to_before, 30, OWN),
    Fault("Redis put back to the middle of a rebuild", put_back_half_rebuilt, 12, OWN),
    Fault("due times deleted alone", due_deleted, 20, OWN),
    Fault("Redis emptied while it is rebuilt", emptied_while_rebuilt, 20, OWN),
    Fault("service killed while it rebuilds", killed_while_rebuilt, 20, OWN),
    *(
        Fault(f"crash in a rebuild after {step}", partial(crashed_while_rebuilt, step), 8, OWN)
        for step in REBUILDING
    ),
    *(
        Fault(f"crash after {step}", partial(crashed_after, step), 8, OWN)
        for step in (*MARKING, *PROMOTING)
    ),
]
