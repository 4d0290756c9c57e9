"""Checks whether Kafka and Redis are configured so that the guarantees hold: refusals and warnings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

from blackbox.config.settings import Settings
from blackbox.config.wiring import kafka
from blackbox.index.server import NotTold, RedisServer, Server
from blackbox.journal.topics import FOR_EVER, Described, Topics, TopicSettings, receipts_topic
from blackbox.records.clock import MAX_SKEW_MS, Clock
from blackbox.records.errors import IndexLost

MINIMUM_REDIS = (6, 2)
_DAY_MS = 86_400_000

Severity = Literal["refuse", "warn"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that breaks a guarantee (`refuse`: do not start) or weakens one (`warn`)."""

    severity: Severity
    text: str
    remedy: str

    def found(self, **values: object) -> Finding:
        """The same with these values in place of the fields in braces."""
        return Finding(self.severity, self.text.format(**values), self.remedy.format(**values))


_ALTER = "kafka-configs.sh --alter --entity-type topics --entity-name {topic} --add-config "

OLD_REDIS = Finding(
    "refuse",
    "Redis is {version}, which lacks commands that blackbox uses",
    "run Redis 6.2 or newer",
)
EVICTION = Finding(
    "refuse",
    "Redis' maxmemory-policy is {policy}: once full, it evicts pending messages",
    "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
)
NO_AOF = Finding(
    "warn",
    "Redis' append-only file is off: after a restart Redis is empty or out of date, and each shard "
    "delivers only after a rebuild from Kafka",
    "CONFIG SET appendonly yes, and the same in redis.conf",
)
TORN_AOF = Finding(
    "warn",
    "Redis' aof-load-truncated is yes: a transaction that a crash truncated can reappear out of "
    "order at a later start of Redis",
    "set aof-load-truncated no in redis.conf, and run redis-check-aof --fix before each start of "
    "Redis",
)
NO_LIMIT = Finding(
    "warn",
    "Redis has no maxmemory: blackbox cannot hold requests back in Kafka before the host runs out "
    "of memory",
    "CONFIG SET maxmemory to about 70 % of the host's memory, and the same in redis.conf",
)
CLOCKS = Finding(
    "warn",
    "the clocks of Redis and this host are {skew_ms} ms apart: the earlier one counts, so messages "
    "are late by up to this time",
    "synchronise both with NTP",
)
REDIS_SILENT = Finding(
    "warn",
    "not checked: {why}",
    "use a Redis user with permission for INFO and CONFIG GET, such as blackbox-reader, or check "
    "{what} manually",
)
ONE_NODE = Finding(
    "warn",
    "Redis is a node of a cluster: shards whose slot is on another node do not open",
    "set BLACKBOX_REDIS_URL=redis+cluster://host:port,host:port with some of its nodes",
)
NODE_SILENT = Finding(
    "warn",
    "not checked: {why}; until it answers, or another node takes over its slots, their shards stay "
    "closed",
    "restart the node, or move its slots to other nodes: redis-cli --cluster fix",
)
COMPACTED = Finding(
    "refuse",
    "{topic}: cleanup.policy is {policy}: compaction removes records that are still needed",
    _ALTER + "cleanup.policy=delete",
)
COMPACTED_LETTERS = Finding(
    "refuse",
    "{topic}: cleanup.policy is {policy}: Kafka refuses dead letters without a key, and keeps only "
    "one per key",
    _ALTER + "cleanup.policy=delete",
)
ORPHANED = Finding(
    "refuse",
    "{receipts} exists but {topic} does not: if {topic} was deleted, its old receipts would end "
    "new requests with the same offsets without delivering them",
    "delete {receipts} and, in Redis, the keys that begin with blackbox:{{{topic}-, then start; or "
    "create {topic} if it never existed",
)
FEWER_RECEIPTS = Finding(
    "warn",
    "{receipts} has {have} partitions, but {topic} has {wanted}: the service adds the missing ones "
    "when it starts, and then delivers from their shards. If {topic} has grown, a later request "
    "with an id does not replace one that is pending in the id's former partition",
    "nothing, if blackbox has Alter on {receipts}; else kafka-topics.sh --alter --topic {receipts} "
    "--partitions {wanted}. Cancel pending requests with an id over HTTP before you send the id "
    "again",
)
MORE_RECEIPTS = Finding(
    "warn",
    "{receipts} has {have} partitions, but {topic} has only {wanted}: harmless, unless {topic} was "
    "deleted and created again; then old receipts end new requests without delivering them",
    "nothing, if {topic} was never deleted; otherwise stop blackbox and delete {receipts} as well",
)
SHORT_REQUESTS = Finding(
    "refuse",
    "{topic}: retention.ms is {have}, less than {wanted}: Kafka would remove pending requests, "
    "which a loss of Redis would then lose",
    _ALTER + "retention.ms=-1; blackbox then removes requests that have ended. Or set "
    "BLACKBOX_HOT_HORIZON_S to at most half of retention.ms",
)
SHORT_RECEIPTS = Finding(
    "warn",
    "{topic}: retention.ms is {have}: Kafka may remove receipts that a rebuild needs. If Redis is then "
    "lost, requests that may have been delivered become dead letters (outcome-unknown)",
    _ALTER + "retention.ms=-1; blackbox then removes the receipts that are no longer needed",
)
LIMITED_BYTES = Finding(
    "warn",
    "{topic}: retention.bytes is {limit}: above this size Kafka removes the oldest records, "
    "whatever their age",
    _ALTER + "retention.bytes=-1",
)
CREATE_TIME = Finding(
    "warn",
    "{topic}: message.timestamp.type is {type}: a countdown starts by the sender's clock, and "
    "messages are early if that clock is slow",
    _ALTER + "message.timestamp.type=LogAppendTime",
)
UNSTAMPED_RECEIPTS = Finding(
    "warn",
    "{topic}: message.timestamp.type is {type}: receipts do not show Kafka's clock, so messages "
    "are early if the clocks of Redis and this host are both fast",
    _ALTER + "message.timestamp.type=LogAppendTime",
)
KAFKA_SILENT = Finding(
    "warn",
    "not checked: the brokers do not return {what} of {topic}: {why}",
    "grant Describe and DescribeConfigs on topic {topic}, or check manually",
)


