"""Checks whether Kafka and Redis are configured so that the guarantees hold: refusals and warnings."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from blackbox.config.settings import Settings
from blackbox.config.wiring import kafka
from blackbox.index.redis_servers import NotAnswered, RedisNode, RedisServers
from blackbox.journal.topics import FOR_EVER, Described, Topics, TopicSettings, receipts_topic
from blackbox.records.clock import MAX_SKEW_MS, Clock
from blackbox.records.errors import IndexLost
from blackbox.records.receipt import RECEIPTS_TOPIC_BYTES

MINIMUM_REDIS = (6, 2)
_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that breaks a guarantee (`refuse`: do not start) or weakens one (`warn`)."""

    severity: Literal["refuse", "warn"]
    text: str
    remedy: str


_TEXTS = tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))
FINDINGS = {name: Finding(**fields) for name, fields in _TEXTS.items()}


def finding(name: str, **values: object) -> Finding:
    """The finding of this name, with these values in place of the fields in braces."""
    kind = FINDINGS[name]
    return Finding(kind.severity, kind.text.format(**values), kind.remedy.format(**values))


def findings(settings: Settings) -> list[Finding]:
    """All findings about the Kafka and the Redis of these settings, refusals first.

    Changes nothing. Missing rights to read become a warning. Raises RecoveryRequired when Kafka or
    Redis does not answer.
    """
    access = kafka(settings)
    with closing(RedisServers(settings.redis_url.get_secret_value())) as redis:
        found = [*_redis_findings(redis), *_topic_findings(settings, Topics(access.admin()))]
    return sorted(found, key=lambda one: one.severity != "refuse")


def _redis_findings(redis: RedisServers) -> Iterator[Finding]:
    """The findings about each server; a node that does not answer is a finding, unless none answers."""
    # Raises when none answers: then every finding would be about the same outage.
    redis.now_ms()
    for name, server in redis.each().items():
        try:
            found = list(_server_findings(server, is_node=bool(name)))
        except IndexLost as silent:
            if not name:
                raise
            found = [finding("node_silent", why=silent)]
        for one in found:
            yield replace(one, text=f"{name}: {one.text}") if name else one


def _server_findings(redis: RedisNode, *, is_node: bool) -> Iterator[Finding]:
    clock = Clock()
    clock.observe(redis.now_ms())
    yield from clock_findings(clock.skew_ms())
    # Redis may refuse INFO or CONFIG to this user; the warning names what could not be checked.
    what = "its version, maxmemory-policy, maxmemory and appendonly"
    try:
        info = redis.info("server") | redis.info("memory") | redis.info("persistence")
        if info.get("redis_mode") == "cluster" and not is_node:
            yield finding("one_node")
        yield from info_findings(info)
        what = "aof-load-truncated"
        # With "yes", a file that was cut inside a MULTI keeps it open; a later load then drops
        # another transaction.
        if info.get("aof_enabled") and redis.config(what) != "no":
            yield finding("torn_aof")
    except NotAnswered as why:
        yield finding("redis_silent", why=why, what=what)


def clock_findings(skew_ms: int) -> Iterator[Finding]:
    if abs(skew_ms) > MAX_SKEW_MS:
        yield finding("clocks", skew_ms=abs(skew_ms))


def info_findings(info: Mapping[str, Any]) -> Iterator[Finding]:
    """The findings in Redis' INFO; a missing field is a warning."""
    for field in ("redis_version", "maxmemory_policy", "maxmemory", "aof_enabled"):
        if field not in info:
            yield finding("redis_silent", why=f"Redis' INFO has no {field}", what=field)
    # A missing field has its warning already, so each default below is one without a finding.
    version = str(info.get("redis_version", "6.2"))
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < MINIMUM_REDIS:
        yield finding("old_redis", version=version)
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield finding("eviction", policy=policy)
    if info.get("aof_enabled", 1) == 0:
        yield finding("no_aof")
    if info.get("maxmemory", 1) == 0:
        yield finding("no_limit")


