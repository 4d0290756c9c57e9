"""A walk over all that is pending in a shard: from where on its request topic is still needed.

It takes minutes beside a service that goes on. What it finds counts only if one Redis, as one owner
opened it, told all of it: over one connection, with the same token and labels that never go back.
"""

from __future__ import annotations

from blackbox.doubt import Doubt
from blackbox.index.bits import Bits
from blackbox.index.connection import Connections, Session, pack
from blackbox.index.keys import SENTINEL, Keys
from blackbox.plan import Labels
from blackbox.request import Shard

SLICE = 500
"""Entries a call: some 0.2 ms of Redis."""


class WalkVoid(Doubt):
    """What was seen does not belong together: walk again, later."""


class Walk:
    """One walk. Raises IndexLost when the connection fails, WalkVoid when the index was opened anew."""

    def __init__(self, shard: Shard, connections: Connections, token: bytes) -> None:
        self._shard = shard
        self._keys = Keys(shard)
        self._token = token
        self._session = Session(connections, self._keys.state)
        self._cursor = b"0"
        self.labels = Labels(-1, -1)
        self._lowest = b"~"
        self._begin()

    @property
    def lowest(self) -> int:
        """The lowest request seen so far that is pending, or the label `requests` as it was at first."""
        found = self._lowest
        return (
            self.labels.requests if found == SENTINEL else min(self.labels.requests, int(found, 16))
        )

    def slice(self) -> bool:
        """Look at some more entries; False when all have been seen."""
        scan = pack("ZSCAN", self._keys.due, self._cursor, "COUNT", SLICE)
        (self._cursor, flat), *about = self._session.run([scan, *self._about()], 4)
        self._check(*about)
        self._lowest = min([self._lowest, *flat[::2]])
        return bool(self._cursor != b"0")

    def slices(self) -> int:
        """About how many slices there are to look at."""
        count = self._session.run([pack("ZCARD", self._keys.due)], 1)[0]
        return 1 + int(count) // SLICE

    def close(self) -> None:
        self._session.close()

    def _begin(self) -> None:
        keys = self._keys
        receipts, *others = self._about()
        known = [
            pack("HGETALL", keys.skip),
            pack("HMGET", keys.state, "told", "judged"),
            pack("ZRANGE", keys.early, -1, -1),
        ]
        look = [receipts, *known, *others, pack("HKEYS", keys.cold)]
        found, skipped, told, early, *about, segments = self._session.run(look, 7)
        self.labels = self._check(found, *about)
        self._check_known(skipped, told, early)
        if segments:
            first = min(map(int, segments))
            bitmap, *about = self._session.run([pack("HGET", keys.cold, first), *self._about()], 4)
            self._check(*about)
            lowest = next(iter(Bits({first: bitmap or b""})), None)
            if lowest is None:  # thawed between the two reads
                raise WalkVoid(f"{self._shard}: the cold tier changed; walking again later")
            self._lowest = b"%016x" % lowest

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
        if known_to > self.labels.requests or any(o >= self.labels.requests for o in ended):
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
    ) -> Labels:
        token, rebuild, requests = state
        if token != self._token or rebuild is not None or requests is None or receipts is None:
            raise WalkVoid(f"{self._shard}: the index was opened anew; walking again later")
        found = Labels(int(requests), int(receipts))
        if sentinel is None or found.requests < self.labels.requests:
            raise WalkVoid(f"{self._shard}: the index lost something; walking again later")
        if found.receipts < self.labels.receipts:
            raise WalkVoid(f"{self._shard}: receipts went back to {found.receipts}")
        return found
