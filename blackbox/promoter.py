"""Wiring of promotion: one shard after the other, for whoever runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from blackbox.clock import Clock
from blackbox.connect import formats
from blackbox.doubt import Doubt
from blackbox.index.inspector import Inspector
from blackbox.journal.access import KafkaAccess
from blackbox.journal.carrier import Carrier
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics, TopicSettings
from blackbox.promotion import Promoted, Promotion
from blackbox.request import Shard
from blackbox.settings import Settings

logger = logging.getLogger("blackbox.promotion")

LONGEST_PAUSE_S = 3600.0


def promotion_every_s(horizon_s: int) -> float:
    """How often to promote: four times within the horizon, so that one run may fail."""
    return min(LONGEST_PAUSE_S, horizon_s / 4)


class Promoter:
    """Promotes shards, now and again. Not safe for use from two threads at once."""

    def __init__(self, settings: Settings, access: KafkaAccess) -> None:
        self._settings = settings
        self._access = access
        self._inspector = Inspector.of(settings.redis_url.get_secret_value())
        self._formats = formats(settings)

    def promote(self, shard: Shard, now_ms: int) -> Promoted:
        """One run for one shard; raises as `Promotion.run`."""
        journal = ShardJournal(shard, self._access)
        carrier = Carrier(shard, self._access)
        try:
            return Promotion(
                shard=shard,
                index=self._inspector,
                journal=journal,
                carrier=carrier,
                contract=self._formats[shard.topic],
                lead_ms=self._settings.horizon_ms,
                renew_after_ms=self._renew_after_ms(shard.topic),
            ).run(now_ms)
        finally:
            carrier.close()
            journal.close()

    def close(self) -> None:
        self._inspector.close()

    def _renew_after_ms(self, topic: str) -> int | None:
        """Half of what Kafka keeps: time enough for a run that fails."""
        described = self._kept(topic)
        return None if described.retention_ms < 0 else described.retention_ms // 2

    def _kept(self, topic: str) -> TopicSettings:
        found = Topics(self._access.admin()).describe([topic]).get(topic)
        if found is None or not isinstance(found.settings, TopicSettings):
            why = found.settings if found is not None else "there is no such topic"
            raise Doubt(f"{topic}: cannot tell how long Kafka keeps it: {why}")
        return found.settings


class Schedule:
    """What a service calls now and again for the shards it owns; a failure waits for the next time."""

    def __init__(
        self,
        settings: Settings,
        access: KafkaAccess,
        clock: Clock,
        shards: Callable[[], Iterable[Shard]],
    ) -> None:
        self._promoter = Promoter(settings, access)
        self._clock = clock
        self._shards = shards

    def run(self) -> None:
        for shard in sorted(self._shards()):
            try:
                done = self._promoter.promote(shard, self._clock.earliest_ms())
            except Doubt as reason:
                logger.warning("%s; promoting again at the next time", reason)
                continue
            if done.near or done.renewed:
                logger.info(
                    "%s: of %d cold requests %d came near, %d were written anew",
                    shard, done.cold, done.near, done.renewed,
                )  # fmt: skip
