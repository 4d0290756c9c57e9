"""Several faults, one after the other, or during the repair of the first."""

from __future__ import annotations

from collections.abc import Callable

import redis as client

from tests.chaos.faults.fault import Fault
from tests.chaos.faults.network import END_TXN
from tests.chaos.scene import Scene


def several(scene: Scene) -> None:
    to_redis, to_kafka = scene.way_to_redis(), scene.way_to_kafka()

    def kill() -> None:
        scene.kill(scene.dice.choice(scene.running()))
        scene.start()

    def freeze() -> None:
        service = scene.dice.choice(scene.running())
        service.freeze()
        scene.last(0.1, 2.5)
        service.thaw()

    def empty() -> None:
        with client.Redis.from_url(scene.redis.url) as asked:
            asked.flushall()

    def restart() -> None:
        scene.redis.kill()
        scene.redis.start()

    wrongs: list[Callable[[], object]] = [
        kill, kill, scene.start, freeze, empty, restart, to_redis.cut, to_kafka.cut,
        lambda: to_redis.lose_reply("EXEC", 1), lambda: to_kafka.lose_reply(END_TXN, 1),
    ]  # fmt: skip
    scene.start()
    scene.ask(within_s=3)
    for _ in range(scene.dice.randint(3, 5)):
        scene.last(0, 1.2)
        scene.dice.choice(wrongs)()


FAULTS = [Fault("several of these", several, 80, "own redis")]
