"""Reads of all that indexes hold, for jobs that compare whole indexes with the journals.

Only these jobs walk sets and the key space (ZSCAN, SCAN). A service never does this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import redis

from blackbox.core.bits import Bits
from blackbox.core.parking import BAND_MS
from blackbox.index import refused_bitmaps
from blackbox.index.connection import RedisSession, pack, pool, servers
from blackbox.index.keys import SENTINEL, Keys
from blackbox.records.errors import IndexLost
from blackbox.records.request import Shard

PAGE = 1000
KEYS_A_CALL = 4000
_DIGITS = 16


class DumpedEntry(NamedTuple):
    """An entry. `at_ms` is its due time, or when it is retried if it was postponed."""

    offset: int
    at_ms: int
    has_payload: bool


class IndexDump:
    """Reads beside a live service. Every method raises IndexLost when Redis does not answer.

    Not safe for use from two threads at once.
    """

    def __init__(self, url: str) -> None:
        self._connections = pool(url)

    def entries(self, shard: Shard) -> Iterator[list[DumpedEntry]]:
        """The entries of a shard: those that exist throughout, and some of those that do not.

        One may come more than once.
        """
        keys = Keys(shard)
        with closing(RedisSession(self._connections, keys.state)) as session:
            look = _SecondLook(session, keys)
            for flat in _scanned(session, ("ZSCAN", keys.due), ("COUNT", PAGE)):
                scores = dict(zip(flat[::2], flat[1::2], strict=True))
                scores.pop(SENTINEL, None)
                bare = look.without_payload(list(scores))
                if bare:  # read after them: a new one is marked together with its entry
                    refused = _refused(session, keys, [int(name, 16) for name in bare])
                    bare = {name for name in bare if int(name, 16) not in refused}
                yield [
                    # `% BAND_MS`: the due time of a parked entry.
                    DumpedEntry(int(name, 16), int(float(score)) % BAND_MS, name not in bare)
                    for name, score in scores.items()
                ]

    def orphans(self, shards: Collection[Shard]) -> Iterator[list[tuple[Shard, int]]]:
        """Payloads in these shards whose entry is gone, and still is at a second look.

        Walks the whole key space once. One may come more than once.
        """
        known = {Keys(shard).message(b""): shard for shard in shards}
        try:
            everywhere = servers(self._connections).values()
        except (redis.RedisError, OSError) as error:
            raise IndexLost(f"cannot connect to Redis: {error}") from error
        for server in everywhere:
            with closing(RedisSession(server)) as session:
                yield from _orphans(session, known)

    def cold(self, shard: Shard) -> Iterator[list[int]]:
        keys = Keys(shard)
        with closing(RedisSession(self._connections, keys.state)) as session:
            cold = _bitmaps(session, keys.cold)
        for segment, bitmap in cold.bitmaps.items():
            yield list(Bits({segment: bitmap}))

    def ignored(self, shard: Shard) -> Iterator[list[int]]:
        """The conditional records that did not count and are in no receipt yet. One may come more than once."""
        keys = Keys(shard)
        with closing(RedisSession(self._connections, keys.state)) as session:
            for flat in _scanned(session, ("ZSCAN", keys.ignored), ("COUNT", PAGE)):
                yield [int(name, 16) for name in flat[::2]]

    def close(self) -> None:
        self._connections.disconnect()


def _bitmaps(session: RedisSession, key: bytes) -> Bits:
    flat = session.ask("HGETALL", key)
    return Bits({int(segment): bits for segment, bits in zip(flat[::2], flat[1::2], strict=True)})


def _refused(session: RedisSession, keys: Keys, offsets: Sequence[int]) -> Mapping[int, str]:
    fields = refused_bitmaps.fields(offsets)
    return refused_bitmaps.causes_of(offsets, fields, session.ask("HMGET", keys.refused, *fields))


def _scanned(
    session: RedisSession, what: tuple[bytes | str, ...], how: tuple[str | int, ...]
) -> Iterator[list[bytes]]:
    cursor = None
    while cursor != b"0":
        cursor, found = session.ask(*what, cursor or b"0", *how)
        yield found


def _orphans(session: RedisSession, known: dict[bytes, Shard]) -> Iterator[list[tuple[Shard, int]]]:
    messages = ("MATCH", "blackbox:{*}:msg:*", "COUNT", KEYS_A_CALL)
    for found in _scanned(session, ("SCAN",), messages):
        names: dict[Shard, list[bytes]] = {}
        for key in found:
            shard = known.get(key[:-_DIGITS])
            if shard is not None:
                names.setdefault(shard, []).append(key[-_DIGITS:])
        yield [
            (shard, int(name, 16))
            for shard, some in names.items()
            for name in _SecondLook(session, Keys(shard)).without_entry(some)
        ]


class _SecondLook:
    """A second look at some names of a shard."""

    # Between two reads, a live service may store or remove an entry and its payload. One counts as
    # missing only if the other is there after the first look, and the one is still missing then.

    def __init__(self, session: RedisSession, keys: Keys) -> None:
        self._redis = session
        self._keys = keys

    def without_payload(self, names: Sequence[bytes]) -> set[bytes]:
        if not names:
            return set()
        if self._redis.ask("EXISTS", *map(self._keys.message, names)) == len(names):
            return set()
        gone = self._with_payload(names, wanted=False)
        there = self._in_set(gone, wanted=True)
        return set(self._with_payload(there, wanted=False))

    def without_entry(self, names: Sequence[bytes]) -> list[bytes]:
        gone = self._in_set(names, wanted=False)
        there = self._with_payload(gone, wanted=True)
        return self._in_set(there, wanted=False)

    def _in_set(self, names: Sequence[bytes], *, wanted: bool) -> list[bytes]:
        if not names:
            return []
        scores = self._redis.ask("ZMSCORE", self._keys.due, *names)
        return [n for n, score in zip(names, scores, strict=True) if (score is not None) == wanted]

    def _with_payload(self, names: Sequence[bytes], *, wanted: bool) -> list[bytes]:
        found = self._redis.run(pack("EXISTS", self._keys.message(name)) for name in names)
        return [name for name, count in zip(names, found, strict=True) if bool(count) == wanted]
