"""A walk along the requests of a shard, from the last low-water mark to the first pending request.

It takes minutes, while the service goes on. Its result counts only if all of it came from one Redis
under one opening: over one connection, with the same token and positions that never go back.
"""

from __future__ import annotations

import orjson

from blackbox.core.bits import Bits
from blackbox.core.plan import Positions
from blackbox.index.connection import Connections, RedisSession, pack
from blackbox.index.keys import SENTINEL, Keys
from blackbox.index.packed_commands import zmscore
from blackbox.records.errors import RecoveryRequired
from blackbox.records.request import Shard

# Requests per call: some 0.6 ms of Redis. With half as many, each costs the client 25 % more.
SLICE = 1000


class WalkVoid(RecoveryRequired):
    """The walk read inconsistent data: walk again later."""


class Walk:
    """One walk. Raises IndexLost when the connection fails, WalkVoid when its result could not be used."""

    def __init__(self, shard: Shard, connections: Connections, token: bytes) -> None:
        self._shard = shard
        self._keys = Keys(shard)
        self._token = token
        self._redis = RedisSession(connections, self._keys.state)
        self.positions = Positions(-1, -1)
        self._at = 0
        self._lowest: int | None = None
        self._begin()

    @property
    def lowest(self) -> int:
        """All requests below it have ended. After the whole walk it is the lowest pending request, or the end."""
        return min(self._at, self._end)

    @property
    def _end(self) -> int:
        """Where the walk ends, as far as is known: no later than at the position that was read at first."""
        end = self.positions.requests
        return end if self._lowest is None else min(end, self._lowest)

    def slice(self) -> bool:
        """Check some more requests; return False when there is no need to go on."""
        end = self._end
        offsets = range(self._at, min(self._at + SLICE, end))
        if not offsets:
            return False
        look = zmscore(self._keys.due, offsets)
        scores, *about = self._redis.run([look, *self._about()])
        self._check(*about)
        if scores.count(None) < len(scores):  # rare: most have ended
            self._lowest = next(
                o for o, score in zip(offsets, scores, strict=True) if score is not None
            )
        self._at = offsets.stop
        return self._at < self._end

    def slices(self) -> int:
        """The largest number of slices that are left."""
        # Below the first pending request, no more can have ended than in all.
        pending = int(self._redis.ask("ZCARD", self._keys.due)) - 1
        ended = min(self._end - self._at, self.positions.requests - self._at - pending)
        return 1 + max(0, ended) // SLICE

    def close(self) -> None:
        self._redis.close()

    def _begin(self) -> None:
        keys = self._keys
        receipts, *others = self._about()
        known = [
            pack("HGETALL", keys.skip),
            pack("HMGET", keys.state, "verdicts_below", "judged", "mark", "known_from", "cold"),
            pack("ZRANGE", keys.early, -1, -1),
        ]
        # In this order, the receipts below the first offset name only requests below the second.
        # Cold before hot: a request that is promoted in between is seen in one of the two.
        look = [receipts, *known, *others, pack("HKEYS", keys.cold)]
        found, skipped, state, early, *about, segments = self._redis.run(look)
        *known_below, mark, known_from, cold = state
        self.positions = self._check(found, *about)
        self._check_known(skipped, known_below, early)
        # A request that has ended stays ended: below the last mark, none is checked again. A scan
        # of all pending requests would cost Redis three times as much for each, at every walk.
        self._at = int(known_from or 0) if mark is None else orjson.loads(mark)[0]
        # The state counts cold requests: if Redis lost only their key, the mark would pass them.
        if int(cold or 0) > 0 and not segments:
            raise WalkVoid(f"{self._shard}: Redis lost a single key, {keys.cold.decode()}")
        if segments:
            first = min(map(int, segments))
            bitmap, *about = self._redis.run([pack("HGET", keys.cold, first), *self._about()])
            self._check(*about)
            lowest = next(iter(Bits({first: bitmap or b""})), None)
            if lowest is None:  # taken from cold between the two reads
                raise WalkVoid(f"{self._shard}: the cold tier changed; repeating the walk later")
            self._lowest = lowest

    def _check_known(
        self, skipped: list[bytes], known_below: list[bytes | None], early: list[bytes]
    ) -> None:
        """Raise WalkVoid if receipts may name requests that are not read yet."""
        # Then the two positions do not form a pair. And a request that was replaced early is needed
        # until its replacement is read: else a rebuild would judge the replacement to be too late.
        ended = Bits({int(s): bits for s, bits in zip(skipped[::2], skipped[1::2], strict=True)})
        known_to = max(
            *(int(number or 0) for number in known_below), *(int(name, 16) + 1 for name in early), 0
        )
        if known_to > self.positions.requests or any(o >= self.positions.requests for o in ended):
            raise WalkVoid(
                f"{self._shard}: some requests have a known outcome but are not yet read from Kafka"
            )

    def _about(self) -> list[bytes]:
        """Reads that identify the index."""
        # Receipts first: others may write in between, and these name only requests read by then.
        keys = self._keys
        return [
            pack("GET", keys.receipts),
            pack("HMGET", keys.state, "token", "rebuild", "requests"),
            pack("ZSCORE", keys.due, SENTINEL),
        ]

    def _check(
        self, receipts: bytes | None, state: list[bytes | None], sentinel: bytes | None
    ) -> Positions:
        token, rebuild, requests = state
        if token != self._token or rebuild is not None or requests is None or receipts is None:
            raise WalkVoid(f"{self._shard}: the index was opened again; repeating the walk later")
        found = Positions(int(requests), int(receipts))
        if sentinel is None or found.requests < self.positions.requests:
            raise WalkVoid(f"{self._shard}: the index lost data; repeating the walk later")
        if found.receipts < self.positions.receipts:
            raise WalkVoid(f"{self._shard}: receipts went back to {found.receipts}")
        return found