def findings(settings: Settings) -> list[Finding]:
    """All findings about the Kafka and the Redis of these settings, refusals first.

    Changes nothing. Missing rights to read become a warning. Raises RecoveryRequired when Kafka or
    Redis does not answer.
    """
    access = kafka(settings)
    with closing(RedisServer(settings.redis_url.get_secret_value())) as redis:
        found = [*_redis_findings(redis), *_topic_findings(settings, Topics(access.admin()))]
    return sorted(found, key=lambda finding: finding.severity != "refuse")


def _redis_findings(redis: RedisServer) -> Iterator[Finding]:
    """The findings about each server; a node that does not answer is a finding, unless none answers."""
    redis.now_ms()  # raises when none answers
    for name, server in redis.each().items():
        try:
            found = list(_server_findings(server, is_node=bool(name)))
        except IndexLost as silent:
            if not name:
                raise
            found = [NODE_SILENT.found(why=silent)]
        for finding in found:
            yield replace(finding, text=f"{name}: {finding.text}") if name else finding


def _server_findings(redis: Server, *, is_node: bool) -> Iterator[Finding]:
    clock = Clock()
    clock.observe(redis.now_ms())
    yield from about_clocks(clock.skew_ms())
    try:
        told = redis.info("server") | redis.info("memory") | redis.info("persistence")
        if told.get("redis_mode") == "cluster" and not is_node:
            yield ONE_NODE.found()
        yield from about_redis(told)
    except NotTold as why:
        what = "its version, maxmemory-policy, maxmemory and appendonly"
        yield REDIS_SILENT.found(why=why, what=what)
        return
    if told.get("aof_enabled"):
        yield from _about_truncation(redis)


def _about_truncation(redis: Server) -> Iterator[Finding]:
    try:
        if redis.config("aof-load-truncated") != "no":
            yield TORN_AOF.found()
    except NotTold as why:
        yield REDIS_SILENT.found(why=why, what="aof-load-truncated")


def about_clocks(skew_ms: int) -> Iterator[Finding]:
    if abs(skew_ms) > MAX_SKEW_MS:
        yield CLOCKS.found(skew_ms=abs(skew_ms))


def about_redis(told: Mapping[str, Any]) -> Iterator[Finding]:
    """The findings in Redis' INFO; a missing field is a warning."""
    for field in ("redis_version", "maxmemory_policy", "maxmemory", "aof_enabled"):
        if field not in told:
            yield REDIS_SILENT.found(why=f"Redis' INFO has no {field}", what=field)
    version = str(told.get("redis_version", "6.2"))
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < MINIMUM_REDIS:
        yield OLD_REDIS.found(version=version)
    policy = told.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield EVICTION.found(policy=policy)
    if told.get("aof_enabled", 1) == 0:
        yield NO_AOF.found()
    if told.get("maxmemory", 1) == 0:
        yield NO_LIMIT.found()


