"""Failures, how they are reported, and their effect on others: the table in docs/guarantees.md.

With BLACKBOX_TEST_AT_LENGTH=1 every row on both engines; `-rP` shows the rows as the page has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import redis
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from blackbox.admin.admin import Admin
from blackbox.embedded import EmbeddedError, EmbeddedRedis
from blackbox.journal.own_topics import UNLIMITED_RETENTION
from blackbox.journal.topics import receipts_topic
from tests.conftest import missing
from tests.servers.two_brokers import PlacedWorld, TwoBrokers
from tests.support.raw_record import DISTANT, SILENT, write_raw
from tests.support.unreadable_batch import write_unreadable_batch
from tests.support.world import AT_LENGTH, ServiceProcess, World, both_engines_at_length, until

pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]

REDIS_MB = 100
FAR_BYTES = 12_500
"""Bytes of Redis for each of the requests that fill it."""

FULL = 0.8
"""The share of Redis that is filled with requests due in a day."""

OTHERS, OTHERS_S = (3000, 6) if AT_LENGTH else (1000, 3)
MUCH = 20_000 if AT_LENGTH else 3000
TROUBLED = 0
"""The partition with the failure; requests of others are in the next ones."""

FROM_S = 2.0
"""Shorter countdowns are late by the duration of intake."""

MOST_MS, MOST = 250, 1.5
"""Limits of the others' lateness (p99): in ms, or as a multiple of the lateness without a failure."""

TRIES = 3
"""Retries, because a busy machine is not a failure of the product."""


@dataclass
class Scene:
    """A service, a second request topic beside that of the others, and transactions open until the end."""

    world: World
    brokers: TwoBrokers
    service: ServiceProcess
    open: list[Producer] = field(default_factory=list)
    forbidden: list[AclBinding] = field(default_factory=list)
    far: int = 0
    """Requests that are due in a day."""

    def __post_init__(self) -> None:
        self.admin = AdminClient({"bootstrap.servers": self.world.kafka.bootstrap_servers})

    @property
    def second(self) -> str:
        return f"{self.world.name}.second"

    def target(self, name: str, config: dict[str, str] | None = None, *, broker: int = 1) -> str:
        topic = f"{self.world.name}.{name}"
        with suppress(KafkaException):  # from an earlier try
            self.world.create(
                NewTopic(topic, 1, replica_assignment=[[broker]], config=config or {})
            )
        return topic

    def forbid(self, operation: AclOperation, topic: str) -> None:
        binding = AclBinding(
            ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*",
            operation, AclPermissionType.DENY,
        )  # fmt: skip
        [done] = self.admin.create_acls([binding]).values()
        done.result(10)
        if binding not in self.forbidden:  # a second try causes the failure again
            self.forbidden.append(binding)

    def allow_everything(self) -> None:
        these = [
            AclBindingFilter(
                one.restype, one.name, one.resource_pattern_type, one.principal, one.host,
                one.operation, one.permission_type,
            )
            for one in self.forbidden
        ]  # fmt: skip
        for done in self.admin.delete_acls(these).values() if these else ():
            done.result(10)

    def ask(
        self, count: int, topic: str, caller: str = "noisy", within_s: float = 0, **more: object
    ) -> None:
        for number in range(count):
            request = {"topic": topic, "message": "m" * 100, "countdown": within_s * number / count}
            headers = [("CALLER_SERVICE", caller)]
            self.world.send_raw(json.dumps(request | more), headers, partition=TROUBLED)

    def delete(self, topic: str) -> None:
        with suppress(KafkaException):  # by an earlier try
            [deleted] = self.admin.delete_topics([topic]).values()
            deleted.result()

    def opened(self) -> float:
        """How often the others' shards were opened."""
        name = f'blackbox_recoveries_total{{shard="{self.world.requests}-'
        others = range(TROUBLED + 1, self.world.partitions)
        return sum(self.service.metric(f'{name}{partition}"') for partition in others)


