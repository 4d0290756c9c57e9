"""From settings to clients: the one place that knows both."""

from __future__ import annotations

from collections.abc import Mapping

from blackbox.journal.access import KafkaAccess
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
