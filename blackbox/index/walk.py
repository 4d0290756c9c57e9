"""A walk along the requests of a shard: from where on its request topic is still needed.

It asks from the last low-water mark on, request after request, and ends at the first one that is pending.
What has ended stays ended, so each request is asked about once in its life. (To look at all that is
pending each time took Redis three times as long for each, and was most of the time for nothing.)

It takes minutes beside a service that goes on. What it finds counts only if one Redis, as one owner
opened it, told all of it: over one connection, with the same token and positions that never go back.
"""

from __future__ import annotations

import orjson

from blackbox.core.bits import Bits
from blackbox.core.plan import Positions
from blackbox.index.connection import Connections, Session, pack
from blackbox.index.keys import SENTINEL, Keys, zmscore
from blackbox.records.errors import RecoveryRequired
from blackbox.records.request import Shard

SLICE = 1000
"""Requests a call: some 0.6 ms of Redis. With half as many, each costs the client 25 % more."""


class WalkVoid(RecoveryRequired):
    """What was seen does not belong together: walk again, later."""


class Walk:
    """One walk. Raises IndexLost when the connection fails, WalkVoid when the index was opened anew."""

    def __init__(self, shard: Shard, connections: Connections, token: bytes) -> None:
        self._shard = shard
        self._keys = Keys(shard)
        self._token = token
        self._session = Session(connections, self._keys.state)
        self.positions = Positions(-1, -1)
        self._at = 0
        self._lowest: int | None = None
        self._begin()

    @property
    def lowest(self) -> int:
        """The lowest request that is pending, or the position `requests` as it was at first; once all was seen."""
        return (
            self.positions.requests
            if self._lowest is None
            else min(self.positions.requests, self._lowest)
        )

    def slice(self) -> bool:
        """Ask about some more requests; False when there is no need to go on."""
        end = self.lowest
        asked = range(self._at, min(self._at + SLICE, end))
        if not asked:
            return False
        look = zmscore(self._keys.due, asked)
        scores, *about = self._session.run([look, *self._about()])
        self._check(*about)
        if scores.count(None) < len(scores):  # seldom: most have ended
            self._lowest = next(
                o for o, score in zip(asked, scores, strict=True) if score is not None
            )
        self._at = asked.stop
        return self._at < min(end, self.lowest)

    def slices(self) -> int:
        """How many slices there are at most: not more have ended before the first that is pending than in all."""
        pending = int(self._session.ask("ZCARD", self._keys.due)) - 1
        ended = min(self.lowest - self._at, self.positions.requests - self._at - pending)
        return 1 + max(0, ended) // SLICE

    def close(self) -> None:
        self._session.close()

    def _begin(self) -> None:
        keys = self._keys
        receipts, *others = self._about()
        known = [
            pack("HGETALL", keys.skip),
            pack("HMGET", keys.state, "told", "judged", "mark", "known_from", "cold"),
            pack("ZRANGE", keys.early, -1, -1),
        ]
        look = [receipts, *known, *others, pack("HKEYS", keys.cold)]
        found, skipped, state, early, *about, segments = self._session.run(look)
        *told, mark, known_from, cold = state
        self.positions = self._check(found, *about)
        self._check_known(skipped, told, early)
        self._at = int(known_from or 0) if mark is None else orjson.loads(mark)[0]
        if int(cold or 0) > 0 and not segments:
            raise WalkVoid(f"{self._shard}: Redis lost the key {keys.cold.decode()} alone")
        if segments:
            first = min(map(int, segments))
            bitmap, *about = self._session.run([pack("HGET", keys.cold, first), *self._about()])
            self._check(*about)
            lowest = next(iter(Bits({first: bitmap or b""})), None)
            if lowest is None:  # thawed between the two reads
                raise WalkVoid(f"{self._shard}: the cold tier changed; walking again later")
            self._lowest = lowest

    def _check_known(
        self, skipped: list[bytes], told: list[bytes | None], early: list[bytes]
    ) -> None:
        """Receipts may speak of requests that are not read yet: positions of both are no pair then.

        They may have ended, or counted, or have been let in. And what a replacement has ended early is
        needed until that is read: a rebuild would judge it to be too late.
        """
        ended = Bits({int(s): bits for s, bits in zip(skipped[::2], skipped[1::2], strict=True)})
        known_to = max(
            *(int(number or 0) for number in told), *(int(name, 16) + 1 for name in early), 0
        )
        if known_to > self.positions.requests or any(o >= self.positions.requests for o in ended):
            what = "requests whose outcome is known already are still to be read from Kafka"
            raise WalkVoid(f"{self._shard}: {what}")

    def _about(self) -> list[bytes]:
        """Receipts first: others have their turn in between, and these speak only of what is read by then."""
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
            raise WalkVoid(f"{self._shard}: the index was opened anew; walking again later")
        found = Positions(int(requests), int(receipts))
        if sentinel is None or found.requests < self.positions.requests:
            raise WalkVoid(f"{self._shard}: the index lost something; walking again later")
        if found.receipts < self.positions.receipts:
            raise WalkVoid(f"{self._shard}: receipts went back to {found.receipts}")
        return found
