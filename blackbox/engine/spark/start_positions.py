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


class StartPositions:
    """The positions of shards, without those that cannot be read: their index is not ready, or they are `silent`."""

    def __init__(self, redis_url: str, silent: SilentShards) -> None:
        self._inspector = Inspector.of(redis_url)
        self._silent = silent

    def of(self, wanted: Collection[Shard]) -> dict[Shard, int]:
        """The position of each of these shards that can be read now."""
        with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
            found = dict(zip(wanted, threads.map(self.one, wanted), strict=True))
        starts = self._readable(found)
        for shard, failure in found.items():
            if isinstance(failure, RecoveryRequired):
                missing = len(wanted) - len(starts)
                logger.warning(
                    "%d shards cannot be read now, such as %s: %s", missing, shard, failure
                )
                break
        return starts

    def may_read(self, some: Collection[Shard]) -> bool:
        """Whether any of these shards can be read now."""
        return bool(self._readable({shard: self.one(shard) for shard in some}))

    def one(self, shard: Shard) -> int | RecoveryRequired | None:
        """The position of a shard; None while its requests cannot be stored."""
        try:
            positions = self._inspector.positions(shard)
            is_ready = positions is not None and self._inspector.is_ready(shard)
        except RecoveryRequired as reason:
            return reason
        return positions.requests if positions is not None and is_ready else None

    def _readable(self, found: Mapping[Shard, int | RecoveryRequired | None]) -> dict[Shard, int]:
        ready = {shard: at for shard, at in found.items() if isinstance(at, int)}
        self._silent.check(ready)
        return {shard: ready[shard] for shard in ready.keys() - self._silent.why().keys()}
