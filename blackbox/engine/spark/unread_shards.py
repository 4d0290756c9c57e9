"""Why shards that are assigned to this driver are not read, and for how long."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from threading import Lock
from typing import NamedTuple

from blackbox.engine.metrics import Metrics
from blackbox.engine.spark.shard_result import ShardResult
from blackbox.engine.spark.silent_shards import SilentShards
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.spark.intake")

# How long a shard that could not take a batch is left out. A try delays the other shards of the batch.
PAUSE_S = 1.0


class _Behind(NamedTuple):
    why: str
    until_s: float


class UnreadShards:
    """Shards that Kafka does not return (`unreachable`, or `silent` in a batch), or that could not take a batch.

    Safe for use from two threads at once.
    """

    def __init__(self, silent: SilentShards, metrics: Metrics) -> None:
        self._silent = silent
        self._metrics = metrics
        self._unreachable: dict[Shard, str] = {}
        self._behind: dict[Shard, _Behind] = {}
        self._shown: frozenset[Shard] = frozenset()
        self._lock = Lock()

    def why(self) -> dict[Shard, str]:
        behind = {shard: left.why for shard, left in self._behind.items()}
        return self._unreachable | behind | self._silent.why()

    def unreachable(self) -> frozenset[Shard]:
        return frozenset(self._unreachable)

    def waiting(self) -> frozenset[Shard]:
        """The shards that must not be tried now."""
        now_s = time.monotonic()
        behind = [shard for shard, left in self._behind.items() if left.until_s > now_s]
        return frozenset([*behind, *self._silent.why()])

    def retain_only(self, wanted: Collection[Shard]) -> None:
        self._silent.retain_only(wanted)
        with self._lock:
            self._unreachable = {at: w for at, w in self._unreachable.items() if at in wanted}
            self._behind = {at: left for at, left in self._behind.items() if at in wanted}

    def looked_at(self, shards: Collection[Shard], cannot: Mapping[Shard, str]) -> None:
        """Note which of these shards cannot be read from Kafka now."""
        before = {at: why for at, why in self._unreachable.items() if at in shards}
        for shard in cannot.keys() - before.keys():
            logger.warning("%s cannot be read: %s; the other shards continue", shard, cannot[shard])
        for shard in before.keys() - cannot.keys():
            logger.info("%s can be read again", shard)
        with self._lock:
            others = {at: why for at, why in self._unreachable.items() if at not in shards}
            self._unreachable = others | dict(cannot)

    def took(self, shard: Shard) -> None:
        """The shard has all of its batch."""
        if shard in self._behind:
            with self._lock:
                self._behind = {at: left for at, left in self._behind.items() if at != shard}
            logger.info("%s is read again", shard)

    def leave_out(self, stored: ShardResult, why: str) -> None:
        """Leave out a shard that was silent, or could not take its batch."""
        shard = stored.shard
        if stored.is_silent:
            self._silent.leave(shard, why)
            return
        if shard not in self._behind:
            logger.warning("%s cannot take the batch: %s; the other shards continue", shard, why)
        with self._lock:
            self._behind = self._behind | {shard: _Behind(why, time.monotonic() + PAUSE_S)}

    def show(self, wanted: frozenset[Shard]) -> None:
        """Show in the metrics which of the assigned shards are not read."""
        why_not = self.why()
        for shard in wanted:
            self._metrics.show(shard, shard_unread=shard in why_not)
        for shard in self._shown - wanted:
            self._metrics.given_up(shard, ("shard_unread",))
        self._shown = wanted