@dataclass(frozen=True)
class Trouble:
    """`names` are a metric above zero and words of the log that report it; only one of them if `is_either`."""

    what: str
    make: Callable[[Scene], None]
    who: str
    names: tuple[str, str]
    is_either: bool = False


def target_missing(scene: Scene) -> None:
    scene.ask(MUCH // 10, f"{scene.world.name}.nowhere")


def target_deleted(scene: Scene) -> None:
    doomed = scene.target("doomed")
    scene.ask(MUCH // 10, doomed, within_s=OTHERS_S)
    scene.world.flush()
    scene.delete(doomed)


def target_refuses(scene: Scene) -> None:
    scene.ask(MUCH // 10, scene.target("compacted", {"cleanup.policy": "compact"}))


def target_too_small(scene: Scene) -> None:
    scene.ask(MUCH // 10, scene.target("small", {"max.message.bytes": "150"}))


def target_paused(scene: Scene) -> None:
    paused = scene.target("paused")
    admin = Admin(scene.world.settings())
    admin.pause(paused)
    admin.close()
    scene.ask(MUCH, paused)


def target_forbidden(scene: Scene) -> None:
    forbidden = scene.target("forbidden")
    scene.forbid(AclOperation.WRITE, forbidden)
    scene.ask(MUCH // 10, forbidden, within_s=OTHERS_S)


def target_unreadable(scene: Scene) -> None:
    unreadable = scene.target("unreadable")
    scene.forbid(AclOperation.READ, unreadable)
    scene.ask(MUCH // 10, unreadable, within_s=OTHERS_S)


def target_without_leader(scene: Scene) -> None:
    away = scene.target("away", broker=2)
    scene.brokers.second.stop()
    scene.ask(MUCH, away)


def target_silent(scene: Scene) -> None:
    silent = scene.target("silent", broker=2)
    scene.brokers.freeze()
    scene.ask(MUCH // 10, silent, within_s=OTHERS_S)


def second_topic_shortened(scene: Scene) -> None:
    producer = Producer({"bootstrap.servers": scene.world.kafka.bootstrap_servers})
    later = {"topic": scene.target("busy"), "message": "m", "countdown": 3600}
    for _ in range(MUCH // 10):
        producer.produce(scene.second, json.dumps(later), partition=0)
    assert producer.flush(10) == 0
    everything = TopicPartition(scene.second, 0, -1)
    [done] = scene.admin.delete_records([everything]).values()
    done.result(10)


def second_topic_without_leader(scene: Scene) -> None:
    scene.brokers.second.stop()


def second_topic_forbidden(scene: Scene) -> None:
    scene.forbid(AclOperation.READ, scene.second)


def is_pending(service: ServiceProcess, count: int) -> bool:
    return service.metric("blackbox_pending") >= count


def redis_nearly_full(scene: Scene) -> None:
    """Filled by requests due later, and then by new ones: intake pauses at 85 %, and continues below."""
    client = redis.Redis.from_url(scene.world.redis.url)
    far = {"topic": scene.target("far"), "message": "f" * 10_000, "countdown": 86_400}
    full_bytes = int(FULL * REDIS_MB * 2**20)
    while (left := full_bytes - client.info("memory")["used_memory"]) > 0:
        count = left // FAR_BYTES + 1
        for number in range(count):
            scene.world.send_raw(json.dumps(far), partition=number % scene.world.partitions)
        scene.world.flush()
        scene.far += count
        until("they are stored", partial(is_pending, scene.service, scene.far))
    scene.ask(MUCH // 10, scene.target("busy"), within_s=OTHERS_S)


def second_topic_deleted(scene: Scene) -> None:
    scene.delete(scene.second)


def transaction_open(scene: Scene) -> None:
    settings = {"bootstrap.servers": scene.world.kafka.bootstrap_servers, "log_level": 0}
    producer = Producer(settings | {"transactional.id": f"{scene.world.name}.{len(scene.open)}"})
    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce(scene.world.requests, "{}", partition=TROUBLED)
    assert producer.flush(10) == 0
    scene.open.append(producer)


def flood(scene: Scene) -> None:
    scene.ask(MUCH, scene.target("busy"))


def garbage(scene: Scene) -> None:
    for _ in range(MUCH):
        scene.world.send_raw("{" * 2000, [("CALLER_SERVICE", "noisy")], partition=TROUBLED)


def unreadable_batches(scene: Scene) -> None:
    world = scene.world
    for _ in range(5):
        write_unreadable_batch(world.kafka.bootstrap_servers, world.requests, 3, TROUBLED)


def hand_made_batches(scene: Scene) -> None:
    world = scene.world
    for _ in range(5):
        records = [SILENT, DISTANT, SILENT]
        write_raw(world.kafka.bootstrap_servers, world.requests, records, TROUBLED)


def over_quota(scene: Scene) -> None:
    scene.ask(MUCH, scene.target("busy"), caller="hoarder")


def cancels(scene: Scene) -> None:
    for number in range(MUCH):
        cancel = json.dumps({"id": f"c{number}", "cancel": True})
        scene.world.send_raw(cancel, [("CALLER_SERVICE", "noisy")], partition=TROUBLED)


def letters_missing(scene: Scene) -> None:
    scene.delete(scene.world.dead_letters)
    for _ in range(MUCH // 10):
        scene.world.send_raw("{", [("CALLER_SERVICE", "noisy")], partition=TROUBLED)


NOISY = "the caller: dead letters"
TROUBLES = (
    Trouble("a target is missing", target_missing, NOISY, ("blackbox_postponed_total", "")),
    Trouble("a target is deleted under load", target_deleted, NOISY, ("blackbox_postponed_total", "")),
    Trouble("a target refuses messages without a key", target_refuses, NOISY, ("blackbox_dead_total", "")),
    Trouble("a target takes small messages only", target_too_small, NOISY, ("blackbox_dead_total", "")),
    Trouble("a target is paused", target_paused, "requests for that target", ("blackbox_postponed_total", "")),
    Trouble("a target is forbidden", target_forbidden, NOISY, ("blackbox_dead_total", "")),
    Trouble("a target cannot be read", target_unreadable, "none", ("", "")),
    Trouble("a target has no leader", target_without_leader, "requests for that target",
            ("blackbox_postponed_total", "")),
    Trouble("a target's broker hangs", target_silent,
            "the shards that deliver there, until Kafka detects that the broker is gone; requests for that target",
            ("blackbox_postponed_total", "could not be written, the transaction was aborted"), is_either=True),
    Trouble("another request topic is deleted", second_topic_deleted, "its callers",
            ("", "second")),
    Trouble("another request topic is shortened", second_topic_shortened, "its callers", ("", "")),
    Trouble("another request topic has no leader", second_topic_without_leader, "its callers",
            ("", "second")),
    Trouble("another request topic is forbidden", second_topic_forbidden, "its callers",
            ("", "second")),
    Trouble("a caller's transaction stays open", transaction_open, "callers that write to that partition",
            ("blackbox_hidden_records", "")),
    Trouble("a caller requests 20,000 messages at once", flood, "the caller", ("blackbox_delivered_by_target_total", "")),
    Trouble("a caller writes garbage", garbage, NOISY, ("blackbox_dead_total", "")),
    Trouble("a caller writes batches that cannot be read", unreadable_batches,
            "callers that write to that partition; the caller: dead letters",
            ("blackbox_dead_total", "")),
    Trouble("a caller assembles record batches that clients misread", hand_made_batches,
            "callers that write to that partition; the caller: dead letters",
            ("blackbox_dead_total", "")),
    Trouble("a caller is over its quota", over_quota, NOISY, ("blackbox_refused_total", "")),
    Trouble("a caller cancels 20,000 requests", cancels, "none", ("", "")),
    Trouble("the dead-letter topic is missing", letters_missing, "readers of dead letters",
            ("blackbox_pending", "dead letters stay pending")),
    Trouble("Redis is 80 % full", redis_nearly_full, "none", ("blackbox_pending", "")),
)  # fmt: skip
OFTEN = {target_deleted, target_too_small, garbage, over_quota}
ROWS = [
    pytest.param(row, marks=pytest.mark.proof if row.make != garbage else ())
    for row in TROUBLES
    if AT_LENGTH or row.make in OFTEN
]


def p99_ms(scene: Scene, make: Callable[[Scene], None]) -> int:
    """p99 of the others' lateness during this failure. Their requests are delivered once, and not early."""
    world, before = scene.world, len(scene.world.asked)
    make(scene)
    for partition in range(TROUBLED + 1, world.partitions):
        share = OTHERS // (world.partitions - 1)
        world.ask(share, from_s=FROM_S, within_s=FROM_S + OTHERS_S, partition=partition)
    world.wait_delivered(120)
    verdict = world.verdict(late_from=before)
    assert (verdict.lost, verdict.duplicated, verdict.early_ms) == ([], [], []), verdict
    return verdict.late_at(0.99)


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoBrokers]:
    brokers = TwoBrokers(tmp_path_factory.mktemp("brokers"))
    try:
        brokers.start(both=AT_LENGTH)
    except EmbeddedError as error:
        missing(str(error))
    yield brokers
    brokers.stop()


@pytest.fixture(scope="module")
def small_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(
        tmp_path_factory.mktemp("redis"), settings={"maxmemory": f"{REDIS_MB}mb"}
    )
    server.start()
    yield server
    server.stop()


@pytest.fixture
def scene(
    brokers: TwoBrokers, small_redis: EmbeddedRedis, tmp_path: Path, engine: str
) -> Iterator[Scene]:
    rules = tmp_path / "callers.toml"
    rules.write_text("[callers.hoarder]\nrequests_per_second = 5\n")
    with PlacedWorld(brokers.first, small_redis, tmp_path, engine) as world:
        second, place = f"{world.name}.second", [[2 if AT_LENGTH else 1]] * 2
        world.create(
            NewTopic(receipts_topic(world.requests), world.partitions, config=UNLIMITED_RETENTION),
            NewTopic(second, 2, replica_assignment=place),
            NewTopic(
                receipts_topic(second), 2, replica_assignment=place, config=UNLIMITED_RETENTION
            ),
        )
        topics = f"{world.requests}:countdown,{second}:countdown"
        service = world.start_service(request_topics=topics, callers_file=rules, retries=1)
        scene = Scene(world, brokers, service.wait_ready())
        yield scene
    brokers.mend()
    scene.allow_everything()
    redis.Redis.from_url(small_redis.url).flushall()


@both_engines_at_length
@pytest.mark.alone
@pytest.mark.parametrize("trouble", ROWS, ids=lambda trouble: trouble.what.replace(" ", "-"))
def test_a_failure_hardly_delays_other_targets_and_topics(scene: Scene, trouble: Trouble) -> None:
    p99_ms(scene, lambda _: None)  # warm-up
    calm = p99_ms(scene, lambda _: None)
    most, opened = max(MOST_MS, int(MOST * calm)), scene.opened()
    seen: list[int] = []
    while len(seen) < TRIES and min(seen, default=most + 1) > most:
        seen.append(p99_ms(scene, trouble.make))
    metric, words = trouble.names
    ways = [
        *([lambda: scene.service.metric(metric) > 0] if metric else ()),
        *([lambda: words in scene.service.log.read_text()] if words else ()),
    ]
    enough = any if trouble.is_either else all
    until(f"{metric} and the log tell of it", lambda: enough(told() for told in ways))
    if scene.world.engine == "process":  # each new window of Spark opens its shards
        assert scene.opened() == opened >= scene.world.partitions - 1
    for producer in scene.open:
        producer.abort_transaction(10)

    print(
        f"| {trouble.what} | {trouble.who} | {scene.world.engine}: {calm} → {min(seen)} ms "
        f"| {f'`{metric}`' if metric else 'none'} | {words or 'none'} |"
    )
    assert min(seen) <= most, (calm, seen)
