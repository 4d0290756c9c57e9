"""What all shards share in Redis: counts by the second, how much of a caller is pending, paused targets.

Nothing here is needed to be right about a request: what is lost counts from nought again, and
nothing is paused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import redis

from blackbox.doubt import IndexFull, IndexLost
from blackbox.index.connection import Clients, Connections, reason
from blackbox.index.inspector import pairs
from blackbox.index.keys import PREFIX, Keys
from blackbox.plan import Second
from blackbox.request import Shard

_RESERVED = f"{PREFIX}{{targets}}:reserved".encode()
KEPT = 600
"""Seconds whose counts are kept, the latest ones: shards may read records of one second minutes apart."""

LOOKED_AT = 1000


class Shared:
    """Every method raises IndexLost when Redis does not answer, IndexFull when it has no room.

    Safe from any thread.
    """

    def __init__(self, connections: Connections) -> None:
        self._clients = Clients(connections)

    def count(self, more: Mapping[Second, int]) -> dict[Second, int]:
        """Add these; returns how many each had before."""
        before: dict[Second, int] = {}
        for second, added in more.items():
            key = f"{PREFIX}{{{second.kind}:{second.name}}}:counts".encode()
            total, kept = self._together(key, ("HINCRBY", key, second.at_s, added), ("HLEN", key))
            if kept > 2 * KEPT:
                self._forget(key)
            before[second] = int(total) - added
        return before

    def reserve(self, name: str, count: int, at_least: int) -> int:
        """Take the next `count` numbers of a sequence that all share; the first of them.

        It is `at_least` what is asked for: a sequence that fell behind goes on from there.
        """
        (end,) = self._together(_RESERVED, ("HINCRBY", _RESERVED, name, count))
        if int(end) - count >= at_least:
            return int(end) - count
        self._together(_RESERVED, ("HSET", _RESERVED, name, at_least + count))
        return at_least

    def pending(self, caller: str, shards: Iterable[Shard]) -> int:
        """How many requests of a caller, whose pending ones are counted, wait in these shards."""
        return sum(self._pending(caller, Keys(shard)) for shard in shards)

    def paused(self, shards: Iterable[Shard]) -> dict[str, int]:
        """The targets that get nothing now from some of these, and since when, epoch ms."""
        found: dict[str, int] = {}
        for shard in shards:
            key = Keys(shard).paused
            (held,) = self._together(key, ("HGETALL", key))
            for topic, since_ms in pairs(held):
                name = topic.decode()
                found[name] = min(int(since_ms), found.get(name, int(since_ms)))
        return found

    def pause(self, topic: str, now_ms: int, shards: Iterable[Shard]) -> None:
        """Each shard has it with its own keys, so that no other server is asked before a delivery.

        What is paused already stays so since then, and is paused where it was not.
        """
        shards = list(shards)
        since_ms = self.paused(shards).get(topic, now_ms)
        for shard in shards:
            key = Keys(shard).paused
            self._together(key, ("HSET", key, topic, since_ms))

    def resume(self, topic: str, shards: Iterable[Shard]) -> None:
        for shard in shards:
            key = Keys(shard).paused
            self._together(key, ("HDEL", key, topic))

    def close(self) -> None:
        self._clients.close()

    def _pending(self, caller: str, keys: Keys) -> int:
        """Without those past due that are pending no more: recovery ends some whose caller it does not know."""
        theirs, now_ms = keys.of(caller), time.time_ns() // 1_000_000
        count, late = self._together(
            theirs,
            ("ZCARD", theirs),
            ("ZRANGE", theirs, "-inf", now_ms, "BYSCORE", "LIMIT", 0, LOOKED_AT),
        )
        if not late:
            return int(count)
        (scores,) = self._together(keys.due, ("ZMSCORE", keys.due, *late))
        ended = [name for name, score in zip(late, scores, strict=True) if score is None]
        if ended:
            self._together(theirs, ("ZREM", theirs, *ended))
        return int(count) - len(ended)

    def _forget(self, key: bytes) -> None:
        (held,) = self._together(key, ("HGETALL", key))
        seconds = sorted((int(second) for second, _ in pairs(held)), reverse=True)
        self._together(key, ("HDEL", key, *seconds[KEPT:]))

    def _together(self, key: bytes, *commands: tuple[bytes | str | int, ...]) -> list[Any]:
        try:
            pipeline = self._clients.of(key).pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
            return list(pipeline.execute())
        except redis.exceptions.OutOfMemoryError as error:
            raise IndexFull(f"Redis has no memory left: {error}") from error
        except (redis.RedisError, OSError) as error:
            raise IndexLost(f"Redis does not answer: {reason(error)}") from error
