"""Wiring of promotion, which runs for one shard after the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from threading import Event

from blackbox.config.settings import Settings
from blackbox.config.wiring import formats
from blackbox.core.bits import Bits
from blackbox.core.plan import Positions
from blackbox.core.promotion import Promoted, Promotion
from blackbox.engine.metrics import Metrics
from blackbox.engine.steady_scheduler import SteadyScheduler
from blackbox.index.inspector import Inspector
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.promotion_producer import ShardPromotionProducer
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics, TopicSettings
from blackbox.records.clock import Clock
from blackbox.records.errors import Fenced, IndexLost, RecoveryRequired
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.core.promotion")

LONGEST_PAUSE_S = 3600.0
# The wait after a start is short: during an outage, requests may have reached the horizon.
FIRST_S = 30.0
# When a shard is tried again that failed, and how often new ones are looked for: an outage of a minute costs no hour.
# Each further failure doubles the pause: a missing permission costs neither a log line nor a reading each minute.
RETRY_S = 60.0
# The same after another run fenced this one: it may be doing the work, and would be interrupted.
FENCED_S = 600.0


class Promoter:
    """Promotes shards. Not safe for use from two threads at once."""

    def __init__(self, settings: Settings, access: KafkaAccess) -> None:
        self._settings = settings
        self._access = access
        self._inspector = Inspector.of(settings.redis_url.get_secret_value())
        self._formats = formats(settings)
        self._warned: set[str] = set()

    def promote(
        self, shard: Shard, now_ms: int, confirm: Callable[[], None] = lambda: None
    ) -> Promoted:
        """Run promotion for one shard, until `confirm` raises RecoveryRequired; raises as `Promotion.run`."""
        positions, cold = self._read_cold(shard)
        if positions is None:
            raise RecoveryRequired(
                f"{shard}: its index is empty or lost; run promotion when the shard is open again"
            )
        if not cold:
            return Promoted(shard)
        journal = ShardJournal(shard, self._access)
        producer = ShardPromotionProducer(shard, self._access)
        with closing(journal), closing(producer):
            return Promotion(
                shard=shard,
                position=positions.requests,
                cold=cold,
                journal=journal,
                producer=producer,
                format=self._formats[shard.topic],
                lead_ms=self._settings.horizon_ms,
                renew_after_ms=self._renew_after_ms(shard.topic),
                confirm=confirm,
            ).run(now_ms)

    def close(self) -> None:
        self._inspector.close()

    def _read_cold(self, shard: Shard) -> tuple[Positions | None, Bits]:
        try:
            return self._inspector.cold(shard)
        except IndexLost:  # a connection that was kept may have been closed since
            return self._inspector.cold(shard)

    def _renew_after_ms(self, topic: str) -> int:
        """The age of renewal, ms."""
        found = Topics(self._access.admin()).describe([topic]).get(topic)
        if found is None:
            raise RecoveryRequired(
                f"{topic}: the topic does not exist; promotion resumes once it does"
            )
        wanted_ms = self._settings.renew_after_ms
        if isinstance(found.settings, TopicSettings):
            kept_ms = found.settings.retention_ms
        else:
            # The shortest that the service accepts: renewed too often rather than too late.
            kept_ms = self._settings.needed_retention_ms(topic)
            self._warn(topic, f"{found.settings}", kept_ms)
        # Half of the retention: one failed run then loses no request.
        return wanted_ms if kept_ms < 0 else min(wanted_ms, kept_ms // 2)

    def _warn(self, topic: str, why: str, kept_ms: int) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning(
                "%s: cannot read its retention: %s; assuming %d s, so requests beyond the horizon "
                "may be renewed more often than needed; with ACLs, grant DescribeConfigs on topic "
                "%s",
                topic, why, kept_ms // 1000, topic,
            )  # fmt: skip


@dataclass(eq=False, repr=False)
class PromotionJob:
    """Promotes the shards that a service owns; a shard that is new, or failed once, is due within a minute."""

    settings: Settings
    access: KafkaAccess
    metrics: Metrics
    clock: Clock
    shards: Callable[[], Collection[Shard]]

    def __post_init__(self) -> None:
        self._promoter = Promoter(self.settings, self.access)
        self._stopping = Event()
        # By shard, monotonic: when its last promotion that succeeded ended, or when the first was tried.
        self._succeeded_s: dict[Shard, float] = {}
        self._next_s: dict[Shard, float] = {}
        self._retry_s: dict[Shard, float] = {}
        # Four times within the horizon or the renewal age, so that one promotion may fail.
        horizon_s = self.settings.hot_horizon_s or LONGEST_PAUSE_S
        within_s = min(horizon_s, self.settings.renew_after_ms / 1000)
        self._every_s = min(LONGEST_PAUSE_S, within_s / 4)

    def add_to(self, scheduler: SteadyScheduler) -> None:
        """Look soon, and then every minute, for shards to be promoted."""
        look_s = min(RETRY_S, self._every_s)
        soon = datetime.now(UTC) + timedelta(seconds=min(FIRST_S, look_s))
        scheduler.add_job(self._run, "interval", seconds=look_s, next_run_time=soon, id="promote")

    def _run(self) -> None:
        shards = self.shards()
        # A shard that was closed, or elsewhere, may have missed its turn: it is due when it is back.
        self._next_s = {shard: at_s for shard, at_s in self._next_s.items() if shard in shards}
        self._retry_s = {
            shard: pause_s for shard, pause_s in self._retry_s.items() if shard in shards
        }
        for shard in sorted(shards):
            if time.monotonic() >= self._next_s.get(shard, float("-inf")):
                pause_s = self._try(shard)
                self._next_s[shard] = time.monotonic() + min(pause_s, self._every_s)
            # Again each time: the metric is removed when a shard is closed.
            self._show_age(shard)

    def _try(self, shard: Shard) -> float:
        """Promote a shard; return how long it may wait for the next time, s."""
        self._succeeded_s.setdefault(shard, time.monotonic())
        try:
            done = self._promote(shard)
            self._retry_s.pop(shard, None)
            # What hides these requests may be aborted: the work of an earlier run, or a cancel.
            return RETRY_S if done.passed_over else self._every_s
        except RecoveryRequired as reason:
            retry_s = self._retry_s.get(shard, RETRY_S)
            self._retry_s[shard] = min(2 * retry_s, self._every_s)
            pause_s = FENCED_S if isinstance(reason, Fenced) else retry_s
            if not self._is_given_up(shard):
                logger.warning("%s; trying again in %.0f s", reason, min(pause_s, self._every_s))
            return pause_s
        except Exception:
            logger.exception("%s: promotion failed unexpectedly", shard)
            return FENCED_S

    def _is_given_up(self, shard: Shard) -> bool:
        return self._stopping.is_set() or shard not in self.shards()

    def _show_age(self, shard: Shard) -> None:
        since_s = self._succeeded_s[shard]
        self.metrics.promotion_age(shard, lambda: time.monotonic() - since_s)
        if self._is_given_up(shard):  # perhaps just before: nobody else would remove it
            self.metrics.given_up(shard, ("promotion_age_seconds",))

    def stop(self) -> None:
        """End the run in flight after its current batch at the latest."""
        self._stopping.set()

    def _promote(self, shard: Shard) -> Promoted:
        def confirm() -> None:
            if self._is_given_up(shard):
                raise RecoveryRequired(f"{shard}: released during promotion")

        # Shards are promoted one after the other: this one may have been lost while it waited.
        confirm()
        done = self._promoter.promote(shard, self.clock.earliest_ms(), confirm)
        self._succeeded_s[shard] = time.monotonic()
        if shard in self.shards():
            self.metrics.promoted(shard, done)
        if done.promoted or done.renewed:
            logger.info(
                "%s: of %d cold requests %d were promoted, %d renewed",
                shard, done.cold, done.promoted, done.renewed,
            )  # fmt: skip
        return done
