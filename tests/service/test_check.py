"""The findings of `blackbox check` and of every start on a real Kafka and a real Redis."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from blackbox.config import check
from blackbox.config.check import FINDINGS, Finding, finding, findings
from blackbox.config.settings import Settings, load
from blackbox.config.wiring import kafka, own_topics
from blackbox.embedded import EmbeddedKafka, EmbeddedRedis, EmbeddedStack
from blackbox.embedded.tcp_ports import free_port
from blackbox.journal.topics import Topics, TopicSettings, receipts_topic
from blackbox.records.errors import IndexLost, JournalLost
from tests.support.world import until

pytestmark = pytest.mark.service

DOCS = Path(__file__).parents[2] / "docs"
SOUND = {"maxmemory": "1gb", "aof-load-truncated": "no"}
NEEDED_MS = 2 * 86_400_000
"""Twice the horizon."""


@pytest.fixture(scope="module")
def sound_redis(
    stack: EmbeddedStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedRedis]:
    """A Redis without findings."""
    redis = EmbeddedRedis(tmp_path_factory.mktemp("sound"), settings=SOUND)
    redis.start()
    yield redis
    redis.stop()


@pytest.fixture
def start_redis(stack: EmbeddedStack, tmp_path: Path) -> Iterator[Callable[..., EmbeddedRedis]]:
    """Starts a Redis that differs from the sound one in some directives."""
    started: list[EmbeddedRedis] = []

    def start(settings: Mapping[str, str]) -> EmbeddedRedis:
        started.append(EmbeddedRedis(tmp_path / "redis", settings=SOUND | dict(settings)))
        started[0].start()
        return started[0]

    yield start
    for redis in started:
        redis.stop()


@pytest.fixture
def settings(stack: EmbeddedStack, sound_redis: EmbeddedRedis) -> Settings:
    """A sound Redis, and topics that do not exist yet."""
    return settings_for(stack.bootstrap_servers, sound_redis.url)


def settings_for(servers: str, redis_url: str) -> Settings:
    name = f"c{uuid4().hex[:8]}"
    return load(
        kafka_bootstrap_servers=servers,
        redis_url=redis_url,
        request_topics=f"{name}.TB:countdown",
        dead_letter_topic=f"{name}.dead",
        group_id=name,
    )


def with_redis(settings: Settings, url: str) -> Settings:
    return load(**settings.model_dump() | {"redis_url": url})


def request_topic(settings: Settings) -> str:
    return next(iter(settings.topics))


def create(settings: Settings, name: str, partitions: int = 4, **more: str) -> None:
    """A topic as the service would create it, except for the given settings (`retention_ms="1"`)."""
    config = {
        "retention.ms": "-1",
        "message.timestamp.type": "LogAppendTime",
    } | {key.replace("_", "."): value for key, value in more.items()}
    admin = AdminClient({"bootstrap.servers": settings.kafka_bootstrap_servers})
    admin.create_topics([NewTopic(name, partitions, config=config)])[name].result()
    wait_for(admin, [name])


def ensure(settings: Settings) -> None:
    """Create or extend the topics, as a start does."""
    admin = AdminClient({"bootstrap.servers": settings.kafka_bootstrap_servers})
    ours = [*settings.topics, settings.dead_letter_topic]
    own_topics(settings, kafka(settings)).ensure()
    wait_for(admin, [*ours, receipts_topic(ours[0])])


def wait_for(admin: AdminClient, topics: list[str]) -> None:
    """The broker reports a new topic a moment after the controller has created it."""
    until("the topics are reported", lambda: Topics(admin).describe(topics).keys() == set(topics))


def test_check_finds_nothing_before_the_first_start(settings: Settings) -> None:
    assert findings(settings) == []


def test_check_finds_nothing_in_topics_that_the_service_created(settings: Settings) -> None:
    ensure(settings)
    assert findings(settings) == []


@pytest.mark.parametrize(
    ("directives", "found"),
    [
        ({"maxmemory-policy": "allkeys-lru"}, finding("eviction", policy="allkeys-lru")),
        ({"maxmemory-policy": "volatile-ttl"}, finding("eviction", policy="volatile-ttl")),
        ({"appendonly": "no"}, finding("no_aof")),
        ({"aof-load-truncated": "yes"}, finding("torn_aof")),
        ({"maxmemory": "0"}, finding("no_limit")),
    ],
)
def test_a_redis_setting_that_weakens_a_guarantee_is_found(
    settings: Settings,
    start_redis: Callable[..., EmbeddedRedis],
    directives: Mapping[str, str],
    found: Finding,
) -> None:
    redis = start_redis(directives)
    assert findings(with_redis(settings, redis.url)) == [found]


@pytest.mark.parametrize("told", [True, False], ids=["without CONFIG", "without INFO"])
def test_a_redis_setting_that_cannot_be_read_is_a_warning(
    settings: Settings, start_redis: Callable[..., EmbeddedRedis], told: bool
) -> None:
    denied = "-config" if told else "-info"
    redis = start_redis({"user": f"limited on >pw ~* +@all {denied}"})
    url = redis.url.replace("redis://", "redis://limited:pw@")
    (found,) = findings(with_redis(settings, url))
    assert found.severity == "warn"
    command = "CONFIG GET aof-load-truncated" if told else "INFO server"
    assert found.text.startswith(f"not checked: Redis refuses {command}: ")
    assert "no permissions" in found.text


@pytest.mark.parametrize("which", ["requests", "receipts", "letters"])
@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_a_compacted_topic_is_refused(settings: Settings, which: str, policy: str) -> None:
    names = {
        "requests": request_topic(settings),
        "receipts": receipts_topic(request_topic(settings)),
        "letters": settings.dead_letter_topic,
    }
    for part in names:
        create(settings, names[part], cleanup_policy=policy if part == which else "delete")
    kind = "compacted_letters" if which == "letters" else "compacted"
    assert findings(settings) == [finding(kind, topic=names[which], policy=policy)]


def test_a_compacted_dead_letter_topic_refuses_dead_letters_without_a_key(
    settings: Settings,
) -> None:
    create(settings, settings.dead_letter_topic, cleanup_policy="compact")
    producer = Producer({"bootstrap.servers": settings.kafka_bootstrap_servers})
    failed: list[str] = []
    producer.produce(
        settings.dead_letter_topic,
        b"letter",
        on_delivery=lambda error, _: failed.append(str(error)),
    )
    assert producer.flush(10) == 0
    assert "INVALID_RECORD" in failed[0]


@pytest.mark.parametrize(
    ("horizon_s", "wanted"),
    [(400_000, "800000000 (9.26 days)"), (0, "35164800000 (407 days)")],
)
def test_a_request_topic_with_a_short_retention_is_refused(
    settings: Settings, horizon_s: int, wanted: str
) -> None:
    topic = request_topic(settings)
    create(settings, topic, retention_ms="604800000")
    assert findings(settings) == []
    far = load(**settings.model_dump() | {"hot_horizon_s": horizon_s})
    assert findings(far) == [
        finding("short_requests", topic=topic, have="604800000 (7 days)", wanted=wanted)
    ]


def test_receipts_that_kafka_removes_by_their_age_are_found(settings: Settings) -> None:
    topic = request_topic(settings)
    create(settings, topic)
    create(settings, receipts_topic(topic), retention_ms="35164800000")
    assert findings(settings) == [
        finding("short_receipts", topic=receipts_topic(topic), have="35164800000 (407 days)")
    ]


def test_a_receipts_topic_that_refuses_large_receipts_is_refused(settings: Settings) -> None:
    topic = request_topic(settings)
    create(settings, topic, max_message_bytes="1000")
    create(settings, receipts_topic(topic), max_message_bytes="999999")
    assert findings(settings) == [
        finding("small_receipts", topic=receipts_topic(topic), have=999_999, wanted=1_000_000)
    ]


def test_topics_limited_in_bytes_are_found(settings: Settings) -> None:
    topic = request_topic(settings)
    create(settings, topic, retention_bytes="1000000")
    create(settings, receipts_topic(topic), retention_bytes="2000000")
    assert findings(settings) == [
        finding("limited_bytes", topic=topic, limit=1_000_000),
        finding("limited_bytes", topic=receipts_topic(topic), limit=2_000_000),
    ]


def test_a_request_topic_with_timestamps_of_callers_is_found(settings: Settings) -> None:
    topic = request_topic(settings)
    create(settings, topic, message_timestamp_type="CreateTime")
    assert findings(settings) == [finding("create_time", topic=topic, type="CreateTime")]


@pytest.mark.parametrize(("partitions", "kind"), [(2, "fewer_receipts"), (8, "more_receipts")])
def test_a_different_partition_count_of_receipts_is_found(
    settings: Settings, partitions: int, kind: str
) -> None:
    topic = request_topic(settings)
    receipts = receipts_topic(topic)
    create(settings, topic, partitions=4)
    create(settings, receipts, partitions=partitions)
    found = finding(kind, topic=topic, receipts=receipts, have=partitions, wanted=4)
    assert findings(settings) == [found]


def test_a_start_adds_missing_partitions_of_receipts(settings: Settings) -> None:
    create(settings, receipts_topic(request_topic(settings)), partitions=2)
    create(settings, request_topic(settings), partitions=4)
    ensure(settings)
    until("the new partitions are reported", lambda: findings(settings) == [])


def test_receipts_without_their_request_topic_are_refused(settings: Settings) -> None:
    topic = request_topic(settings)
    create(settings, receipts_topic(topic))
    found = findings(settings)
    assert found == [finding("orphaned", topic=topic, receipts=receipts_topic(topic))]
    assert f"blackbox rebind {topic} --pending deliver" in found[0].remedy


def test_refusals_are_listed_first(
    settings: Settings, start_redis: Callable[..., EmbeddedRedis]
) -> None:
    create(settings, request_topic(settings), cleanup_policy="compact")
    redis = start_redis({"maxmemory": "0", "appendonly": "no", "maxmemory-policy": "allkeys-lfu"})
    found = [finding.severity for finding in findings(with_redis(settings, redis.url))]
    assert found == ["refuse", "refuse", "warn", "warn"]


def test_check_fails_if_kafka_does_not_answer(settings: Settings) -> None:
    silent = f"127.0.0.1:{free_port()}"
    with pytest.raises(JournalLost, match="cannot describe the topic"):
        findings(load(**settings.model_dump() | {"kafka_bootstrap_servers": silent}))


def test_an_inspector_fails_if_redis_does_not_answer(settings: Settings) -> None:
    with pytest.raises(IndexLost, match="Redis does not answer TIME"):
        findings(with_redis(settings, f"redis://127.0.0.1:{free_port()}/0"))


@pytest.fixture(scope="module")
def guarded_kafka(
    stack: EmbeddedStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedKafka]:
    """A broker with ACLs (everything without an ACL is allowed) that creates any topic that a client asks for."""
    kafka = EmbeddedKafka(
        tmp_path_factory.mktemp("guarded"),
        settings={
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
            "auto.create.topics.enable": "true",
        },
    )
    kafka.start()
    yield kafka
    kafka.stop()


def deny(settings: Settings, topic: str, operation: AclOperation) -> None:
    admin = AdminClient({"bootstrap.servers": settings.kafka_bootstrap_servers})
    for permitted, kind in ((AclOperation.ALL, "ALLOW"), (operation, "DENY")):
        binding = AclBinding(
            ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*",
            permitted, AclPermissionType[kind],
        )  # fmt: skip
        admin.create_acls([binding])[binding].result()


def test_topic_settings_without_permission_to_read_are_a_warning(
    guarded_kafka: EmbeddedKafka, sound_redis: EmbeddedRedis
) -> None:
    settings = settings_for(guarded_kafka.bootstrap_servers, sound_redis.url)
    topic = request_topic(settings)
    create(settings, topic)
    deny(settings, topic, AclOperation.DESCRIBE_CONFIGS)
    why = "Topic authorization failed."
    wanted = finding("kafka_silent", topic=topic, what="the settings", why=why)
    until("the ACL is in force", lambda: findings(settings) == [wanted])


def test_a_topic_without_permission_to_describe_is_a_warning(
    guarded_kafka: EmbeddedKafka, sound_redis: EmbeddedRedis
) -> None:
    settings = settings_for(guarded_kafka.bootstrap_servers, sound_redis.url)
    topic = request_topic(settings)
    create(settings, topic)
    create(settings, receipts_topic(topic))
    deny(settings, topic, AclOperation.DESCRIBE)

    def severities() -> list[tuple[str, bool]]:
        return [
            (f.severity, f"do not return anything of {topic}: " in f.text)
            for f in findings(settings)
        ]

    until("the ACL is in force", lambda: severities() == [("warn", True)])


def test_checking_creates_no_topic(
    guarded_kafka: EmbeddedKafka, sound_redis: EmbeddedRedis
) -> None:
    settings = settings_for(guarded_kafka.bootstrap_servers, sound_redis.url)
    findings(settings)
    created_later = f"{settings.group_id}.later"
    create(settings, created_later)
    admin = AdminClient({"bootstrap.servers": settings.kafka_bootstrap_servers})
    ours = {name for name in admin.list_topics().topics if name.startswith(settings.group_id)}
    assert ours == {created_later}


@pytest.mark.parametrize(
    ("skew_ms", "found"),
    [(0, []), (1000, []), (-1000, []), (1001, ["1001"]), (-90_000, ["90000"])],
)
def test_clocks_more_than_a_second_apart_are_found(skew_ms: int, found: list[str]) -> None:
    assert list(check.clock_findings(skew_ms)) == [finding("clocks", skew_ms=ms) for ms in found]


SOUND_INFO = {
    "redis_version": "7.0.15",
    "maxmemory_policy": "noeviction",
    "maxmemory": 1_000_000,
    "aof_enabled": 1,
}


@pytest.mark.parametrize("version", ["6.2.0", "6.2.912183", "7.0.15", "8.2.3", "10.0"])
def test_a_redis_that_is_new_enough_is_accepted(version: str) -> None:
    assert list(check.info_findings(SOUND_INFO | {"redis_version": version})) == []


@pytest.mark.parametrize("version", ["5.0.14", "6.0.16", "6.1.240"])
def test_a_redis_that_is_too_old_is_refused(version: str) -> None:
    found = list(check.info_findings(SOUND_INFO | {"redis_version": version}))
    assert found == [finding("old_redis", version=version)]


@pytest.mark.parametrize("field", SOUND_INFO)
def test_a_field_that_redis_does_not_have_is_a_warning(field: str) -> None:
    told = {name: value for name, value in SOUND_INFO.items() if name != field}
    (found,) = check.info_findings(told)
    assert (found.severity, found.text) == ("warn", f"not checked: Redis' INFO has no {field}")


def journal(retention_ms: int) -> TopicSettings:
    return TopicSettings(retention_ms, -1, "delete", "LogAppendTime", 1_048_588)


@pytest.mark.parametrize(
    ("requests_ms", "receipts_ms", "too_short"),
    [
        (-1, -1, []),
        (NEEDED_MS, -1, []),
        (NEEDED_MS + 1, -1, []),
        (NEEDED_MS - 1, -1, ["TB"]),
        (0, -1, ["TB"]),
        (-1, NEEDED_MS, ["TB.receipts"]),
        (-1, 10**12, ["TB.receipts"]),
        (NEEDED_MS - 1, 0, ["TB", "TB.receipts"]),
    ],
)
def test_a_retention_shorter_than_two_horizons_or_of_receipts_is_found(
    requests_ms: int, receipts_ms: int, too_short: list[str]
) -> None:
    told = {"TB": journal(requests_ms), "TB.receipts": journal(receipts_ms)}
    found = check.journal_findings("TB", told, NEEDED_MS)
    assert [finding.text.partition(":")[0] for finding in found] == too_short


def test_schedules_may_be_compacted_and_their_receipts_must_not_expire() -> None:
    compacted = journal(-1)._replace(cleanup_policy="compact", timestamp_type="CreateTime")
    told = {"TB": compacted, "TB.receipts": journal(-1)}
    assert list(check.journal_findings("TB", told, NEEDED_MS, is_schedule=True)) == []
    told["TB.receipts"] = journal(NEEDED_MS)
    [found] = check.journal_findings("TB", told, NEEDED_MS, is_schedule=True)
    assert "TB.receipts: retention.ms" in found.text


def test_every_finding_is_on_its_page_with_its_remedy() -> None:
    rows = re.findall(r"^\| (refuse|warn) \| (.*?) \| (.*?) \|$", page("check"), re.MULTILINE)
    kinds = FINDINGS.values()
    assert rows == [(kind.severity, capital(kind.text), capital(kind.remedy)) for kind in kinds]


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def capital(text: str) -> str:
    """`{topic}: …` as on the page: `TOPIC: …`."""

    class Capitals(defaultdict[str, str]):
        def __missing__(self, name: str) -> str:
            return name.upper()

    return text.format_map(Capitals())