def _topic_findings(settings: Settings, topics: Topics) -> Iterator[Finding]:
    requests = list(settings.topics)
    ours = [*requests, *map(receipts_topic, requests), settings.dead_letter_topic]
    described = topics.describe(ours)
    known_settings: dict[str, TopicSettings] = {}
    for topic, found in described.items():
        if isinstance(found.settings, TopicSettings):
            known_settings[topic] = found.settings
        else:
            what = "anything" if found.partitions is None else "the settings"
            yield finding("kafka_silent", topic=topic, what=what, why=found.settings)
    for topic in requests:
        is_schedule = topic in settings.schedule_topics
        yield from _partition_findings(topic, described)
        yield from journal_findings(
            topic, known_settings, settings.needed_retention_ms(topic), is_schedule=is_schedule
        )
    yield from _write_findings(settings, described)
    letters = known_settings.get(settings.dead_letter_topic)
    if letters is not None and _is_compacted(letters):
        yield finding(
            "compacted_letters", topic=settings.dead_letter_topic, policy=letters.cleanup_policy
        )


def _write_findings(settings: Settings, described: Mapping[str, Described]) -> Iterator[Finding]:
    """Missing permissions that nothing shows until the first dead letter, or the first cold request, is due."""
    forbidden = {topic for topic, found in described.items() if not found.may_write}
    if settings.dead_letter_topic in forbidden:
        yield finding("unwritable_letters", topic=settings.dead_letter_topic)
    for topic in settings.topics:
        # Even without a horizon: promotion then writes all cold requests again that there still are.
        if topic in forbidden and topic not in settings.schedule_topics:
            yield finding("unwritable_requests", topic=topic)


def _partition_findings(topic: str, described: Mapping[str, Described]) -> Iterator[Finding]:
    receipts = receipts_topic(topic)
    if receipts not in described:
        return
    # Receipts without their request topic: a new topic of that name would start at offset 0, and
    # old receipts would end its requests.
    if topic not in described:
        yield finding("orphaned", topic=topic, receipts=receipts)
        return
    have, wanted = described[receipts].partitions, described[topic].partitions
    if have is None or wanted is None or have == wanted:
        return
    name = "fewer_receipts" if have < wanted else "more_receipts"
    yield finding(name, topic=topic, receipts=receipts, have=have, wanted=wanted)


def journal_findings(
    topic: str, settings: Mapping[str, TopicSettings], needed_ms: int, *, is_schedule: bool = False
) -> Iterator[Finding]:
    """The findings in the settings of a request topic and its receipts, where they are known."""
    requests, receipts = settings.get(topic), settings.get(receipts_topic(topic))
    if requests is not None:
        yield from _retention_findings(topic, requests, "short_requests", needed_ms, is_schedule)
        # A caller's slow clock makes countdowns early. Schedules have instants, not countdowns.
        if requests.timestamp_type != "LogAppendTime" and not is_schedule:
            yield finding("create_time", topic=topic, type=requests.timestamp_type)
    if receipts is not None:
        name, timestamp_type = receipts_topic(topic), receipts.timestamp_type
        # A rebuild needs receipts of any age; blackbox itself removes the others.
        yield from _retention_findings(name, receipts, "short_receipts", FOR_EVER)
        if receipts.max_message_bytes < RECEIPTS_TOPIC_BYTES:
            have, wanted = receipts.max_message_bytes, RECEIPTS_TOPIC_BYTES
            yield finding("small_receipts", topic=name, have=have, wanted=wanted)
        # Kafka's clock is known from the timestamps of receipts alone.
        if timestamp_type != "LogAppendTime":
            yield finding("unstamped_receipts", topic=name, type=timestamp_type)


def _retention_findings(
    topic: str,
    settings: TopicSettings,
    too_short: str,
    wanted_ms: int,
    is_schedule: bool = False,
) -> Iterator[Finding]:
    # A later schedule ends an earlier one of the same key, so compaction removes no pending one.
    if _is_compacted(settings) and not is_schedule:
        yield finding("compacted", topic=topic, policy=settings.cleanup_policy)
    have_ms = settings.retention_ms
    if have_ms != FOR_EVER and (wanted_ms == FOR_EVER or have_ms < wanted_ms):
        found = finding(too_short, topic=topic, have=_days(have_ms), wanted=_days(wanted_ms))
        # Schedules may be due at any time, so no retention is certainly long enough.
        yield replace(found, severity="warn") if is_schedule else found
    if settings.retention_bytes != FOR_EVER:
        yield finding("limited_bytes", topic=topic, limit=settings.retention_bytes)


def _is_compacted(settings: TopicSettings) -> bool:
    return "compact" in settings.cleanup_policy


def _days(duration_ms: int) -> str:
    if duration_ms == FOR_EVER:
        return "-1 (for ever)"
    return f"{duration_ms} ({duration_ms / _DAY_MS:.3g} days)"
