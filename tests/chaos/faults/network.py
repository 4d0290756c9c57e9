"""Connections that are cut or slow, and requests that a server executes without a reply."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.chaos.faults.fault import Fault
from tests.chaos.proxy import Proxy
from tests.chaos.scene import Scene

PRODUCE, FETCH, METADATA, OFFSET_COMMIT, JOIN_GROUP, INIT_PRODUCER_ID = 0, 1, 3, 8, 11, 22
ADD_PARTITIONS_TO_TXN, END_TXN = 24, 26

Way = Callable[[Scene], Proxy]


def cut(way_of: Way, scene: Scene) -> None:
    way = way_of(scene)
    scene.start()
    scene.ask()
    scene.at(0.3)
    for _ in range(scene.dice.randint(1, 4)):
        scene.last(0, 0.8)
        way.cut()


def away(way_of: Way, scene: Scene) -> None:
    way = way_of(scene)
    scene.start()
    scene.ask()
    scene.within(0, 1.8)
    way.refuse()
    scene.last(0.2, 3)
    way.mend()


def slow(way_of: Way, scene: Scene) -> None:
    way = way_of(scene)
    scene.start()
    scene.ask()
    scene.within(0, 1.5)
    way.delay(scene.dice.choice([0.02, 0.1, 0.5]))
    scene.last(0.5, 2)
    way.mend()


def silent(way_of: Way, scene: Scene) -> None:
    """The server does not answer for longer than any client waits."""
    way = way_of(scene)
    scene.start()
    scene.ask()
    scene.within(0, 1.8)
    way.delay(60)
    scene.last(5.5, 7)
    way.cut()
    way.mend()


def reply_lost(way_of: Way, request: str | int, latest: int, scene: Scene) -> None:
    """The server executes the request, but its reply is lost. Sometimes the service is also killed."""
    way = way_of(scene)
    way.lose_reply(request, scene.dice.randint(1, latest))
    service = scene.start()
    scene.ask_until_lost(way)
    fate = scene.dice.random()
    if fate < 0.3:
        scene.kill(service)
        scene.start()
    elif fate < 0.6:
        way.refuse()
        scene.last(0.2, 2)
        way.mend()


def request_lost(way_of: Way, request: str | int, latest: int, scene: Scene) -> None:
    way = way_of(scene)
    way.lose_request(request, scene.dice.randint(1, latest))
    scene.start()
    scene.ask_until_lost(way)


def another_reply_lost(scene: Scene) -> None:
    requests = [
        PRODUCE,
        METADATA,
        OFFSET_COMMIT,
        JOIN_GROUP,
        INIT_PRODUCER_ID,
        ADD_PARTITIONS_TO_TXN,
    ]
    reply_lost(Scene.way_to_kafka, scene.dice.choice(requests), 1, scene)


REDIS, KAFKA = Scene.way_to_redis, Scene.way_to_kafka

FAULTS = [
    Fault("connections to Redis cut", partial(cut, REDIS), 30),
    Fault("Redis cannot be reached", partial(away, REDIS), 20),
    Fault("Redis answers slowly", partial(slow, REDIS), 20),
    Fault("Redis does not answer", partial(silent, REDIS), 10),
    Fault("reply to EXEC lost", partial(reply_lost, REDIS, "EXEC", 8), 60),
    Fault("EXEC itself lost", partial(request_lost, REDIS, "EXEC", 8), 20),
    Fault("connections to Kafka cut", partial(cut, KAFKA), 30),
    Fault("Kafka cannot be reached", partial(away, KAFKA), 20),
    Fault("Kafka answers slowly", partial(slow, KAFKA), 20, may_revive=True),
    Fault("Kafka does not answer", partial(silent, KAFKA), 10, may_revive=True),
    Fault("reply to EndTxn lost", partial(reply_lost, KAFKA, END_TXN, 5), 60, exactly_once=True),
    Fault("EndTxn itself lost", partial(request_lost, KAFKA, END_TXN, 5), 20, exactly_once=True),
    Fault("another of Kafka's replies lost", another_reply_lost, 40, exactly_once=True),
]