def _topic_findings(settings: Settings, topics: Topics) -> Iterator[Finding]:
    requests = list(settings.topics)
    ours = [*requests, *map(receipts_topic, requests), settings.dead_letter_topic]
    described = topics.describe(ours)
    yield from _untold(described)
    for topic in requests:
        yield from _about_partitions(topic, described)
        yield from about_journals(
            topic,
            _told(described),
            settings.kept_ms_of(topic),
            is_schedule=topic in settings.schedule_topics,
        )
    letters = _told(described).get(settings.dead_letter_topic)
    if letters is not None and _is_compacted(letters):
        yield COMPACTED_LETTERS.found(
            topic=settings.dead_letter_topic, policy=letters.cleanup_policy
        )


def _untold(described: Mapping[str, Described]) -> Iterator[Finding]:
    for topic, found in described.items():
        if isinstance(found.settings, str):
            what = "anything" if found.partitions is None else "the settings"
            yield KAFKA_SILENT.found(topic=topic, what=what, why=found.settings)


def _told(described: Mapping[str, Described]) -> dict[str, TopicSettings]:
    return {
        topic: found.settings
        for topic, found in described.items()
        if isinstance(found.settings, TopicSettings)
    }


def _about_partitions(topic: str, described: Mapping[str, Described]) -> Iterator[Finding]:
    receipts = receipts_topic(topic)
    if receipts not in described:
        return
    if topic not in described:
        yield ORPHANED.found(topic=topic, receipts=receipts)
        return
    have, wanted = described[receipts].partitions, described[topic].partitions
    if have is None or wanted is None or have == wanted:
        return
    kind = FEWER_RECEIPTS if have < wanted else MORE_RECEIPTS
    yield kind.found(topic=topic, receipts=receipts, have=have, wanted=wanted)


def about_journals(
    topic: str, told: Mapping[str, TopicSettings], needed_ms: int, *, is_schedule: bool = False
) -> Iterator[Finding]:
    """The findings in the settings of a request topic and its receipts, as far as they are known.

    A topic of schedules may be compacted, as a later schedule ends an earlier one of the same key; and
    its due times are not countdowns.
    """
    requests, receipts = told.get(topic), told.get(receipts_topic(topic))
    # Schedules may be due at any time, so no retention is certainly long enough.
    too_short = replace(SHORT_REQUESTS, severity="warn") if is_schedule else SHORT_REQUESTS
    if requests is not None:
        yield from _about_journal(
            topic, requests, too_short, needed_ms, may_be_compacted=is_schedule
        )
        if requests.timestamp_type != "LogAppendTime" and not is_schedule:
            yield CREATE_TIME.found(topic=topic, type=requests.timestamp_type)
    if receipts is not None:
        name, stamped_by = receipts_topic(topic), receipts.timestamp_type
        yield from _about_journal(name, receipts, SHORT_RECEIPTS, FOR_EVER)
        if stamped_by != "LogAppendTime":
            yield UNSTAMPED_RECEIPTS.found(topic=name, type=stamped_by)


def _about_journal(
    topic: str,
    settings: TopicSettings,
    too_short: Finding,
    wanted_ms: int,
    *,
    may_be_compacted: bool = False,
) -> Iterator[Finding]:
    if _is_compacted(settings) and not may_be_compacted:
        yield COMPACTED.found(topic=topic, policy=settings.cleanup_policy)
    have_ms = settings.retention_ms
    if have_ms != FOR_EVER and (wanted_ms == FOR_EVER or have_ms < wanted_ms):
        yield too_short.found(
            topic=topic, have=_days(have_ms), wanted=_days(wanted_ms), wanted_ms=wanted_ms
        )
    if settings.retention_bytes != FOR_EVER:
        yield LIMITED_BYTES.found(topic=topic, limit=settings.retention_bytes)


def _is_compacted(settings: TopicSettings) -> bool:
    return "compact" in settings.cleanup_policy


def _days(duration_ms: int) -> str:
    if duration_ms == FOR_EVER:
        return "-1 (for ever)"
    return f"{duration_ms} ({duration_ms / _DAY_MS:.3g} days)"
