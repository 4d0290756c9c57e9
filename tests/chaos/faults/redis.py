"""A Redis that dies, loses data, is rolled back, is full, is busy, or cannot write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import redis

from tests.chaos.faults.fault import Fault
from tests.chaos.scene import Scene
from tests.chaos.servers import FrailRedis, frozen
from tests.service.test_lost_redis import cut_aof
from tests.support.world import until

ENDLESS = "while true do end"
CANCELLED_S = 5.0
"""Long enough for a cancel to be in time."""

# ARGV: a pattern; returns every such key with its content
COPY = """
local found = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  table.insert(found, key)
  table.insert(found, redis.call('DUMP', key))
end
return found
"""

# ARGV: a pattern, then keys with their contents, which replace all such keys
PUT_BACK = """
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end
for at = 2, #ARGV, 2 do redis.call('RESTORE', ARGV[at], 0, ARGV[at + 1]) end
"""


def killed(scene: Scene) -> None:
    begun(scene)
    scene.redis.kill()
    scene.last(0, 1)
    scene.redis.start()


def stopped_for_a_while(scene: Scene) -> None:
    begun(scene)
    with frozen(scene.redis):
        scene.last(0.2, 4)


def tail_lost(scene: Scene) -> None:
    """Redis loses the last writes, from a random byte on."""
    begun(scene)
    for _ in range(scene.dice.randint(1, 2)):
        scene.redis.kill()
        cut_aof(scene.redis, scene.dice)
        scene.redis.start()
        scene.last(0.2, 1)


def emptied(scene: Scene) -> None:
    begun(scene)
    with client(scene) as asked:
        for _ in range(scene.dice.randint(1, 3)):
            asked.flushall()
            scene.last(0, 0.6)


def gone_back(scene: Scene) -> None:
    """Redis starts with an earlier copy of its files."""
    scene.start()
    scene.ask()
    scene.within(0.2, 1.5)
    copy = scene.folder / "copy"
    shutil.copytree(scene.redis.folder, copy)
    scene.last(0.2, 1)
    scene.redis.kill()
    shutil.rmtree(scene.redis.folder)
    copy.rename(scene.redis.folder)
    scene.redis.start()


def gone_back_unseen(scene: Scene) -> None:
    """Redis is rolled back without a lost connection. Only the positions show it."""
    scene.start()
    scene.ask()
    scene.within(0.2, 2)
    ours = f"blackbox:{{{scene.world.requests}-*"
    with client(scene) as asked:
        for _ in range(scene.dice.randint(1, 2)):
            copy = asked.eval(COPY, 0, ours)
            scene.last(0.1, 1)
            asked.eval(PUT_BACK, 0, ours, *copy)


def gone_back_before_cancels(scene: Scene) -> None:
    """Redis is rolled back to before a cancel. The cancelled requests are pending again when they are due."""
    scene.settings["hot_horizon_s"] = 0
    scene.start()
    count = scene.dice.randint(5, 30)
    cancels = []
    for number in range(count):
        name, partition = {"id": f"order-{number}"}, number % scene.world.partitions
        asked = {"topic": scene.world.targets[0], "message": f"m{number}", "countdown": CANCELLED_S}
        scene.ask_this(json.dumps(asked | name), partition)
        cancels.append((json.dumps(name | {"cancel": True}), partition))
    scene.world.flush()
    ours = f"blackbox:{{{scene.world.requests}-"
    with client(scene) as asked_redis:
        until("they are stored", lambda: entries(asked_redis, scene) == count)
        copy = asked_redis.eval(COPY, 0, ours + "*")
        for cancel, partition in cancels:
            scene.ask_this(cancel, partition)
        scene.ask(within_s=CANCELLED_S)
        scene.within(CANCELLED_S - 0.3, CANCELLED_S)
        asked_redis.eval(PUT_BACK, 0, ours + "*", *copy)


def entries(asked: Any, scene: Scene) -> int:
    ours = (f"blackbox:{{{scene.world.requests}-{p}}}:due" for p in range(scene.world.partitions))
    return sum(asked.zcount(due, "-inf", "(inf") for due in ours)


def full(scene: Scene) -> None:
    with client(scene) as asked:
        begun(scene, first_s=0)
        used = int(asked.info("memory")["used_memory"])
        asked.config_set("maxmemory", used - scene.dice.choice([0, 100_000]))
        scene.wait_logged("requests wait in Kafka")
        scene.last(0.2, 2)
        asked.config_set("maxmemory", 1 << 30)


def busy(scene: Scene) -> None:
    begun(scene)
    with client(scene) as asked:
        endless = Thread(target=run_endless, args=(scene,), daemon=True)
        endless.start()
        scene.wait_logged("BUSY")
        scene.last(0, 1)
        while is_busy(asked):
            endless.join(0.05)


def is_busy(asked: Any) -> bool:
    """End the running script. A script continues after its client stopped waiting."""
    try:
        asked.script_kill()
    except redis.ResponseError as error:
        return "NOTBUSY" not in str(error)
    return True


def run_endless(scene: Scene) -> None:
    with client(scene) as asked, suppress(redis.ResponseError, redis.TimeoutError):
        asked.eval(ENDLESS, 0)


def unable_to_write(scene: Scene) -> None:
    """The disk of Redis is full. It refuses every write until it has written its file."""
    assert isinstance(scene.redis, FrailRedis)
    begun(scene)
    with scene.redis.full_disk():
        scene.ask()
        scene.wait_logged("MISCONF")
        scene.last(0.5, 2)


def begun(scene: Scene, first_s: float = 0.2) -> None:
    """Start a service, and wait for a random time of the schedule."""
    scene.start()
    scene.ask()
    scene.within(first_s, 2)


@contextmanager
def client(scene: Scene) -> Iterator[Any]:
    asked = redis.Redis.from_url(scene.redis.url)
    try:
        yield asked
    finally:
        asked.close()


def both(first: Callable[[Scene], None]) -> Callable[[Scene], None]:
    """The same fault, and the service is killed during the recovery."""

    def and_killed(scene: Scene) -> None:
        first(scene)
        scene.last(0, 0.5)
        for service in scene.running():
            scene.kill(service)
        scene.start()

    return and_killed


FAULTS = [
    Fault("Redis killed and started", killed, 40, "own redis"),
    Fault("Redis frozen", stopped_for_a_while, 20, "own redis"),
    Fault("Redis started with its last writes lost", tail_lost, 50, "own redis"),
    Fault("Redis emptied", emptied, 40, "own redis"),
    Fault("Redis emptied, then the service killed", both(emptied), 20, "own redis"),
    Fault("Redis put back to an earlier state", gone_back, 40, "own redis"),
    Fault("Redis put back, then the service killed", both(gone_back), 20, "own redis"),
    Fault("Redis put back under living connections", gone_back_unseen, 40, "own redis"),
    Fault(
        "Redis put back from after a cancel to before it", gone_back_before_cancels, 20, "own redis"
    ),
    Fault("Redis full", full, 30, "own redis", may_revive=True),
    Fault("Redis busy with a script", busy, 20, "own redis"),
    Fault("Redis cannot write its file", unable_to_write, 20, "own redis"),
]
