"""Checks of Redis' clock and memory, and of the callers' rules, which an engine makes once a second."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from threading import Lock

from blackbox.config.settings import Settings
from blackbox.config.wiring import rules
from blackbox.engine.metrics import Metrics
from blackbox.index.redis_servers import PAUSE_AT, NotAnswered, RedisServers
from blackbox.records.clock import MAX_SKEW_MS, Clock
from blackbox.records.errors import RecoveryRequired

logger = logging.getLogger("blackbox.engine.redis_monitor")

RESUME_AT = 0.75
# After this many checks, a second apart, between the two shares, requests are read all the same:
# requests that are due in a week may use 80 % until then, and nothing else would be read.
PATIENT_CHECKS = 10


@dataclass(eq=False, repr=False)
class RedisMonitor:
    """Keeps the clock, and calls `pause` when Redis has no room and `resume` when it has room again."""

    settings: Settings
    metrics: Metrics
    clock: Clock
    _: KW_ONLY
    pause: Callable[[], None]
    resume: Callable[[], None]

    def __post_init__(self) -> None:
        self._rules = rules(self.settings)
        self._redis = RedisServers(self.settings.redis_url.get_secret_value())
        self._lock = Lock()
        self._is_paused = False
        self._checks_between = 0
        self._clocks_apart = False

    def observe_clock(self) -> None:
        """Read Redis' clock. Raises IndexLost when Redis does not answer."""
        self.clock.observe(self._redis.now_ms())

    def check(self) -> None:
        """Look once; a Redis that does not answer is only logged."""
        if self._rules is not None:
            # Reads the file again if it was changed, even while no request arrives.
            self._rules.rules()
            self.metrics.rules_valid.set(self._rules.problem is None)
        try:
            self.observe_clock()
            used = self._memory_used()
        except RecoveryRequired as reason:
            logger.warning("%s", reason)
            return
        self._compare_clocks()
        if used >= PAUSE_AT:
            self._checks_between = 0
            self.pause_intake(f"Redis has used {used:.0%} of maxmemory; requests wait in Kafka")
        elif used <= RESUME_AT or self._checks_between >= PATIENT_CHECKS:
            self._resume_intake()
        else:
            self._checks_between += 1

    def pause_intake(self, why: str) -> None:
        """Leave requests in Kafka until Redis has room again."""
        # Intake's thread calls this too, when Redis refuses a store. `pause` is called under the
        # lock, so that a `resume` at the same moment cannot overtake it.
        with self._lock:
            if self._is_paused:
                return
            self._is_paused, self._checks_between = True, 0
            self.metrics.paused.set(1)
            self.pause()
        logger.warning("%s", why)

    def _memory_used(self) -> float:
        """The used share of maxmemory; 0 if Redis does not report it."""
        try:
            return self._redis.memory_used()
        except NotAnswered:
            # The user may not run INFO: intake then pauses when Redis refuses a store.
            return 0.0

    def _resume_intake(self) -> None:
        with self._lock:
            if not self._is_paused:
                return
            self._is_paused = False
            self.metrics.paused.set(0)
            self.resume()
        logger.info("Redis has room again; reading requests")

    def _compare_clocks(self) -> None:
        skew_ms = self.clock.skew_ms()
        self.metrics.skew.set(skew_ms / 1000)
        were_apart, self._clocks_apart = self._clocks_apart, abs(skew_ms) > MAX_SKEW_MS
        if self._clocks_apart and not were_apart:
            logger.error(
                "the clocks of Redis and this host are %d ms apart; deliveries are late by as "
                "much; synchronise both with NTP", skew_ms,
            )  # fmt: skip
