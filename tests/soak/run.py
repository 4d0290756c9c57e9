"""One soak: measure the maximum rate, then run a share of it with faults."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event

from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from blackbox.embedded import EmbeddedError
from blackbox.journal.topics import receipts_topic
from tests.soak.faults import Stage, story
from tests.soak.monitor import Monitor
from tests.soak.report import Fault, Soak
from tests.soak.traffic import Traffic
from tests.support.world import ServiceProcess, World, until

KEPT = {"retention.ms": "180000", "segment.bytes": str(128 << 20)}
"""Kafka's memory grows with its data: the index files of each segment are mapped."""

OF_JOURNALS = {"retention.ms": "-1"}
"""The service trims them."""

FLOOD = 1_000_000
MOST_PER_S = 50_000
PATIENCE_S = 300.0


def run(
    world: World,
    seconds: float,
    share: float,
    every_s: float,
    say: Callable[[str, float], None],
    *,
    flood: int = FLOOD,
) -> Soak:
    """Two services with Kafka's default timeouts, one of them without faults.

    The maximum rate is measured with `flood` requests.
    """
    # A forked process shares memory with its parent, less and less of it: that would look like growth.
    world.service_type = ServiceProcess
    usual = world.folder / "usual.properties"
    usual.touch()
    stage = Stage(world, usual)
    _keep_briefly(world, world.requests, receipts_topic(world.requests), world.targets[0])
    most = 2 * flood + int(seconds * MOST_PER_S)
    with Traffic(world.kafka.bootstrap_servers, world.requests, world.targets[0], most) as traffic:
        say("how much can the machine do?", 0)
        capacity = _capacity(traffic, flood)
        first, per_s = traffic.sent, int(capacity * share)
        began_ms, began = time.time_ns() // 1_000_000, time.monotonic()
        faults: list[Fault] = []
        with Monitor(lambda: _pids(stage)) as monitor:
            with traffic.flowing(per_s):
                for number, (name, fault) in enumerate(story()):
                    at_s = (number + 0.5) * every_s
                    if at_s >= seconds:
                        break
                    _wait_until(began + at_s)
                    say(f"{per_s:,} requests/s; {name}", at_s)
                    from_s = time.monotonic() - began
                    fault(stage)
                    faults.append(Fault(name, from_s, time.monotonic() - began))
                _wait_until(began + seconds)
            say("the rest comes out", seconds)
            until("everything is delivered", lambda: traffic.seen >= traffic.sent, PATIENCE_S)
        until("nothing is pending", lambda: stage.steady.metric("blackbox_pending") == 0)
    return Soak(
        engine=world.engine,
        cores=os.cpu_count() or 1,
        capacity=int(capacity),
        per_s=per_s,
        seconds=seconds,
        began_ms=began_ms,
        faults=faults,
        due_ms=traffic.due_ms[first : traffic.sent],
        delivered_ms=traffic.delivered_ms[first : traffic.sent],
        times=traffic.times[first : traffic.sent],
        partitions=traffic.partitions[first : traffic.sent],
        lives=monitor.lives(),
    )


def _keep_briefly(world: World, *topics: str) -> None:
    journals = {world.requests, receipts_topic(world.requests)}
    changed = [
        ConfigResource(
            ResourceType.TOPIC,
            topic,
            incremental_configs=[
                ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
                for name, value in (KEPT | (OF_JOURNALS if topic in journals else {})).items()
            ],
        )
        for topic in topics
    ]
    admin = AdminClient({"bootstrap.servers": world.kafka.bootstrap_servers})
    for done in admin.incremental_alter_configs(changed).values():
        done.result(10)


def _capacity(traffic: Traffic, flood: int) -> float:
    """Requests per second from writing to reading the message, after a warm-up."""
    took_s = 0.0
    for _ in range(2):
        began = time.monotonic()
        traffic.flood(flood)
        until("the flood is delivered", lambda: traffic.seen >= traffic.sent, PATIENCE_S)
        took_s = time.monotonic() - began
    return flood / took_s


def _pids(stage: Stage) -> dict[str, int]:
    """The pids of the running ones: a server may just be restarting."""
    pids = {"service": stage.steady.pid, "other service": stage.other.pid}
    for role, server in (("Redis", stage.world.redis), ("Kafka", stage.world.kafka)):
        with suppress(EmbeddedError):
            pids[role] = server.pid
    return pids


def _wait_until(moment_s: float) -> None:
    Event().wait(max(0.0, moment_s - time.monotonic()))
