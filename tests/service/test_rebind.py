"""An index belongs to one incarnation of its topics and to one group; lost records of journals are noticed."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import redis
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from blackbox import Client
from blackbox.config.wiring import kafka
from blackbox.embedded import EmbeddedKafka, EmbeddedRedis
from blackbox.engine.caretaker import Caretaker
from blackbox.engine.metrics import Metrics
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.shard_writer import ShardWriter
from blackbox.journal.topics import receipts_topic
from blackbox.rebind import INTERRUPTED, leftovers
from blackbox.rebind import topic_rebind as rebinding
from blackbox.records.clock import Clock
from blackbox.records.errors import IndexLost, RecoveryRequired
from blackbox.records.outgoing import Outgoing
from blackbox.records.receipt import Mark, decode
from blackbox.records.request import Shard, request_id
from tests.service.test_cli import blackbox
from tests.service.test_low_water import ends, keep, starts
from tests.support.world import (
    AT_LENGTH,
    ServiceProcess,
    World,
    both_engines_at_length,
    read_all,
    until,
)

pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]

SOON: dict[str, Any] = {"trim_interval_s": 1, "retention_s": 1}


def admin(world: World) -> AdminClient:
    return AdminClient({"bootstrap.servers": world.kafka.bootstrap_servers})


def recreate(world: World, topic: str, partitions: int, service: ServiceProcess) -> None:
    delete(world, topic)
    until("its service notices the loss", lambda: service.get("/readyz")[0] == 503)
    make(world, topic, partitions)


def delete(world: World, topic: str) -> None:
    asked = admin(world)
    for answer in asked.delete_topics([topic]).values():
        answer.result()


def make(world: World, topic: str, partitions: int) -> None:
    asked = admin(world)

    def made() -> bool:
        new = NewTopic(topic, partitions, config={"message.timestamp.type": "LogAppendTime"})
        return all(answer.exception() is None for answer in asked.create_topics([new]).values())

    until("the topic exists again", made, every_s=0.2)


def why_not_open(service: ServiceProcess, wanted: str = "blackbox rebind") -> str:
    def told() -> str:
        status, body = service.get("/readyz")
        why = json.loads(body).get("why", {}).values() if status == 503 else ()
        return next((text for text in why if wanted in text), "")

    return until("it reports why shards do not open", told)


def rebind(world: World, pending: str, **more: object) -> str:
    done = blackbox(world.environment(**more), "rebind", world.requests, "--pending", pending)
    assert done.code == 0, done.errors
    return done.out


def keys(world: World, client: Any) -> list[bytes]:
    return list(client.scan_iter(f"blackbox:{{{world.requests}-*", count=10_000))


def lose(world: World, client: Any) -> None:
    for key in keys(world, client):
        client.delete(key)


def pending(world: World, client: Any) -> int:
    dues = [f"blackbox:{{{world.requests}-{p}}}:due" for p in range(world.partitions)]
    return sum(client.zcount(due, "-inf", "(inf") for due in dues)


def remove_receipts(world: World) -> None:
    """Remove all receipts."""
    topic = receipts_topic(world.requests)
    places = {TopicPartition(topic, p): OffsetSpec.latest() for p in range(world.partitions)}  # type: ignore[no-untyped-call]
    asked = admin(world)
    ends = {at.partition: e.result().offset for at, e in asked.list_offsets(places).items()}
    for answer in asked.delete_records([TopicPartition(topic, p, ends[p]) for p in ends]).values():
        answer.result()


@pytest.fixture
def client(world: World) -> Any:
    return redis.Redis.from_url(world.redis.url)


def test_a_rebind_of_a_topic_without_receipts_fails_with_the_cause(world: World) -> None:
    with pytest.raises(
        RecoveryRequired,
        match=f"the topic {world.requests}.receipts does not exist; start a service",
    ):
        rebinding.rebind(world.settings(), world.requests, "deliver")


@pytest.mark.parametrize("decision", ["deliver", pytest.param("drop", marks=pytest.mark.proof)])
def test_the_shards_of_a_recreated_topic_stay_closed_until_a_rebind(
    world: World, client: Any, decision: str
) -> None:
    service = world.start_service().wait_ready()
    world.ask(200, within_s=0)
    until("they are delivered", lambda: len(bodies(world)) == 200)
    world.ask(100, from_s=3000, within_s=3600)
    until("they are stored", lambda: pending(world, client) == 100)
    before, world.asked = world.asked, {}

    recreate(world, world.requests, world.partitions, service)
    world.ask(300, within_s=1)
    told = why_not_open(service)

    assert "created again" in told or "topic id" in told
    assert f"blackbox rebind {world.requests} --pending deliver" in told
    assert service.get("/livez")[0] == 200
    done = rebind(world, decision)
    service.wait_ready()
    again = sum(
        int(line.split(" written again")[0].rpartition(" ")[2]) for line in done.splitlines()
    )
    assert again == (100 if decision == "deliver" else 0)
    until("new ones are delivered", lambda: len(bodies(world)) >= 200 + 300)
    until("the old ones are pending", lambda: pending(world, client) == again)
    delivered_before = sorted(before)[:200]
    assert sorted(bodies(world)) == sorted([*delivered_before, *world.asked]), "each exactly once"


@pytest.mark.proof
@pytest.mark.parametrize("more", [{}, {"trim_interval_s": 1}], ids=["no mark", "marks"])
def test_old_receipts_of_a_recreated_topic_end_nothing_if_redis_is_lost_later(
    world: World, client: Any, more: dict[str, Any]
) -> None:
    service = world.start_service().wait_ready()
    world.ask(200, within_s=0)
    until("they are delivered", lambda: len(bodies(world)) == 200)
    service.stop()
    before, world.asked = world.asked, {}
    delete(world, world.requests)
    make(world, world.requests, world.partitions)
    rebind(world, "drop")
    service = world.start_service(**more).wait_ready()
    world.ask(100, from_s=8, within_s=1)
    until("they are stored", lambda: pending(world, client) == 100)
    if more:
        until("marks are written", lambda: marks(world) >= world.partitions)

    lose(world, client)

    until("new ones are delivered", lambda: len(bodies(world)) >= 300)
    assert sorted(bodies(world)) == sorted([*before, *world.asked]), "each exactly once"


def marks(world: World) -> int:
    topic = receipts_topic(world.requests)
    return sum(
        decode(found.value()).mark is not None
        for found in read_all(world.kafka.bootstrap_servers, topic)
    )


@pytest.mark.proof
def test_requests_of_a_recreated_topic_do_not_get_outcomes_of_old_ones(
    world: World,
) -> None:
    service = world.start_service().wait_ready()
    world.ask(4, within_s=0, partition=0)
    until("they are delivered", lambda: len(bodies(world)) == 4)
    recreate(world, world.requests, world.partitions, service)
    world.ask(4, from_s=3000, within_s=3600, partition=0)
    why_not_open(service)

    rebind(world, "drop")
    service.wait_ready()

    with Client(world.kafka.bootstrap_servers, request_topic=world.requests) as asked:
        found = [asked.get(request_id(Shard(world.requests, 0), offset)) for offset in range(4)]
    assert [one.state for one in found] == ["pending"] * 4


def test_a_walk_does_not_trim_a_topic_recreated_in_the_meantime(world: World) -> None:
    keep(world, world.requests, retention_ms=-1)
    access, shard = kafka(world.settings()), Shard(world.requests, 0)
    service = world.start_service().wait_ready()  # creates the receipts topic
    service.stop()
    doubts: list[str] = []
    walks: list[float] = []

    class Walking:
        """The owner of a shard whose topic is recreated during its walk."""

        def __init__(self) -> None:
            self.shard = shard
            with closing(ShardJournal(shard, access)) as journal:
                self.binding = journal.binding(world.name)

        def find_low_water(self, walk_s: float, stopping: Event) -> Mark | None:
            walks.append(walk_s)
            if len(walks) > 1:
                return None
            delete(world, world.requests)
            make(world, world.requests, world.partitions)
            keep(world, world.requests, retention_ms=-1)
            world.ask(100, within_s=3600, partition=0)
            return Mark(100, 0)

        def recover(self, reason: Exception) -> None:
            doubts.append(str(reason))

    owners: list[Any] = [Walking()]
    caretaker = Caretaker(access, Metrics(), Clock(), lambda: owners, interval_s=1, retention_s=0)
    caretaker.start()
    until("it walks again", lambda: len(walks) > 1)
    caretaker.stop()
    assert "created again" in doubts[0]
    assert starts(world, world.requests)[0] == 0


def bodies(world: World) -> list[str]:
    return [(m.value() or b"").decode() for m in world.received() if m.topic() in world.targets]


@pytest.mark.proof
def test_a_changed_group_delivers_nothing_until_a_rebind(world: World, client: Any) -> None:
    service = world.start_service().wait_ready()
    world.ask(100, from_s=20, within_s=25)
    until("they are stored", lambda: pending(world, client) == 100)
    service.stop()

    other = world.start_service(group_id=f"{world.name}.other")
    told = why_not_open(other)

    assert f"belongs to the group {world.name!r}" in told
    assert "BLACKBOX_GROUP_ID" in told
    rebind(world, "deliver", group_id=f"{world.name}.other")
    other.wait_ready()
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict


@pytest.fixture
def other_redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    redis = EmbeddedRedis(tmp_path / "other-redis")
    redis.start()
    yield redis
    redis.stop()


def test_a_second_group_with_its_own_redis_delivers_nothing_until_a_rebind(
    world: World, other_redis: EmbeddedRedis
) -> None:
    theirs: dict[str, Any] = {"group_id": f"{world.name}.b", "redis_url": other_redis.url}
    first = world.start_service().wait_ready()
    second = world.start_service(**theirs)
    world.ask(200, from_s=3, within_s=6)

    told = why_not_open(second)

    assert f"belong to the group {world.name!r}, but BLACKBOX_GROUP_ID is '{world.name}.b'" in told
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
    first.stop()
    world.ask(100, within_s=0)
    assert "another group; 0 written again, 0 dropped" in rebind(world, "deliver", **theirs)
    second.wait_ready()
    assert "it has no index; nothing to do" not in rebind(world, "deliver", **theirs)
    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
    assert f"group '{world.name}.b'" in why_not_open(world.start_service())


@pytest.mark.proof
def test_a_group_closes_a_shard_that_was_rebound_to_another_group(
    world: World, other_redis: EmbeddedRedis
) -> None:
    theirs: dict[str, Any] = {"group_id": f"{world.name}.b", "redis_url": other_redis.url}
    first = world.start_service().wait_ready()
    for partition in range(world.partitions):
        world.ask(10, from_s=12, within_s=12, partition=partition)
    rebind(world, "deliver", **theirs)
    second = world.start_service(**theirs).wait_ready()

    def closed() -> int:
        why = json.loads(first.get("/readyz")[1]).get("why", {}).values()
        return sum(f"belong to the group '{world.name}.b'" in text for text in why)

    until("all its shards are closed", lambda: closed() == world.partitions)
    assert "are not of this owner" in first.log.read_text()
    before = set(world.asked)
    world.ask(200, within_s=2)
    until("everything is delivered", lambda: set(world.asked) <= set(bodies(world)))
    assert [n for body, n in Counter(bodies(world)).items() if body not in before] == [1] * 200
    assert second.get("/readyz")[0] == 200


@pytest.mark.proof
@pytest.mark.parametrize("by_others", [0, 500])
def test_messages_in_a_recreated_target_are_not_delivered_again(
    world: World, client: Any, by_others: int
) -> None:
    target = world.targets[0]
    world.targets = [target]
    service = world.start_service().wait_ready()
    world.ask(200, within_s=0)

    def delivered() -> int:
        return sum(
            "blackbox-source" in dict(message.headers() or [])
            for message in read_all(world.kafka.bootstrap_servers, target)
        )

    until("everything is delivered", lambda: delivered() == 200, every_s=0.5)
    asked = admin(world)
    for answer in asked.delete_topics([target]).values():
        answer.result()

    def made() -> bool:
        new = NewTopic(target, world.partitions)
        return all(answer.exception() is None for answer in asked.create_topics([new]).values())

    until("the target exists again", made, every_s=0.2)
    producer = Producer({"bootstrap.servers": world.kafka.bootstrap_servers})
    for number in range(by_others * world.partitions):
        producer.produce(target, b"x", partition=number % world.partitions)
    producer.flush()
    service.kill()
    lose(world, client)

    again = world.start_service().wait_ready()

    world.ask(1, within_s=0)
    until("the new one is delivered", lambda: delivered() > 0, every_s=0.5)
    assert delivered() == 1
    assert "named by the last receipt, do not exist" not in again.log.read_text()


@pytest.mark.proof
def test_a_shortened_log_is_distinguished_from_a_recreated_topic(world: World, client: Any) -> None:
    service = world.start_service().wait_ready()
    world.ask(100, from_s=3000, within_s=3600, partition=0)
    until("they are stored", lambda: pending(world, client) == 100)
    service.stop()
    # The result of an unclean election: an index that is beyond the log.
    client.hset(f"blackbox:{{{world.requests}-0}}:state", "requests", 150)

    again = world.start_service()
    told = why_not_open(again)

    assert "Kafka lost records" in told
    assert "created again" not in told
    assert "became shorter; 0 written again, 0 dropped" in rebind(world, "deliver")
    again.wait_ready()
    assert pending(world, client) == 100


@pytest.mark.proof
@pytest.mark.parametrize(
    ("where", "step"),
    [(rebinding, "commit_barrier"), (ShardIndex, "stored")],
    ids=["taking over", "writing"],
)
def test_a_service_that_tries_to_open_a_shard_does_not_stop_its_rebind(
    world: World, client: Any, monkeypatch: pytest.MonkeyPatch, where: object, step: str
) -> None:
    service = world.start_service().wait_ready()
    world.ask(10, from_s=3000, within_s=3600, partition=0)
    until("they are stored", lambda: pending(world, client) == 10)
    service.stop()
    client.hset(f"blackbox:{{{world.requests}-0}}:state", "requests", 15)
    shard, fenced = Shard(world.requests, 0), list[bool]()
    real: Callable[..., Any] = getattr(where, step)

    def beside_a_service(*args: Any, **more: Any) -> Any:
        if not fenced:
            fenced.append(True)
            with closing(ShardWriter(shard, kafka(world.settings()), exactly_once=True)) as other:
                other.open()
        return real(*args, **more)

    monkeypatch.setattr(where, step, beside_a_service)
    rebinding.rebind(world.settings(), world.requests, "deliver")

    assert fenced
    world.start_service().wait_ready()
    assert pending(world, client) == 10


@pytest.mark.proof
def test_an_open_transaction_of_a_killed_rebind_does_not_stop_the_next_one(
    world: World, client: Any
) -> None:
    service = world.start_service().wait_ready()
    world.ask(10, from_s=3000, within_s=3600, partition=0)
    until("they are stored", lambda: pending(world, client) == 10)
    service.stop()
    client.hset(f"blackbox:{{{world.requests}-0}}:state", "requests", 15)
    shard, access = Shard(world.requests, 0), kafka(world.settings())
    long = replace(access, settings=dict(access.settings) | {"transaction.timeout.ms": "900000"})
    with closing(ShardWriter(shard, long, exactly_once=True)) as killed:
        killed.open()
        killed.begin()
        killed.send(Outgoing(0, world.requests, None, b"{}", [], 0), {})
        killed.flush()

        assert "became shorter; 0 written again" in rebind(world, "deliver")

    world.start_service().wait_ready()
    assert pending(world, client) == 10


@pytest.mark.proof
def test_trimmed_receipts_cause_no_second_delivery(world: World, client: Any) -> None:
    keep(world, world.requests, retention_ms=-1)
    service = world.start_service(**SOON).wait_ready()
    world.ask(500, within_s=0)
    world.ask(50, from_s=20, within_s=25)

    def is_trimmed() -> bool:
        return all(start > 0 for start in starts(world, receipts_topic(world.requests)).values())

    until("receipts are trimmed", is_trimmed)
    service.stop()
    lose(world, client)

    world.start_service(**SOON).wait_ready()

    until("everything is delivered", lambda: set(bodies(world)) == set(world.asked))
    assert sorted(bodies(world)) == sorted(world.asked)
    assert world.received(world.dead_letters) == []


@pytest.mark.proof
def test_deleted_receipts_and_a_lost_redis_cause_no_second_delivery(
    world: World, client: Any
) -> None:
    service = world.start_service().wait_ready()
    world.ask(100, within_s=0)
    until("they are delivered", lambda: len(bodies(world)) == 100)
    access = kafka(world.settings())

    def committed() -> int:
        found = 0
        for partition in range(world.partitions):
            with closing(ShardJournal(Shard(world.requests, partition), access)) as journal:
                found += journal.committed()
        return found

    until("its group has committed the offsets", lambda: committed() == 100, every_s=0.2)
    service.stop()
    delete(world, receipts_topic(world.requests))
    lose(world, client)
    world.ask(10, from_s=70, within_s=75)

    world.start_service().wait_ready()

    until("each has its dead letter", lambda: len(world.received(world.dead_letters)) == 100)
    reasons = {
        dict(m.headers() or [])["blackbox-reason"] for m in world.received(world.dead_letters)
    }
    assert reasons == {b"outcome-unknown"}
    assert pending(world, client) == 10
    assert len(bodies(world)) == 100


@pytest.mark.proof
def test_requests_without_receipts_become_dead_letters_that_can_be_replayed(
    world: World, client: Any
) -> None:
    service = world.start_service().wait_ready()
    world.ask(100, within_s=0)
    until("they are delivered", lambda: len(bodies(world)) == 100)
    world.ask(20, from_s=200, within_s=250)
    until("they are stored", lambda: pending(world, client) == 20)
    service.stop()
    remove_receipts(world)
    lose(world, client)

    service = world.start_service().wait_ready()

    until("dead letters are written", lambda: len(world.received(world.dead_letters)) == 100)
    reasons = {
        dict(m.headers() or [])["blackbox-reason"] for m in world.received(world.dead_letters)
    }
    assert reasons == {b"outcome-unknown"}
    assert len(bodies(world)) == 100
    assert pending(world, client) == 20
    letter = world.received(world.dead_letters)[0]
    place = f"{letter.topic()}/{letter.partition()}@{letter.offset()}"
    replayed = subprocess.run(
        [sys.executable, "-m", "blackbox", "letters", "--replay", place],
        env=os.environ | world.environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert replayed.returncode == 0, replayed.stderr
    until("it is delivered", lambda: len(bodies(world)) == 101)


@pytest.mark.proof
def test_an_old_redis_backup_restored_after_a_trim_is_rebuilt_from_the_mark(
    world: World, client: Any
) -> None:
    keep(world, world.requests, retention_ms=-1)
    service = world.start_service(**SOON).wait_ready()
    world.ask(100, from_s=5, within_s=6)
    until("they are stored", lambda: pending(world, client) == 100)
    yesterday = {key: client.dump(key) for key in keys(world, client)}
    receipts = receipts_topic(world.requests)
    written = ends(world, receipts)
    until("they are delivered", lambda: len(bodies(world)) == 100)
    world.ask(100, from_s=25, within_s=30)

    def is_trimmed() -> bool:
        kept = starts(world, receipts)
        return any(kept[partition] > written[partition] for partition in kept)

    until("receipts of the deliveries are trimmed", is_trimmed)
    service.stop()
    lose(world, client)
    for key, value in yesterday.items():
        client.restore(key, 0, value)

    service = world.start_service(**SOON).wait_ready()

    until("everything is delivered", lambda: set(bodies(world)) == set(world.asked))
    assert sorted(bodies(world)) == sorted(world.asked)
    assert "the records in between were removed" in service.log.read_text()


@pytest.mark.proof
def test_an_index_that_lost_only_its_due_times_is_rebuilt(world: World, client: Any) -> None:
    world.start_service().wait_ready()
    world.ask(200, from_s=8, within_s=10)
    until("they are stored", lambda: pending(world, client) == 200)

    client.delete(*(f"blackbox:{{{world.requests}-{p}}}:due" for p in range(world.partitions)))

    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict


def test_an_index_of_a_newer_version_is_not_changed_and_is_reported(
    world: World, client: Any
) -> None:
    world.start_service().wait_ready().stop()
    state = f"blackbox:{{{world.requests}-0}}:state"
    client.hset(state, "format", "99")

    told = why_not_open(world.start_service(), "has format")

    assert "has format '99'" in told
    assert client.hget(state, "format") == b"99"


@pytest.mark.proof
def test_an_index_of_an_older_version_is_rebuilt_automatically(world: World, client: Any) -> None:
    service = world.start_service().wait_ready()
    world.ask(100, from_s=12, within_s=14)
    until("they are stored", lambda: pending(world, client) == 100)
    service.stop()
    for partition in range(world.partitions):
        client.hset(f"blackbox:{{{world.requests}-{partition}}}:state", "format", "2")

    world.start_service().wait_ready()

    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict


@pytest.fixture
def cut_world(tmp_path: Path, own_redis: EmbeddedRedis, engine: str) -> Iterator[World]:
    """A world of two partitions, whose Kafka can be stopped and lose the end of its log."""
    kafka = EmbeddedKafka(tmp_path / "kafka")
    kafka.start()
    with World(kafka, own_redis, tmp_path, engine, partitions=2) as world:
        yield world
    kafka.stop()


def cut(kafka: EmbeddedKafka, topic: str, partition: int, keep: int) -> None:
    """Keep only the batches below the offset `keep`, as an unclean election does."""
    folder = kafka.folder / "data" / f"{topic}-{partition}"
    log = folder / f"{0:020d}.log"
    data, at = log.read_bytes(), 0
    while at < len(data):
        base, length = struct.unpack(">qi", data[at : at + 12])
        if base >= keep:
            break
        at += 12 + length
    log.write_bytes(data[:at])
    for pattern in ("*.index", "*.timeindex", "*.txnindex", "*.snapshot"):
        for path in folder.glob(pattern):
            path.unlink()


CUT, PER_PARTITION = 50, 100


def lose_ends(world: World) -> ServiceProcess:
    """A hundred pending requests in each partition, then fifty in Redis alone."""
    connected = redis.Redis.from_url(world.redis.url)
    service = world.start_service().wait_ready()
    for _ in range(0, PER_PARTITION, 10):
        for partition in range(world.partitions):
            world.ask(10, from_s=3000, within_s=3600, partition=partition)
    every = PER_PARTITION * world.partitions
    until("they are stored", lambda: pending(world, connected) == every)
    world.kafka.stop()
    for partition in range(world.partitions):
        cut(world.kafka, world.requests, partition, CUT)
    world.kafka.start()
    return service


def bodies_in_redis(world: World, client: Any) -> list[str]:
    """The messages of all pending requests, with repetitions."""
    found = []
    for partition in range(world.partitions):
        prefix = f"blackbox:{{{world.requests}-{partition}}}:"
        for member in client.zrange(f"{prefix}due", 0, -1):
            if member != b"~":
                stored = client.get(f"{prefix}msg:{member.decode()}")
                found.append(stored.partition(b"\n")[2].decode())
    return sorted(found)


@pytest.mark.proof
def test_a_rebind_restores_the_lost_end_of_two_partitions_from_redis(cut_world: World) -> None:
    world, client = cut_world, redis.Redis.from_url(cut_world.redis.url)
    service = lose_ends(world)
    why_not_open(service, "Kafka lost records")

    rebind(world, "deliver")

    service.wait_ready()
    until("they are stored", lambda: len(bodies_in_redis(world, client)) >= len(world.asked))
    assert bodies_in_redis(world, client) == sorted(world.asked), "each exactly once"


@pytest.mark.proof
def test_a_rebind_writes_overwritten_requests_again(cut_world: World) -> None:
    world, client = cut_world, redis.Redis.from_url(cut_world.redis.url)
    service = lose_ends(world)
    why_not_open(service, "Kafka lost records")
    write_more_requests(world)
    why_not_open(service, "is not the one that was read there")

    assert f"{CUT} written again" in rebind(world, "deliver")

    service.wait_ready()
    until("they are stored", lambda: len(bodies_in_redis(world, client)) >= len(world.asked))
    assert bodies_in_redis(world, client) == sorted(world.asked), "each exactly once"


def write_more_requests(world: World) -> None:
    """Write so many that each journal is longer than ever before."""
    world._producer = Producer({"bootstrap.servers": world.kafka.bootstrap_servers})
    for partition in range(world.partitions):
        world.ask(2 * CUT, from_s=3000, within_s=3600, partition=partition)


@pytest.mark.proof
@both_engines_at_length
def test_a_log_shortened_and_written_under_a_running_service_is_not_read_on(
    cut_world: World,
) -> None:
    world, client = cut_world, redis.Redis.from_url(cut_world.redis.url)
    service = lose_ends(world)
    write_more_requests(world)

    why_not_open(service, "is not the one that was read there")

    assert f"{CUT} written again" in rebind(world, "deliver")
    service.wait_ready()
    until("they are stored", lambda: len(bodies_in_redis(world, client)) >= len(world.asked))
    assert bodies_in_redis(world, client) == sorted(world.asked), "each exactly once"


class Interrupted(BaseException):
    """Ends a command at any point, as a kill does."""


def interrupt(monkeypatch: pytest.MonkeyPatch, world: World, at: tuple[type, str, int]) -> None:
    """Run a rebind that is killed after the nth call of a method."""
    owner, name, nth = at
    real: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(1, nth + 1))

    def called(*arguments: Any, **named: Any) -> Any:
        answer = real(*arguments, **named)
        if next(calls) == nth:
            raise Interrupted
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(leftovers, "AT_ONCE", 10)
        patched.setattr(owner, name, called)
        with pytest.raises(Interrupted):
            rebinding.rebind(world.settings(), world.requests, "deliver")


MOMENTS: dict[str, tuple[type, str, int]] = {
    "nothing is committed": (ShardWriter, "flush", 3),
    "Kafka has more than Redis knows": (ShardWriter, "commit", 2),
    "some have left the index": (ShardIndex, "settle", 1),
    "one partition is done": (ShardIndex, "rebind", 1),
}


@pytest.mark.proof
@pytest.mark.parametrize("moment", MOMENTS if AT_LENGTH else ["Kafka has more than Redis knows"])
def test_an_interrupted_rebind_is_completed_by_a_second_one(
    cut_world: World, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    world, client = cut_world, redis.Redis.from_url(cut_world.redis.url)
    service = lose_ends(world)
    why_not_open(service, "Kafka lost records")
    interrupt(monkeypatch, world, MOMENTS[moment])
    write_more_requests(world)

    why_not_open(service, f"blackbox rebind {world.requests} --pending deliver")
    done = rebind(world, "deliver")

    service.wait_ready()
    until("they are stored", lambda: len(bodies_in_redis(world, client)) >= len(world.asked))
    assert bodies_in_redis(world, client) == sorted(world.asked), "each exactly once"
    has_written = moment in ("Kafka has more than Redis knows", "some have left the index")
    assert (INTERRUPTED in done) == has_written, done


@pytest.mark.proof
def test_a_rebind_that_lost_redis_halfway_writes_nothing_twice(
    fragile_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, client = fragile_world, redis.Redis.from_url(fragile_world.redis.url)
    service = world.start_service().wait_ready()
    for partition in range(world.partitions):
        world.ask(35, from_s=3000, within_s=3600, partition=partition)
        world.ask(5, from_s=3600, within_s=3600, partition=partition)
    until("they are stored", lambda: pending(world, client) == len(world.asked))
    recreate(world, world.requests, world.partitions, service)
    why_not_open(service)
    interrupt(monkeypatch, world, (ShardWriter, "commit", 2))
    with monkeypatch.context() as patched:
        patched.setattr(ShardIndex, "discard", lambda _: (_ for _ in ()).throw(IndexLost("cut")))
        with pytest.raises(IndexLost):
            rebinding.rebind(world.settings(), world.requests, "deliver")

    assert INTERRUPTED in rebind(world, "deliver")

    service.wait_ready()
    until("they are stored", lambda: pending(world, client) >= len(world.asked))
    assert bodies_in_redis(world, client) == sorted(world.asked), "each exactly once"


def write_requests_with_ids(world: World, client: Any, key: Callable[[int], str]) -> None:
    for n in range(40):
        asked = {"topic": world.targets[0], "message": "m", "id": f"i{n}", "countdown": 3600}
        world.send_raw(json.dumps(asked), key=key(n).encode())
    world.flush()
    until("they are stored", lambda: pending(world, client) == 40)


def cancel_by_ids(world: World, key: Callable[[int], str]) -> None:
    world._producer = Producer(
        {"bootstrap.servers": world.kafka.bootstrap_servers, "partitioner": "murmur2_random"}
    )
    for n in range(40):
        world.send_raw(json.dumps({"id": f"i{n}", "cancel": True}), key=key(n).encode())
    world.flush()


@pytest.mark.proof
def test_requests_written_again_are_in_the_partitions_of_their_cancels(
    fragile_world: World,
) -> None:
    world, client = fragile_world, redis.Redis.from_url(fragile_world.redis.url)
    service = world.start_service().wait_ready()
    customer = "customer-{}".format
    write_requests_with_ids(world, client, lambda n: customer(n % 5))
    recreate(world, world.requests, world.partitions, service)
    why_not_open(service)

    rebind(world, "deliver")
    service.wait_ready()
    until("they are written again", lambda: pending(world, client) == 40)

    # by the partitioner of the caller, whose keys give the same partitions as before
    for n in range(40):
        cancel = json.dumps({"id": f"i{n}", "cancel": True})
        world.send_raw(cancel, key=customer(n % 5).encode())
    world.flush()
    until("all are cancelled", lambda: pending(world, client) == 0)


@pytest.mark.proof
@pytest.mark.parametrize("count", [3, 6] if AT_LENGTH else [3])
def test_with_another_partition_count_requests_are_in_the_partitions_of_their_ids(
    fragile_world: World, count: int
) -> None:
    world, client = fragile_world, redis.Redis.from_url(fragile_world.redis.url)
    service = world.start_service().wait_ready()
    write_requests_with_ids(world, client, "i{}".format)
    world.ask(40, from_s=3000, within_s=3600)
    until("they are stored", lambda: pending(world, client) == 80)
    recreate(world, world.requests, count, service)
    why_not_open(service)
    world.partitions = max(world.partitions, count)

    done = rebind(world, "deliver")
    service.wait_ready()

    again = [int(line.split(" written again")[0].split()[-1]) for line in done.splitlines()]
    assert sum(again) == 80
    until("they are written again", lambda: pending(world, client) == 80)
    cancel_by_ids(world, "i{}".format)
    until("those with ids are cancelled", lambda: pending(world, client) == 40)
    assert bodies_in_redis(world, client) == sorted(world.asked)
    assert "another topic" not in rebind(world, "deliver"), "each fits now"
