"""The oscillator topic on real servers: every second is written once and in order, whatever happens to its writers."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from blackbox.config.wiring import kafka
from blackbox.journal.oscillator_topic import OscillatorTopic
from blackbox.records.errors import Fenced, JournalLost
from tests.support.world import ServiceProcess, World, both_engines_at_length, read_all, until

pytestmark = pytest.mark.service

LONG_S = 25_000


def topic(world: World) -> str:
    return f"{world.name}.seconds"


def start(world: World) -> ServiceProcess:
    return world.start_service(oscillator_topic=topic(world)).wait_ready()


def written(world: World) -> list[int]:
    """The seconds that can be read; each must have the one value, and be its record's timestamp."""
    records = read_all(world.kafka.bootstrap_servers, topic(world))
    assert {record.partition() for record in records} <= {0}
    assert {record.value() for record in records} <= {b"1"}
    seconds = [int(record.key() or b"") for record in records]
    assert [record.timestamp()[1] for record in records] == [1000 * second for second in seconds]
    return seconds


def wait_written(world: World, upto: int) -> list[int]:
    """Wait until this second is written; returns all seconds, which have no gap and no repetition."""

    def reaches() -> list[int]:
        found = written(world)
        return found if found and found[-1] >= upto else []

    seconds = until(f"the second {upto} is written", reaches, every_s=0.2)
    assert seconds == list(range(seconds[0], seconds[-1] + 1))
    return seconds


def writes(service: ServiceProcess) -> bool:
    return "blackbox_oscillator_lag_seconds{" in service.get("/metrics")[1]


def who_writes(services: list[ServiceProcess]) -> list[ServiceProcess]:
    """Wait until one of them writes; returns that one first."""

    def one() -> list[ServiceProcess]:
        writing = [service for service in services if writes(service)]
        rest = [service for service in services if service not in writing]
        return [*writing, *rest] if len(writing) == 1 else []

    return until("one of them writes", one)


def now() -> int:
    return int(time.time())


@pytest.mark.proof
def test_one_of_several_services_writes_each_second_despite_failures(
    world: World,
) -> None:
    services = [start(world) for _ in range(2)]
    writer, other = who_writes(services)
    wait_written(world, now() + 1)
    writer.freeze()
    until("the other one writes", lambda: writes(other))
    wait_written(world, now() + 1)
    writer.thaw()
    until("the first one has noticed", lambda: not writes(writer))
    wait_written(world, now() + 2)
    writer, other = who_writes(services)
    writer.kill()
    until("the other one writes", lambda: writes(other))
    seconds = wait_written(world, now() + 2)
    assert seconds[-1] <= now()


def opened(world: World) -> OscillatorTopic | None:
    seconds = OscillatorTopic(kafka(world.settings()), topic(world))
    try:
        assert seconds.open(now() * 1000) is None
    except JournalLost:
        seconds.close()
        return None
    return seconds


def test_a_gap_of_any_length_is_filled_in_the_first_partition(
    world: World,
) -> None:
    world.create(NewTopic(topic(world), 3))
    first = now() - LONG_S
    long_ago = until("the topic has its leader", lambda: opened(world))
    long_ago.write([first])
    service = start(world)
    until("the service writes", lambda: writes(service))
    with pytest.raises(Fenced):
        long_ago.write([first + 1])
    long_ago.close()
    assert wait_written(world, now())[0] == first
    assert service.metric("blackbox_oscillator_written_total") >= LONG_S
    until("it is up to date", lambda: service.metric("blackbox_oscillator_lag_seconds") <= 1)
    assert service.stop() == 0
    last = written(world)[-1]
    until("seconds have passed", lambda: now() > last + 2)
    start(world)
    assert wait_written(world, now())[0] == first


@both_engines_at_length
def test_a_new_oscillator_topic_has_one_partition_and_starts_with_now(
    world: World,
) -> None:
    before = now()
    start(world)
    assert wait_written(world, now() + 1)[0] >= before
    admin = AdminClient({"bootstrap.servers": world.kafka.bootstrap_servers})
    assert len(admin.list_topics(topic(world)).topics[topic(world)].partitions) == 1


def test_the_last_second_is_found_behind_records_of_others(world: World) -> None:
    world.create(NewTopic(topic(world), 1))
    seconds = OscillatorTopic(kafka(world.settings()), topic(world))
    assert seconds.open(now() * 1000) is None
    seconds.write(range(100, 300))
    servers = {"bootstrap.servers": world.kafka.bootstrap_servers}
    producer = Producer(servers | {"enable.idempotence": True})
    # Order numbers, for example: no second that anybody has written is so far ahead.
    for key in [b"soon", None, b"202611280001"] * 400:
        producer.produce(topic(world), b"1", key)
    producer.flush()
    seconds.close()
    again = OscillatorTopic(kafka(world.settings()), topic(world))
    last = again.open(now() * 1000)
    assert last is not None
    assert last.second == 299
    again.close()


def test_a_last_second_that_is_ahead_is_logged_and_counts_as_lag(world: World) -> None:
    world.create(NewTopic(topic(world), 1))
    producer = Producer({"bootstrap.servers": world.kafka.bootstrap_servers})
    ahead = now() + 3600
    for second in (now() - 5, ahead):
        producer.produce(topic(world), b"1", b"%d" % second, partition=0)
    producer.flush()

    service = start(world)

    until("the lag grows", lambda: service.metric("blackbox_oscillator_lag_seconds") >= 3)
    log = service.log.read_text()
    assert f"the record at partition 0, offset 1 has the second {ahead}" in log
    assert log.count("no second is written before") == 1
