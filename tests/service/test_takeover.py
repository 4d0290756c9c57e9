"""The shards of a killed owner deliver again soon after the group has noticed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import NamedTuple

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from blackbox.config.wiring import kafka
from blackbox.journal import unowned_partitions
from blackbox.journal.unowned_partitions import UnownedPartitions
from tests.conftest import PROOF
from tests.support.world import (
    PARTITIONS,
    SESSION_S,
    ForkedService,
    ServiceProcess,
    World,
    both_engines_at_length,
    until,
)

pytestmark = [pytest.mark.service, pytest.mark.fault]

TAKEOVERS = int(os.environ.get("BLACKBOX_TEST_TAKEOVERS", "3" if PROOF else "1"))
MOST_MS = (SESSION_S + 2) * 1000
PATIENCE_S = 120
ON_ITS_WAY_MS = 50
"""The broker may still store records of the killed owner for this long."""

OPEN = re.compile(r'blackbox_shard_open\{shard="[^"]*-(\d+)"\} 1\.0')


class Kill(NamedTuple):
    """When an owner was killed, epoch ms, and the partitions it owned."""

    at_ms: int
    partitions: frozenset[int]


def owned(service: ServiceProcess) -> frozenset[int]:
    return frozenset(map(int, OPEN.findall(service.get("/metrics")[1])))


def each_owns_some(*services: ServiceProcess) -> bool:
    return all(0 < len(owned(one)) < PARTITIONS for one in services)


def share(*services: ServiceProcess) -> bool:
    """Each owns some, and nothing is owned twice."""
    shards = sorted(chain.from_iterable(map(owned, services)))
    return each_owns_some(*services) and shards == list(range(PARTITIONS))


def owns_all(service: ServiceProcess) -> bool:
    return len(owned(service)) == PARTITIONS


def delivers(service: ServiceProcess) -> bool:
    return service.metric("blackbox_delivered_total") > 0


@pytest.mark.alone
@pytest.mark.timeout(120 + 15 * TAKEOVERS)
def test_the_next_owner_delivers_within_the_session_timeout_and_two_seconds(world: World) -> None:
    other = world.start_service().wait_ready()
    kills = []
    for _ in range(TAKEOVERS):
        victim, other = other, world.start_service().wait_ready()
        until("both own shards", partial(each_owns_some, victim, other))
        for partition in range(PARTITIONS):
            world.ask(200, within_s=SESSION_S + 3.5, partition=partition)
        until("it delivers", partial(delivers, victim))
        kills.append(Kill(time.time_ns() // 1_000_000, owned(victim)))
        victim.kill()
        until("the other owns all", partial(owns_all, other))
    verdict = world.wait_delivered(timeout_s=150)
    assert verdict.is_exact, verdict
    took_ms = sorted(first_ms(world, kill) - kill.at_ms for kill in kills)
    half, most = took_ms[len(took_ms) // 2], took_ms[-1]
    print(f"{len(kills)} owners killed: next delivery after {half} ms (median), {most} ms (most)")
    assert most <= MOST_MS, took_ms


def first_ms(world: World, kill: Kill) -> int:
    """When the first message of its shards was delivered after the kill."""
    return min(
        at_ms
        for message in world.received()
        if (at_ms := message.timestamp()[1]) > kill.at_ms + ON_ITS_WAY_MS
        and partition_of(dict(message.headers() or [])["blackbox-source"]) in kill.partitions
    )


def partition_of(source: str | bytes | None) -> int:
    assert isinstance(source, bytes)
    return int(source.decode().rpartition("/")[2].partition("@")[0])


@pytest.fixture
def patient(world: World) -> Callable[..., ServiceProcess]:
    """Starts services whose group waits two minutes for a silent member."""
    config = world.folder / "patient.properties"
    config.write_text(f"session.timeout.ms={PATIENCE_S * 1000}\nheartbeat.interval.ms=300\n")
    return partial(world.start_service, kafka_config=config)


@pytest.mark.proof
@both_engines_at_length
def test_a_restarted_owner_with_an_instance_id_does_not_wait_for_the_group(
    world: World, patient: Callable[..., ServiceProcess]
) -> None:
    victim = patient(instance_id="one").wait_ready()
    world.ask(2000, within_s=10)
    until("it delivers", partial(delivers, victim))
    victim.kill()

    patient(instance_id="one").wait_ready()
    verdict = world.wait_delivered(timeout_s=150)

    assert verdict.is_exact, verdict
    print(f"killed and started again: late by {verdict.late_ms[-1]} ms at most")
    assert verdict.late_ms[-1] < PATIENCE_S * 1000 / 2, verdict.late_ms[-10:]


def look_often() -> None:
    """Look for partitions without an owner each second, not each ten seconds."""
    unowned_partitions.LOOK_S = 1


@pytest.mark.parametrize(
    "others",
    [pytest.param([], marks=pytest.mark.at_length), ["two"]],
    ids=["alone", "beside another"],
)
def test_partitions_added_while_owners_with_instance_ids_were_down_get_an_owner(
    world: World, patient: Callable[..., ServiceProcess], others: list[str]
) -> None:
    world.service_type = partial(ForkedService, before=[look_often])
    names = ["one", *others]
    victims = [patient(instance_id=name).wait_ready() for name in names]
    until("all shards are owned", lambda: sum(map(len, map(owned, victims))) == PARTITIONS)
    for victim in victims:
        victim.kill()
    admin = AdminClient({"bootstrap.servers": world.kafka.bootstrap_servers})
    [added] = admin.create_partitions([NewPartitions(world.requests, PARTITIONS + 1)]).values()
    added.result()

    for name in names:
        patient(instance_id=name).wait_ready()
    until("it can be written to", lambda: world.writable_partitions() == PARTITIONS + 1)
    world.ask(10, within_s=1, partition=PARTITIONS)

    assert world.wait_delivered().is_exact


def test_a_process_sees_whether_others_own_shards(world: World) -> None:
    group = UnownedPartitions(kafka(world.settings()), [world.requests])
    assert not group.has_others(None)

    world.start_service(instance_id="one").wait_ready()

    assert group.has_others(None)
    assert group.has_others("two")
    assert not group.has_others("one")


@pytest.mark.proof
def test_a_stopping_owner_with_an_instance_id_leaves_the_group(
    world: World, patient: Callable[..., ServiceProcess]
) -> None:
    first = patient(instance_id="one").wait_ready()
    second = patient(instance_id="two").wait_ready()
    until("both own shards", partial(each_owns_some, first, second))
    began = time.monotonic()

    assert first.stop(timeout_s=5) == 0
    until("the other owns all", partial(owns_all, second))

    assert time.monotonic() - began < PATIENCE_S / 2


@pytest.mark.proof
def test_one_of_two_processes_with_the_same_instance_id_continues_without_it(
    world: World, patient: Callable[..., ServiceProcess]
) -> None:
    first = patient(instance_id="one").wait_ready()
    second = patient(instance_id="one").wait_ready()
    until("they share the shards", partial(share, first, second))
    opened = [one.metric("blackbox_recoveries_total") for one in (first, second)]
    world.ask(1000, within_s=2)

    verdict = world.wait_delivered()

    assert verdict.is_exact, verdict
    assert [one.metric("blackbox_recoveries_total") for one in (first, second)] == opened
    assert "BLACKBOX_INSTANCE_ID=one; continuing without one" in first.log.read_text()
    assert "continuing without one" not in second.log.read_text()
