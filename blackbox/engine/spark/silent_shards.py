"""Shards of which Kafka returns nothing: a batch would wait for them, and all other shards with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import NamedTuple

from blackbox.journal.answering_shards import answering_shards
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.spark.intake")

# Longer than a consumer takes to report how far it has fetched, if there are only aborted records.
TRY_S = 2.5
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0


class _Omission(NamedTuple):
    why: str
    until_s: float
    pause_s: float
    # False once it is read again. The entry stays, because it says how long the last pause was.
    is_out: bool = True


class SilentShards:
    """The shards that are not read until a separate check finds that Kafka returns their records again.

    Safe for use from two threads at once.
    """

    def __init__(self, access: KafkaAccess) -> None:
        self._access = access
        self._omissions: dict[Shard, _Omission] = {}
        self._lock = Lock()

    def why(self) -> dict[Shard, str]:
        return {shard: left.why for shard, left in list(self._omissions.items()) if left.is_out}

    def leave(self, shard: Shard, why: str) -> None:
        """Leave this shard out until a check finds that it can be read."""
        now = time.monotonic()
        with self._lock:
            before = self._omissions.get(shard)
            pause_s = FIRST_PAUSE_S
            # Silent again soon after its return, which cost a batch 3 to 4 s: the pause doubles.
            if before is not None and now < before.until_s + LONGEST_PAUSE_S:
                pause_s = min(LONGEST_PAUSE_S, 2 * before.pause_s)
            self._omissions[shard] = _Omission(why, now + pause_s, pause_s)
        logger.warning("%s is left out: %s; the other shards continue", shard, why)

    def retain_only(self, shards: Iterable[Shard]) -> None:
        with self._lock:
            self._omissions = {
                shard: self._omissions[shard] for shard in shards if shard in self._omissions
            }

    def check(self, starts: Mapping[Shard, int]) -> None:
        """Check the shards whose pause is over, each at the offset where it is to be read on."""
        now = time.monotonic()
        due = {
            shard: starts[shard]
            for shard, left in list(self._omissions.items())
            if left.is_out and left.until_s <= now and shard in starts
        }
        given = answering_shards(self._access, due, TRY_S) if due else set()
        with self._lock:
            for shard in due.keys() & self._omissions.keys():
                left, is_out = self._omissions[shard], shard not in given
                self._omissions[shard] = left._replace(until_s=now + left.pause_s, is_out=is_out)
        for shard in given:
            logger.info("%s can be read again", shard)
