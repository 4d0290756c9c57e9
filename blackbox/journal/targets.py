"""Whether target topics can take messages, asked before producing so that one of them spoils no batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future
from threading import Lock

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, TopicDescription

from blackbox.doubt import JournalLost
from blackbox.journal.access import REQUEST_TIMEOUT_S, KafkaAccess, doubt, is_not_allowed
from blackbox.journal.topics import Topics, TopicSettings
from blackbox.limits import Limits
from blackbox.outgoing import Refusal
from blackbox.request import Reason

logger = logging.getLogger("blackbox.journal")

KNOWN_FOR_S = 10.0
UNAVAILABLE_FOR_S = 0.5
LIMITS_KNOWN_FOR_S = 60.0
MOST_KNOWN = 10_000
CLIENT_MOST_BYTES = 1_000_000
"""librdkafka's default of `message.max.bytes`: what a client that was not told otherwise sends."""
NEEDED = (AclOperation.READ, AclOperation.WRITE)


class Targets:
    """The brokers' metadata of target topics, remembered for a few seconds. Safe from any thread."""

    def __init__(self, access: KafkaAccess) -> None:
        self._admin = access.admin()
        self._topics = Topics(self._admin)
        self._largest = int(access.settings.get("message.max.bytes", CLIENT_MOST_BYTES))
        self._compresses = any(
            access.settings.get(name, "none") != "none"
            for name in ("compression.type", "compression.codec")
        )
        self._lock = Lock()
        self._known: dict[str, tuple[float, Refusal | None]] = {}
        self._limits: dict[str, tuple[float, Limits | None]] = {}

    def unavailable(self, topics: Iterable[str]) -> dict[str, Refusal]:
        """Those of the topics that cannot take messages now, with (reason word, detail).

        Raises JournalLost when the brokers do not answer.
        """
        wanted = set(topics)
        with self._lock:
            now = time.monotonic()
            stale = [t for t in wanted if t not in self._known or self._known[t][0] < now]
            if stale:
                self._refresh(stale, now)
            found = {topic: self._known[topic][1] for topic in wanted}
        return {topic: refusal for topic, refusal in found.items() if refusal is not None}

    def limits(self, topics: Iterable[str]) -> dict[str, Limits]:
        """What those of the topics refuse that are stricter than this client.

        Nothing of topics whose configuration the brokers do not tell (DescribeConfigs): what they
        refuse is found when they do.
        """
        wanted = set(topics)
        with self._lock:
            now = time.monotonic()
            stale = [t for t in wanted if t not in self._limits or self._limits[t][0] < now]
            if stale:
                self._refresh_limits(stale, now)
            found = {topic: self._limits[topic][1] for topic in wanted}
        return {topic: limits for topic, limits in found.items() if limits is not None}

    def _refresh_limits(self, topics: list[str], now: float) -> None:
        if len(self._limits) > MOST_KNOWN:
            self._limits = {t: known for t, known in self._limits.items() if known[0] >= now}
        try:
            told = self._topics.settings(topics)
        except JournalLost as silent:
            logger.warning("what target topics refuse is not known: %s", silent)
            told = {}
        for topic in topics:
            settings = told.get(topic)
            found = self._limits_of(settings) if isinstance(settings, TopicSettings) else None
            lasts_s = KNOWN_FOR_S if settings is None else LIMITS_KNOWN_FOR_S
            self._limits[topic] = now + lasts_s, found

    def _limits_of(self, settings: TopicSettings) -> Limits | None:
        needs_key = "compact" in settings.cleanup_policy
        is_strict = settings.max_message_bytes < self._largest and not self._compresses
        most_bytes = settings.max_message_bytes if is_strict else None
        return Limits(needs_key, most_bytes) if needs_key or is_strict else None

    def _refresh(self, topics: list[str], now: float) -> None:
        asked = self._admin.describe_topics(
            TopicCollection(topics),
            include_authorized_operations=True,
            request_timeout=REQUEST_TIMEOUT_S,
        )
        if len(self._known) > MOST_KNOWN:
            self._known = {t: known for t, known in self._known.items() if known[0] >= now}
        for topic in topics:
            refusal = _refusal(topic, asked[topic])
            lasts_s = KNOWN_FOR_S if refusal is None else UNAVAILABLE_FOR_S
            self._known[topic] = now + lasts_s, refusal


def _refusal(topic: str, asked: Future[TopicDescription]) -> Refusal | None:
    try:
        described = asked.result()
    except KafkaException as failure:
        return _told(topic, failure)
    # One that lacks a right would fail its whole transaction, or what follows a crash. Brokers
    # that do not tell are believed.
    allowed = described.authorized_operations or NEEDED
    if lacking := [op.name.capitalize() for op in NEEDED if op not in allowed]:
        return _not_allowed(topic, " and ".join(lacking))
    leaderless = [one.id for one in described.partitions if one.leader is None or one.leader.id < 0]
    if leaderless:
        return Reason.UNREACHABLE, f"partition {leaderless[0]} of {topic!r} has no leader"
    return None


def _told(topic: str, failure: KafkaException) -> Refusal:
    error: KafkaError = failure.args[0]
    if is_not_allowed(error):
        return _not_allowed(topic, "Read and Write")
    if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
        return Reason.UNKNOWN_TOPIC, f"the topic {topic!r} does not exist; create it"
    if error.code() < 0:
        raise doubt(failure, "cannot ask for the metadata of target topics") from None
    return Reason.UNREACHABLE, f"the topic {topic!r} is not available: {error.str()}"


def _not_allowed(topic: str, operations: str) -> Refusal:
    return (
        Reason.NOT_AUTHORIZED,
        f"not allowed to use {topic!r}; grant {operations} on topic {topic}",
    )
