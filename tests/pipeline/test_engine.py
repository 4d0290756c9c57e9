"""Faults and tasks that exist only with Spark."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from tests.support.world import AT_LENGTH, ServiceProcess, World, until

pytestmark = [
    pytest.mark.service,
    pytest.mark.parametrize("engine", ["spark"], indirect=True),
    pytest.mark.timeout(900),
]

WORKER_KILLS = int(os.environ.get("BLACKBOX_TEST_WORKER_KILLS", "4"))


@pytest.mark.proof
@pytest.mark.fault
def test_python_workers_killed_under_load_lose_and_duplicate_nothing(world: World) -> None:
    service = world.start_service().wait_ready()
    dice = random.Random(5)
    killed = 0
    while killed < WORKER_KILLS:
        world.ask(1500, within_s=3)
        pause = threading.Event()
        for _ in range(2):
            pause.wait(dice.uniform(0.2, 1.2))
            workers = until("Python workers are there", service.python_workers)
            dice.choice(workers).kill()
            killed += 1
    verdict = world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict
    until("every shard is open again", lambda: service.get("/readyz")[0] == 200)


@pytest.mark.proof
def test_partitions_added_while_it_runs_are_read_and_get_receipts(world: World) -> None:
    service = world.start_service().wait_ready()
    world.ask(200, within_s=1)
    admin = AdminClient({"bootstrap.servers": world.kafka.bootstrap_servers})
    for future in admin.create_partitions([NewPartitions(world.requests, 7)]).values():
        future.result()

    until("every new shard is open", lambda: service.metric("blackbox_shard_open") == 7)
    until("every new shard is read", lambda: service.get("/readyz")[0] == 200)
    for partition in range(7):
        world.ask(50, within_s=1, partition=partition)

    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
    assert verdict.delivered == 550
    receipts = admin.list_topics(f"{world.requests}.receipts").topics[f"{world.requests}.receipts"]
    assert len(receipts.partitions) == 7


@pytest.mark.at_length
def test_a_recreated_request_topic_does_not_stop_the_others(world: World) -> None:
    other = f"{world.name}.other"
    create(world, other)
    topics = f"{world.requests}:countdown,{other}:countdown"
    service = world.start_service(request_topics=topics).wait_ready()
    ask_in_a_day(world, other, 20)
    read = f"{other}-0", f"{other}-1"
    until("they are stored", lambda: all(pending(service, shard) == 10 for shard in read))

    delete(world, other)
    world.ask(1000, within_s=3)
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
    # Intake names it, unless the group has revoked the shard before.
    named = re.compile(rf"{other}-0 cannot be read|topic not available: {other}")
    until("it is named", lambda: named.search(service.log.read_text()))

    create(world, other)
    ask_in_a_day(world, other, 60)  # beyond the known offsets of the former topic
    until("its index no longer fits", lambda: set(why_unready(service)) == set(read))
    world.ask(1000, within_s=3)
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
    until("its shards are unread", lambda: service.metric("blackbox_shard_unread") == 2)
    assert service.metric("blackbox_shard_open") == world.partitions

    until("it is not stored", lambda: f"{other}-0 cannot take the" in service.log.read_text())
    assert "intake failed" not in service.log.read_text()

    assert service.stop() == 0
    service = world.start_service(request_topics=topics)
    world.ask(1000, within_s=3)
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
    until("it is not stored", lambda: f"{other}-0 cannot take the" in service.log.read_text())
    assert set(why_unready(service)) == set(read)
    assert "intake failed" not in service.log.read_text()


def create(world: World, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": world.kafka.bootstrap_servers})

    def created() -> bool:
        return all(
            f.exception() is None for f in admin.create_topics([NewTopic(topic, 2)]).values()
        )

    until("it is created", created)


def delete(world: World, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": world.kafka.bootstrap_servers})
    for future in admin.delete_topics([topic]).values():
        future.result()


def ask_in_a_day(world: World, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": world.kafka.bootstrap_servers})
    request = json.dumps({"topic": world.targets[0], "message": "m", "countdown": 86_400})
    for number in range(count):
        producer.produce(topic, request, partition=number % 2)
    producer.flush()


def pending(service: ServiceProcess, shard: str) -> float:
    page = service.get("/metrics")[1]
    found = re.search(rf'^blackbox_pending{{shard="{re.escape(shard)}"}} (\S+)', page, re.MULTILINE)
    return float(found[1]) if found else 0


def why_unready(service: ServiceProcess) -> dict[str, str]:
    status, body = service.get("/readyz")
    why: dict[str, str] = json.loads(body).get("why", {}) if status == 503 else {}
    return why


@pytest.mark.proof
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_windows_hand_their_shards_over_quickly_and_without_duplicates(
    world: World, tmp_path: Path, delivery: str
) -> None:
    settings = tmp_path / "spark.properties"
    settings.write_text("spark.blackbox.window.seconds=2\n")
    service = world.start_service(spark_config=settings, delivery=delivery).wait_ready()
    world.ask(500, within_s=1)
    world.wait_delivered()

    world.ask(6000, within_s=12)

    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
    name = "blackbox_window_handover_seconds"
    count, sum_s = service.metric(f"{name}_count"), service.metric(f"{name}_sum")
    print(f"{count:.0f} windows passed on, each in {sum_s / count * 1000:.0f} ms")
    assert count > 6
    assert sum_s / count < 2


@pytest.mark.proof
def test_a_killed_driver_leaves_no_process_behind(world: World) -> None:
    service = world.start_service().wait_ready()
    family = service.family()
    service.kill()
    until("all are gone", lambda: not any(map(is_alive, family)))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.proof
def test_the_service_ends_with_an_error_if_spark_ends(world: World) -> None:
    service = world.start_service().wait_ready()
    until("a JVM is there", service.jvm).kill()
    until("the service has ended", partial(has_ended, service.process))
    assert service.process.returncode == 1
    assert "Spark" in service.log.read_text().splitlines()[-1]


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


@pytest.mark.proof
@pytest.mark.parametrize("half", ["intake", "dispatch"] if AT_LENGTH else ["intake"])
def test_intake_and_dispatch_can_run_as_separate_services(world: World, half: str) -> None:
    other = "dispatch" if half == "intake" else "intake"
    world.start_service(only=half)
    world.ask(100, within_s=0)
    world.start_service(only=other).wait_ready()
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
