"""All that indexes hold, read without taking part in them.

For jobs that compare whole indexes with the journals. They alone walk sets and the key space
(ZSCAN, SCAN): each call is short, but there are as many as the entries take. A service never does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from blackbox.index.bits import Bits
from blackbox.index.connection import Session, pack, pool
from blackbox.index.keys import Keys
from blackbox.request import Shard

PAGE = 1000
KEYS_A_CALL = 4000
_DIGITS = 16


class Held(NamedTuple):
    """An entry. `at_ms` is when it will be looked at: its due time, later if put off."""

    offset: int
    at_ms: int
    has_payload: bool


class Dump:
    """Reads beside a live service. Every method raises IndexLost when Redis does not answer.

    Not safe for use from two threads at once.
    """

    def __init__(self, url: str) -> None:
        self._connections = pool(url)
        self._session = Session(self._connections)

    def entries(self, shard: Shard) -> Iterator[list[Held]]:
        """The entries of a shard: those that are there throughout, some of those that are not.

        One may come more than once. A payload counts as missing only when it still is at a second
        look, and its entry still there.
        """
        keys = Keys(shard)
        cursor = b"0"
        while True:
            scan = pack("ZSCAN", keys.due, cursor, "COUNT", PAGE)
            cursor, flat = self._session.run([scan], 1)[0]
            scores = dict(zip(flat[::2], flat[1::2], strict=True))
            bare = self._bare(keys, list(scores))
            yield [
                Held(int(name, 16), int(float(score)), name not in bare)
                for name, score in scores.items()
            ]
            if cursor == b"0":
                return

    def orphans(self, shards: Collection[Shard]) -> Iterator[list[tuple[Shard, int]]]:
        """Payloads in these shards whose entry is gone, as it still is at a second look.

        Walks the whole key space once. One may come more than once.
        """
        known = {Keys(shard).message(b""): shard for shard in shards}
        cursor = b"0"
        while True:
            scan = pack("SCAN", cursor, "MATCH", "blackbox:{*}:msg:*", "COUNT", KEYS_A_CALL)
            cursor, found = self._session.run([scan], 1)[0]
            names: dict[Shard, list[bytes]] = {}
            for key in found:
                shard = known.get(key[:-_DIGITS])
                if shard is not None:
                    names.setdefault(shard, []).append(key[-_DIGITS:])
            yield [
                (shard, int(name, 16))
                for shard, some in names.items()
                for name in self._left_behind(Keys(shard), some)
            ]
            if cursor == b"0":
                return

    def cold(self, shard: Shard) -> Iterator[list[int]]:
        """The requests of the cold tier."""
        flat = self._session.run([pack("HGETALL", Keys(shard).cold)], 1)[0]
        for segment, bitmap in zip(flat[::2], flat[1::2], strict=True):
            yield list(Bits({int(segment): bitmap}))

    def close(self) -> None:
        self._session.close()
        self._connections.disconnect()

    def _bare(self, keys: Keys, names: Sequence[bytes]) -> set[bytes]:
        """Entries without a payload: it is gone, the entry is there, and it is gone."""
        if not names:
            return set()
        payloads = pack("EXISTS", *(keys.message(name) for name in names))
        if self._session.run([payloads], 1)[0] == len(names):
            return set()
        gone = self._with_payload(keys, names, wanted=False)
        there = self._in_set(keys, gone, wanted=True)
        return set(self._with_payload(keys, there, wanted=False))

    def _left_behind(self, keys: Keys, names: Sequence[bytes]) -> list[bytes]:
        """Payloads without an entry: it is gone, the payload is there, and it is gone."""
        gone = self._in_set(keys, names, wanted=False)
        there = self._with_payload(keys, gone, wanted=True)
        return self._in_set(keys, there, wanted=False)

    def _in_set(self, keys: Keys, names: Sequence[bytes], *, wanted: bool) -> list[bytes]:
        if not names:
            return []
        scores = self._session.run([pack("ZMSCORE", keys.due, *names)], 1)[0]
        return [n for n, score in zip(names, scores, strict=True) if (score is not None) == wanted]

    def _with_payload(self, keys: Keys, names: Sequence[bytes], *, wanted: bool) -> list[bytes]:
        commands = [pack("EXISTS", keys.message(name)) for name in names]
        found = self._session.run(commands, len(commands)) if commands else []
        return [name for name, count in zip(names, found, strict=True) if bool(count) == wanted]
