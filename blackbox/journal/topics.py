"""Topics as the brokers describe them; the names of the topics that blackbox owns."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    ConfigEntry,
    ConfigResource,
    OffsetSpec,
    ResourceType,
    TopicDescription,
)

from blackbox.journal.kafka_access import (
    REQUEST_TIMEOUT_S,
    KafkaAccess,
    explained,
    is_not_allowed,
    journal_error,
    outcome,
)
from blackbox.records.errors import JournalLost, NotAllowed

logger = logging.getLogger("blackbox.journal")

RECEIPTS_SUFFIX = ".receipts"
FOR_EVER = -1
MISSING = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)


def receipts_topic(request_topic: str) -> str:
    return request_topic + RECEIPTS_SUFFIX


def is_own_topic(name: str, request_topics: Iterable[str], dead_letter_topic: str) -> bool:
    """Whether a topic belongs to blackbox, so that no request may be delivered to it."""
    # receipts of other deployments as well: a record there decides what they deliver
    is_receipts = name.endswith(RECEIPTS_SUFFIX)
    return is_receipts or name == dead_letter_topic or name in request_topics


def topic_ids(admin: AdminClient, names: Sequence[str]) -> dict[str, str]:
    """The ids of these topics, which change when one is deleted and created again (KIP-516).

    Raises KafkaException when one does not exist, or when the brokers do not answer.
    """
    asked = admin.describe_topics(TopicCollection(list(names)), request_timeout=REQUEST_TIMEOUT_S)
    return {name: str(outcome(answer).topic_id) for name, answer in asked.items()}


class TopicIds:
    """The current ids of topics, for repeated queries. Not safe for use from two threads."""

    def __init__(self, access: KafkaAccess) -> None:
        self._access = access
        self._admin: AdminClient | None = None

    def of(self, names: Sequence[str]) -> dict[str, str]:
        """The ids by name, without topics that do not exist; empty when the brokers do not answer."""
        if self._admin is None:  # an idle client has length 0 and is falsy
            self._admin = self._access.admin()
        try:
            return Topics(self._admin).ids(names)
        except JournalLost:
            self._admin = None  # it may have lost sight of all brokers
            return {}


class TopicSettings(NamedTuple):
    """The relevant part of a topic's configuration; a retention of -1 means unlimited."""

    retention_ms: int
    retention_bytes: int
    cleanup_policy: str
    timestamp_type: str
    max_message_bytes: int


class Described(NamedTuple):
    """A topic that exists. `partitions` is None, and `settings` the reason, if they are not known.

    `may_write`: False if the brokers say that this user has no permission to write to it.
    """

    partitions: int | None
    settings: TopicSettings | str
    may_write: bool = True


class Topics:
    """Queries the brokers about topics.

    Raises JournalLost when they do not answer; `ends` leaves partitions without an answer out instead.
    """

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin

    def partitions(self, names: Sequence[str], *, to: str = "Describe") -> dict[str, int]:
        """The partition counts of these topics, without those that do not exist.

        Raises NotAllowed for a topic that may not be described; `to` is what the caller wants to do
        with it, for the error message.
        """
        found: dict[str, int] = {}
        for name in names:
            try:
                metadata = self._admin.list_topics(name, timeout=REQUEST_TIMEOUT_S)
            except KafkaException as error:
                raise journal_error(error, "cannot read the cluster's metadata") from None
            for topic in metadata.topics.values():
                if topic.error is not None and is_not_allowed(topic.error):
                    why = explained(topic.error, f"{to} on topic {topic.topic}")
                    raise NotAllowed(f"cannot see the topic {topic.topic}: {why}")
                if topic.error is None and topic.topic is not None:
                    found[topic.topic] = len(topic.partitions)
        return found

    def ids(self, names: Sequence[str]) -> dict[str, str]:
        """The ids of these topics, as `topic_ids` says, without those that do not exist."""
        found: dict[str, str] = {}
        for name in names:
            try:
                found |= topic_ids(self._admin, [name])
            except KafkaException as error:
                if error.args[0].code() not in MISSING:
                    what, needs = f"{name}: cannot read its topic id", f"Describe on topic {name}"
                    raise journal_error(error, what, needs) from None
        return found

    def ends(
        self, places: Iterable[tuple[str, int]], *, committed: bool
    ) -> dict[tuple[str, int], int]:
        """The next offsets of these partitions; with `committed`, the last stable offsets.

        Without those whose broker does not answer.
        """
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        wanted = {TopicPartition(*at): OffsetSpec.latest() for at in places}  # type: ignore[no-untyped-call]
        if not wanted:
            return {}
        asked = self._admin.list_offsets(
            wanted, isolation_level=level, request_timeout=REQUEST_TIMEOUT_S
        )
        ends: dict[tuple[str, int], int] = {}
        for at, answer in asked.items():
            with suppress(KafkaException):
                if (end := int(outcome(answer).offset)) >= 0:  # negative: no answer
                    ends[at.topic, at.partition] = end
        return ends

    def describe(self, names: Iterable[str]) -> dict[str, Described]:
        """The brokers' descriptions of these topics, without those that do not exist."""
        found: dict[str, TopicDescription] = {}
        not_described: dict[str, Described] = {}
        asked = self._admin.describe_topics(
            TopicCollection(list(names)),
            include_authorized_operations=True,
            request_timeout=REQUEST_TIMEOUT_S,
        )
        for name, answer in asked.items():
            try:
                found[name] = outcome(answer)
            except KafkaException as error:
                if error.args[0].code() not in MISSING:
                    not_described[name] = Described(None, _why_not_described(error, name))
        settings = self.settings(list(found)) if found else {}
        return not_described | {
            name: Described(len(topic.partitions), settings[name], _may_write(topic))
            for name, topic in found.items()
        }

    def settings(self, names: Sequence[str]) -> dict[str, TopicSettings | str]:
        """The configuration of these topics, or why the brokers do not return it."""
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        asked = self._admin.describe_configs(resources, request_timeout=REQUEST_TIMEOUT_S)
        found: dict[str, TopicSettings | str] = {}
        for resource, answer in asked.items():
            try:
                found[resource.name] = _topic_settings(outcome(answer))
            except KafkaException as error:
                found[resource.name] = _why_not_described(error, resource.name)
        return found


def _may_write(topic: TopicDescription) -> bool:
    allowed = topic.authorized_operations
    # A broker that knows its permissions allows at least Describe here; others return nothing.
    return not allowed or AclOperation.WRITE in allowed


def _why_not_described(error: KafkaException, topic: str) -> str:
    """The error that the brokers answer. Raises JournalLost when they did not answer."""
    cause: KafkaError = error.args[0]
    if cause.retriable() or cause.code() < 0:
        raise journal_error(error, f"cannot describe the topic {topic}") from None
    return cause.str()


def _topic_settings(entries: Mapping[str, ConfigEntry]) -> TopicSettings | str:
    values = {name: str(entry.value) for name, entry in entries.items()}
    try:
        policy = values["cleanup.policy"]
        # Kafka applies a retention only with the policy `delete`, alone or beside `compact`.
        removes = "delete" in policy
        return TopicSettings(
            retention_ms=int(values["retention.ms"]) if removes else -1,
            retention_bytes=int(values["retention.bytes"]) if removes else -1,
            cleanup_policy=policy,
            timestamp_type=values["message.timestamp.type"],
            max_message_bytes=int(values["max.message.bytes"]),
        )
    except (KeyError, ValueError) as error:
        return f"the brokers' answer has no usable value: {error!r}"
