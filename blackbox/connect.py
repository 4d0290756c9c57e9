"""From settings to clients: the one place that knows both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from blackbox.formats import Format, make_format
from blackbox.index.connection import pool
from blackbox.index.shared import Shared
from blackbox.journal.access import KafkaAccess
from blackbox.journal.topics import OwnTopics, Topics
from blackbox.request import Shard
from blackbox.rules.admission import Admission
from blackbox.rules.file import RulesFile
from blackbox.rules.pace import Pace
from blackbox.rules.rules import RulesError
from blackbox.settings import Settings, SettingsError


def kafka(settings: Settings, more: Mapping[str, str] | None = None) -> KafkaAccess:
    """The brokers, with the operator's librdkafka settings and `more` on top of them.

    Raises SettingsError for a setting that librdkafka does not know or take.
    """
    asked = settings.kafka_settings() | dict(more or {})
    access = KafkaAccess(settings.kafka_bootstrap_servers, settings.group_id, asked)
    try:
        access.check()
    except ValueError as error:
        raise SettingsError(
            f"BLACKBOX_KAFKA_CONFIG={settings.kafka_config}: {error}; "
            "wanted: settings of librdkafka, one name=value a line"
        ) from None
    return access


def shared(settings: Settings) -> Shared:
    """What all shards share in Redis, over connections of its own."""
    return Shared(pool(settings.redis_url.get_secret_value()))


def rules(settings: Settings) -> RulesFile | None:
    """What callers are allowed; None: everything. Raises SettingsError for a file that cannot be used."""
    if settings.callers_file is None:
        return None
    try:
        return RulesFile(settings.callers_file)
    except RulesError as error:
        raise SettingsError(str(error)) from None


def admission(settings: Settings, access: KafkaAccess) -> Admission | None:
    """Who is let in; None: everybody. Raises as `rules`."""
    file = rules(settings)
    if file is None:
        return None
    admin = access.admin()

    def shards() -> Iterator[Shard]:
        for topic, count in Topics(admin).partitions(list(settings.topics)).items():
            yield from (Shard(topic, partition) for partition in range(count))

    return Admission(file, shared(settings), shards)


def pace(settings: Settings) -> Pace | None:
    """How fast targets are fed; None: as fast as can be. Raises as `rules`."""
    file = rules(settings)
    if file is None:
        return None
    return Pace(file, shared(settings))


def own_topics(settings: Settings, access: KafkaAccess) -> OwnTopics:
    """The topics of this deployment, to be created and grown."""
    return OwnTopics(
        access,
        list(settings.topics),
        settings.dead_letter_topic,
        settings.output_topics,
        settings.oscillator_topic,
        compacted=settings.schedule_topics,
        retention_ms=settings.retention_ms,
    )


def formats(settings: Settings) -> dict[str, Format]:
    """How the records of each request topic read."""
    return {
        topic: make_format(
            contract,
            max_countdown_s=settings.max_countdown_s,
            own_topics=settings.is_own_topic,
            may_recur=settings.delivery == "exactly-once",
            topic=topic,
            timer_output_topic=settings.timer_output(topic),
            scheduler_grace_s=settings.scheduler_grace_s
            if settings.scheduler_grace_s >= 0
            else None,
        )
        for topic, contract in settings.topics.items()
    }
