"""Makes clients from settings: the one place that knows both."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import cache
from pathlib import Path

from blackbox.config.settings import Settings
from blackbox.config.settings_error import SettingsError
from blackbox.core.plan import Tail
from blackbox.core.receipt_history import is_another, replaced
from blackbox.formats import Format, Options, make_format
from blackbox.index.connection import pool
from blackbox.index.shared_state import SharedState
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.own_topics import OwnTopics
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics
from blackbox.records.errors import RecoveryRequired
from blackbox.records.request import Shard
from blackbox.rules.admission import CallerAdmission
from blackbox.rules.file import RulesFile
from blackbox.rules.rules import RulesError
from blackbox.rules.target_rates import TargetRates

SHARDS_KNOWN_FOR_S = 60.0
# After brokers did not answer, which took five seconds.
SHARDS_ASKED_AGAIN_S = 10.0


def kafka(settings: Settings, more: Mapping[str, str] | None = None) -> KafkaAccess:
    """The brokers, with the operator's librdkafka settings and `more` on top of them.

    Raises SettingsError for a setting that librdkafka does not know or accept, or that is not the operator's.
    """
    asked = settings.kafka_settings() | dict(more or {})
    access = KafkaAccess(settings.kafka_bootstrap_servers, settings.group_id, asked)
    try:
        access.check()
    except ValueError as error:
        raise SettingsError(
            f"BLACKBOX_KAFKA_CONFIG={settings.kafka_config}: {error}; wanted: librdkafka settings, "
            "one name=value per line"
        ) from None
    return access


def shared(settings: Settings) -> SharedState:
    return SharedState(pool(settings.redis_url.get_secret_value()))


def rules(settings: Settings) -> RulesFile | None:
    """The callers' rules; None: all is allowed. Raises SettingsError for a file that cannot be used."""
    if settings.callers_file is None:
        return None
    try:
        return _file(settings.callers_file)
    except RulesError as error:
        raise SettingsError(str(error)) from None


# One for the process: with several, an edited file would apply at different moments.
@cache
def _file(path: Path) -> RulesFile:
    return RulesFile(path)


def admission(settings: Settings, access: KafkaAccess) -> CallerAdmission | None:
    """Admission by the callers' rules; None: all are admitted. Raises as `rules` does."""
    file = rules(settings)
    if file is None:
        return None
    return CallerAdmission(file, shared(settings), _Shards(access, list(settings.topics)))


class _Shards:
    """All shards, as the brokers reported within the last minute, or when they last answered."""

    def __init__(self, access: KafkaAccess, topics: Sequence[str]) -> None:
        self._access, self._topics = access, topics
        self._known: list[Shard] = []
        self._look_at_s = float("-inf")

    def __call__(self) -> Sequence[Shard]:
        if time.monotonic() > self._look_at_s:
            known_for_s = SHARDS_ASKED_AGAIN_S
            with suppress(RecoveryRequired):
                counts = Topics(self._access.admin()).partitions(self._topics)
                self._known = [Shard(topic, p) for topic, n in counts.items() for p in range(n)]
                known_for_s = SHARDS_KNOWN_FOR_S
            self._look_at_s = time.monotonic() + known_for_s
        return self._known


def target_rates(settings: Settings) -> TargetRates | None:
    """The rate-limits of targets; None: there are none. Raises as `rules` does."""
    file = rules(settings)
    return None if file is None else TargetRates(file, shared(settings))


def check_log(shard: Shard, access: KafkaAccess, tail: Tail) -> None:
    """Raise Shortened if Kafka has another record where `tail` was read, JournalLost if it does not answer."""
    # One record is read; a consumer would otherwise fetch thousands behind it.
    with closing(ShardJournal(shard, access, prefetched=1)) as journal:
        if is_another(journal, tail):
            raise replaced(shard, tail)


def own_topics(settings: Settings, access: KafkaAccess) -> OwnTopics:
    return OwnTopics(
        access,
        list(settings.topics),
        settings.dead_letter_topic,
        settings.output_topics,
        settings.oscillator_topic,
        compacted=settings.schedule_topics,
    )


def formats(settings: Settings) -> dict[str, Format]:
    """The format of the records of each request topic."""
    grace_s = settings.scheduler_grace_s
    return {
        topic: make_format(
            format_name,
            Options(
                settings.max_countdown_s,
                settings.is_own_topic,
                topic=topic,
                # The next request is written in the transaction of the delivery.
                may_recur=settings.delivery == "exactly-once",
                output_topic=settings.timer_output(topic),
                grace_s=None if grace_s < 0 else grace_s,
            ),
        )
        for topic, format_name in settings.topics.items()
    }
