"""From where on shards are to be read: their positions in Redis."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

from blackbox.engine.spark.silent_shards import SilentShards
from blackbox.index.inspector import Inspector
from blackbox.records.errors import RecoveryRequired
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.spark.intake")

# Shards are asked about in parallel, so that a silent node of Redis delays few others.
ASKED_AT_ONCE = 8

Position = int | RecoveryRequired | None
"""The next offset to be read; or why it is not known; None while requests of the shard cannot be stored."""


class StartPositions:
    """The positions of shards, without those that cannot be read: their index is not ready, or they are `silent`."""

    def __init__(self, redis_url: str, silent: SilentShards) -> None:
        self._inspector = Inspector.of(redis_url)
        self._silent = silent
        self._logged: str | None = None

    def of_each(self, wanted: Collection[Shard]) -> dict[Shard, Position]:
        """The position of each of these shards."""
        if not wanted:
            return {}
        with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
            return dict(zip(wanted, threads.map(self._one, wanted), strict=True))

    def readable(self, found: Mapping[Shard, Position]) -> dict[Shard, int]:
        """Those of these positions from which shards can be read now."""
        ready = {shard: at for shard, at in found.items() if isinstance(at, int)}
        self._silent.check(ready)
        self._log({at: why for at, why in found.items() if isinstance(why, RecoveryRequired)})
        return {shard: ready[shard] for shard in ready.keys() - self._silent.why().keys()}

    def _one(self, shard: Shard) -> Position:
        try:
            positions = self._inspector.positions(shard)
            is_ready = positions is not None and self._inspector.is_ready(shard)
        except RecoveryRequired as reason:
            return reason
        return positions.requests if positions is not None and is_ready else None

    def _log(self, failures: Mapping[Shard, RecoveryRequired]) -> None:
        """Log the first failure, unless it was the last that was logged."""
        shard = min(failures, default=None)
        why = None if shard is None else str(failures[shard])
        if why is not None and why != self._logged:
            logger.warning(
                "%d shards cannot be read now, such as %s: %s", len(failures), shard, why
            )
        self._logged = why
