"""From settings to clients: the one place that knows both."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from blackbox.formats import Format, make_format
from blackbox.journal.access import KafkaAccess
from blackbox.journal.topics import OwnTopics, is_own_topic
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


def own_topics(settings: Settings, access: KafkaAccess) -> OwnTopics:
    """The topics of this deployment, to be created and grown."""
    return OwnTopics(
        access,
        list(settings.topics),
        settings.dead_letter_topic,
        settings.output_topics,
        compacted=settings.schedule_topics,
        retention_ms=settings.retention_ms,
    )


def formats(settings: Settings) -> dict[str, Format]:
    """How the records of each request topic read."""
    is_ours = partial(
        is_own_topic,
        request_topics=list(settings.topics),
        dead_letter_topic=settings.dead_letter_topic,
    )
    return {
        topic: make_format(
            contract,
            max_countdown_s=settings.max_countdown_s,
            own_topics=is_ours,
            may_recur=settings.delivery == "exactly-once",
            topic=topic,
            timer_output_topic=settings.timer_output(topic),
            scheduler_grace_s=settings.scheduler_grace_s
            if settings.scheduler_grace_s >= 0
            else None,
        )
        for topic, contract in settings.topics.items()
    }
