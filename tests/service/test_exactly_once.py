"""Nothing is lost, delivered twice or early: on a real broker and Redis, with the service as a process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from contextlib import ExitStack
from functools import partial

import pytest
from confluent_kafka.admin import NewTopic

from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.shard_writer import ShardWriter
from blackbox.journal.topics import receipts_topic
from blackbox.records.receipt import Receipt
from blackbox.records.request import Shard
from tests.support.world import (
    AT_LENGTH,
    PARTITIONS,
    ServiceProcess,
    World,
    both_engines,
    both_engines_at_length,
    both_engines_in_proof,
    until,
)

pytestmark = pytest.mark.service

KILLS = int(os.environ.get("BLACKBOX_TEST_KILLS", "2"))
FREEZES = int(os.environ.get("BLACKBOX_TEST_FREEZES", "1"))


@both_engines
def test_every_request_is_delivered_once_on_time_with_its_headers(world: World) -> None:
    world.start_service().wait_ready()
    world.ask(2000, within_s=2)
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
    assert verdict.delivered == 2000


@both_engines_at_length
def test_at_least_once_delivers_every_request(world: World) -> None:
    world.start_service(delivery="at-least-once").wait_ready()
    world.ask(1000, within_s=1)
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict


@both_engines_at_length
def test_a_graceful_stop_takes_less_than_five_seconds_and_loses_nothing(
    world: World,
) -> None:
    service = world.start_service().wait_ready()
    world.ask(3000, within_s=4)
    assert service.stop(timeout_s=5) == 0
    world.start_service().wait_ready()
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict


@both_engines_at_length
def test_requests_written_while_no_service_runs_are_delivered_at_the_next_start(
    world: World,
) -> None:
    world.ask(500, within_s=0)
    world.start_service().wait_ready()
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict


@both_engines_at_length
def test_groups_and_topics_with_the_same_joined_name_do_not_fence_each_other(world: World) -> None:
    servers, other = world.kafka.bootstrap_servers, world.requests
    long = NewTopic(receipts_topic(f"eu-{other}"), 1)
    world.create(long, NewTopic(receipts_topic(other), 1))
    pairs = ("bb", f"eu-{other}"), ("bb-eu", other)
    with ExitStack() as ending:
        writers = []
        for group, topic in pairs:
            access = KafkaAccess(servers, group)
            writer = ShardWriter(Shard(topic, 0), access, exactly_once=True)
            ending.callback(writer.close)
            writer.open()
            writers.append(writer)
        for writer in writers:
            writer.begin()
            assert writer.commit(Receipt(at_ms=1)) > 0


def test_requests_due_at_the_same_instant_are_delivered_in_journal_order(world: World) -> None:
    world.start_service(batch_limit=100).wait_ready()
    at_ms = int(time.time() * 1000) + 1500
    for number in range(1000):
        asked = {"topic": world.targets[0], "message": number, "at": at_ms, "key": "one partition"}
        world.send_raw(json.dumps(asked), partition=0)
    world.flush()
    until("all are delivered", lambda: len(world.received()) >= 1000)
    assert [int(one.value() or b"") for one in world.received()] == list(range(1000))


@both_engines_in_proof
@pytest.mark.fault
@pytest.mark.timeout(900)
def test_kill_9_at_random_moments_loses_and_duplicates_nothing(world: World) -> None:
    dice = random.Random(7)
    kills = KILLS if AT_LENGTH or world.engine == "process" else 1
    for _ in range(kills):
        service = world.start_service()
        world.ask(1500, within_s=3)
        kill(service, dice)
    world.start_service().wait_ready()
    verdict = world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict
    assert verdict.delivered == 1500 * kills


def kill(service: ServiceProcess, dice: random.Random) -> None:
    """Kill it at a random moment after it started to deliver, or while it opens its shards."""
    if dice.random() < 0.7:
        service.wait_ready()
    with pytest.raises(subprocess.TimeoutExpired):  # it has not ended by itself
        service.process.wait(dice.uniform(0, 1.5))
    service.kill()


@both_engines_at_length
@pytest.mark.fault
@pytest.mark.timeout(600)
def test_an_owner_frozen_beyond_its_session_timeout_is_fenced(world: World) -> None:
    owners = [world.start_service().wait_ready(), world.start_service().wait_ready()]
    for round_number in range(FREEZES):
        frozen, other = owners[round_number % 2], owners[1 - round_number % 2]
        world.ask(3000, within_s=4)
        frozen.freeze()
        until("the other owns all shards", partial(owns_all, other))
        world.ask(1000, within_s=1)
        frozen.thaw()
        until("both own shards again", partial(owns_some, frozen))
    verdict = world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict


def owns_all(service: ServiceProcess) -> bool:
    return service.metric("blackbox_shard_open") == PARTITIONS


def owns_some(service: ServiceProcess) -> bool:
    return 0 < service.metric("blackbox_shard_open") < PARTITIONS
