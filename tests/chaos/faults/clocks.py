"""Clocks of a service's host, Redis or Kafka that are an hour wrong, and two hours without Kafka."""

from __future__ import annotations

import json
import time
from contextlib import closing
from functools import partial

import redis

from tests.chaos.faults.fault import Fault
from tests.chaos.scene import Scene
from tests.chaos.servers import FrailRedis, WrongClock
from tests.support.world import until

HOUR_S = 3600


def host_wrong(by_s: int, scene: Scene) -> None:
    clock = WrongClock(scene.folder / "clock")
    early_bait(scene)
    if scene.dice.random() < 0.5:
        clock.set_wrong_by(by_s)
    scene.start(clock=clock)
    scene.ask()
    scene.within(1, 3)
    clock.set_wrong_by(by_s)
    scene.wait_logged("ms apart")
    scene.last(0.5, 2)
    clock.set_wrong_by(0)


def redis_wrong(by_s: int, scene: Scene) -> None:
    clock = clock_of_servers(scene)
    early_bait(scene)
    if scene.dice.random() < 0.5:
        clock.set_wrong_by(by_s)
    scene.start()
    scene.ask()
    scene.within(0.2, 2)
    clock.set_wrong_by(by_s)
    scene.wait_logged("ms apart")
    scene.last(0.5, 2)
    clock.set_wrong_by(0)


def servers_wrong(by_s: int, scene: Scene) -> None:
    """Kafka and Redis have the same wrong clock, and the host's clock is right. It is behind: a clock that is ahead delays all."""
    clock = clock_of_servers(scene)
    scene.kafka.kill()
    clock.set_wrong_by(by_s)
    scene.ahead_s = by_s
    scene.kafka.start()
    early_bait(scene)
    scene.start()
    scene.ask()
    scene.wait_logged("ms apart")


def all_but_kafka_wrong(scene: Scene) -> None:
    """The clocks of the service and Redis are an hour behind, as after a boot without NTP, and are set during the schedule."""
    clock = clock_of_servers(scene)
    clock.set_wrong_by(-HOUR_S)
    until("Redis' clock is wrong", lambda: ahead_of_us_s(scene) < 60 - HOUR_S)
    scene.settings["hot_horizon_s"] = 0  # cold requests are read again at their promotion
    service = scene.start(clock=clock)
    early_bait(scene)
    scene.ask()
    scene.wait_taken_in()
    # counted after the requests were stored
    ahead_s = partial(service.metric, "blackbox_kafka_clock_ahead_seconds")
    until("the metric shows it", lambda: ahead_s() > HOUR_S - 60)
    scene.last(0, 1)
    clock.set_wrong_by(0)
    scene.ask()


def hours_without_kafka(scene: Scene) -> None:
    """All clocks are two hours later when Kafka is back. The service may have been replaced."""
    clock = clock_of_servers(scene)
    early_bait(scene)
    service = scene.start(clock=clock)
    scene.ask(within_s=3)
    scene.within(0.2, 2)
    scene.kafka.kill()
    scene.last(0, 2)
    if is_killed := scene.dice.random() < 0.3:
        scene.kill(service)
    clock.set_wrong_by(2 * HOUR_S)
    scene.ahead_s = 2 * HOUR_S
    scene.stays_pending = 0
    scene.last(0, 3)
    scene.kafka.start()
    if is_killed:
        scene.start(clock=clock)


def clock_of_servers(scene: Scene) -> WrongClock:
    """The clock of Redis, and of Kafka if the schedule has its own Kafka."""
    assert isinstance(scene.redis, FrailRedis)
    assert scene.redis.clock is not None
    return scene.redis.clock


def ahead_of_us_s(scene: Scene) -> float:
    """The error of Redis' clock in seconds."""
    with closing(redis.Redis.from_url(scene.redis.url)) as client:
        return float(client.time()[0]) - time.time()


def early_bait(scene: Scene) -> None:
    """Send requests that only a clock that is an hour wrong makes due."""
    for number in range(4):
        request = {"topic": scene.world.targets[0], "message": f"far-{number}", "countdown": 1800}
        scene.ask_this(json.dumps(request))
        scene.stays_pending += 1
    scene.world.flush()


FAULTS = [
    Fault("host's clock an hour ahead", partial(host_wrong, HOUR_S), 12),
    Fault("host's clock an hour behind", partial(host_wrong, -HOUR_S), 12),
    Fault(
        "Redis' clock an hour ahead", partial(redis_wrong, HOUR_S), 12, "own redis",
        needs_faketime=True,
    ),
    Fault(
        "Redis' clock an hour behind", partial(redis_wrong, -HOUR_S), 12, "own redis",
        needs_faketime=True,
    ),
    Fault(
        "Kafka's and Redis' clocks an hour behind", partial(servers_wrong, -HOUR_S), 4,
        "own kafka and redis", needs_faketime=True,
    ),
    Fault(
        "host's and Redis' clocks an hour behind", all_but_kafka_wrong, 12, "own redis",
        needs_faketime=True,
    ),
    Fault(
        "Kafka away for two hours", hours_without_kafka, 6, "own kafka and redis",
        needs_faketime=True,
    ),
]  # fmt: skip
