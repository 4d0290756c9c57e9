"""The commands that change a shard's index, packed; nothing here is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from secrets import token_hex
from typing import Any

import orjson

from blackbox.core.bits import SEGMENT, Bits
from blackbox.core.parking import BAND_MS
from blackbox.core.plan import Binding, Plan, View
from blackbox.index.connection import pack
from blackbox.index.keys import IDS_SENTINEL, SENTINEL, Keys
from blackbox.index.packed_commands import set_ex_template, zadd
from blackbox.index.stored_fields import FORMAT
from blackbox.records.receipt import Claim
from blackbox.records.request import Shard, member

# For parked entries and dead letters. Not all is in Kafka: only its payload says that an entry is a
# dead letter, or a replacement that was in time, and retention may have removed the record. If the
# payload of a dead letter expired in a long outage, its record would be read and delivered.
PARKED_FOR_S = 10 * 365 * 86_400
# Elements per command: 10,000 block Redis for some 4 ms, and Lua's `unpack` fails near 8,000.
CHUNK = 1000


class CommandBuilder:
    """Makes commands for the keys of one shard."""

    def __init__(self, shard: Shard, grace_s: int) -> None:
        self._grace_s = grace_s
        self._keys = keys = Keys(shard)
        self._set_ex = set_ex_template(keys)
        self._set_ex_if_there = set_ex_template(keys, only_there=True)
        self._look_largest = pack("HGET", keys.state, "largest")
        # A new one for each opening: positions alone do not show that Redis was rolled back and
        # brought to the same place again by another owner.
        self._token = token_hex(8).encode()
        # fields of the state, and the keys that must exist if the field is above 0
        self._expected = {
            b"named": keys.ids,  # whether there ever was a caller id
            b"cold": keys.cold,  # how many requests are cold
            b"moved": keys.moved,  # whether promotion ever brought one in
            b"ended": keys.ended,  # whether a cancel ever ended one that only Kafka knew
            b"refused": keys.refused,  # whether one was refused that has no payload
            b"ahead": keys.skip,  # up to where `skip` may have something
        }

    def _read_positions(self, *more: bytes) -> list[bytes]:
        return [
            pack("HMGET", self._keys.state, "format", "requests", *more),
            pack("GET", self._keys.receipts),
        ]

    def _write_requests(self, position: int, *more: bytes | str | int) -> bytes:
        return pack("HSET", self._keys.state, "format", FORMAT, "requests", position, *more)

    def _write_receipts(self, position: int) -> bytes:
        return pack("SET", self._keys.receipts, position)

    def _forget_skipped(self, before: int, position: int) -> Iterator[bytes]:
        """The commands that drop the segments of `skip` which a new position leaves behind."""
        for segments in chunks(range(before // SEGMENT, position // SEGMENT)):
            yield pack("HDEL", self._keys.skip, *segments)

    def _bound(self, binding: Binding | None) -> tuple[bytes | str, ...]:
        bound = {} if binding is None else binding._asdict()
        return (b"token", self._token, *chain.from_iterable(bound.items()))

    def _set_payload(
        self,
        offset: int,
        stored: bytes,
        due_ms: int,
        now_ms: int,
        *,
        is_letter: bool,
        only_there: bool = False,
    ) -> bytes:
        expires_s = b"%d" % self._expires_s(due_ms, now_ms, is_letter=is_letter)
        template = self._set_ex_if_there if only_there else self._set_ex
        return template % (offset, len(stored), stored, len(expires_s), expires_s)

    def _keep_payload(self, offset: int, due_ms: int, now_ms: int) -> bytes:
        """The command that keeps a payload at least as long as an entry with this score needs it."""
        name = self._keys.message(member(offset))
        # It may be a dead letter's, whose time must not become shorter; `EXPIRE … GT` is unknown to Redis 6.2.
        return pack("EXPIRE", name, self._expires_s(due_ms, now_ms, is_letter=True))

    def _expires_s(self, due_ms: int, now_ms: int, *, is_letter: bool) -> int:
        if due_ms >= BAND_MS:
            return PARKED_FOR_S + self._grace_s
        # Redis refuses an `EX` of 0 or less.
        left_s = (due_ms - now_ms + 999) // 1000 if due_ms > now_ms else 0
        if is_letter:
            left_s += PARKED_FOR_S
        return left_s + self._grace_s

    def _remove(self, offsets: Sequence[int]) -> Iterator[bytes]:
        for chunk in chunks(offsets):
            names = [member(offset) for offset in chunk]
            yield pack("ZREM", self._keys.due, *names)
            yield pack("UNLINK", *(self._keys.message(name) for name in names))

    def _set_caller_ids(self, holders: Mapping[str, int | None]) -> Iterator[bytes]:
        for chunk in chunks([(c, offset) for c, offset in holders.items() if offset is not None]):
            flat = [part for c, offset in chunk for part in (c.encode(), member(offset))]
            yield pack("HSET", self._keys.ids, *flat, IDS_SENTINEL, b"")
        for freed in chunks([c for c, offset in holders.items() if offset is None]):
            yield pack("HDEL", self._keys.ids, *freed)

    def _add_members(self, key: bytes, offsets: Sequence[int]) -> Iterator[bytes]:
        return zadd_chunks(key, [(offset, offset) for offset in offsets])

    def _add_to_lasting_set(
        self, key: bytes, name: bytes, scored: Sequence[tuple[int, int]]
    ) -> Iterator[bytes]:
        # The sentinel keeps the key in existence: if the key is missing, Redis lost it.
        if scored:
            yield pack("ZADD", key, "+inf", SENTINEL)
            yield pack("HSET", self._keys.state, name, 1)
        yield from zadd_chunks(key, scored)

    def _move_cold(self, plan: Plan, view: View) -> Iterator[bytes]:
        if not plan.to_cold and not plan.from_cold:
            return
        assert isinstance(view.cold, Bits)
        changed = view.cold.changed(plan.to_cold, plan.from_cold)
        for segment, bitmap in changed.items():
            if bitmap:
                yield pack("HSET", self._keys.cold, segment, bitmap)
            else:
                yield pack("HDEL", self._keys.cold, segment)
        more = len(plan.to_cold) - len(plan.from_cold)
        yield pack("HINCRBY", self._keys.state, "cold", more)

    def _doubt(self, claims: Mapping[int, Claim]) -> Iterator[bytes]:
        if claims:
            yield pack(
                "HSET", self._keys.state, "doubtful", orjson.dumps([*map(tuple, claims.values())])
            )
        else:
            yield pack("HDEL", self._keys.state, "doubtful")

    def _look_expected(self) -> list[bytes]:
        return [pack("EXISTS", key) for key in self._expected.values()]

    def _lost(
        self,
        last: list[bytes],
        expected: Sequence[bytes | None],
        there: Sequence[int],
        requests: int,
    ) -> bytes | None:
        """The key that is missing although other keys say that it should exist; None if there is none."""
        # The sentinel is at +inf, so behind everything: without it, the key was deleted or evicted.
        if last != [SENTINEL]:
            return self._keys.due
        keys = self._keys
        used = requests // SEGMENT * SEGMENT  # segments of `skip` below are removed
        for key, number, exists in zip(self._expected.values(), expected, there, strict=True):
            is_expected = int(number or 0) > (used if key == keys.skip else 0)
            if is_expected and not exists:
                return key
        return None

    def _empty(self, callers: Sequence[bytes]) -> bytes:
        """The command that empties the index, without its payloads."""
        keys = self._keys
        # Also the counted requests of callers: a rebuild counts again. UNLINK, not DEL, which would
        # block Redis while it frees a large set.
        return pack(
            "UNLINK", keys.due, keys.ids, keys.cold, keys.refused, keys.skip, keys.ignored, keys.early, keys.moved,
            keys.ended, keys.unwanted, keys.in_flight, keys.state, keys.receipts,
            keys.callers, *(keys.of(caller.decode()) for caller in callers),
        )  # fmt: skip


def zadd_chunks(
    key: bytes, scored: Sequence[tuple[int, int]], *, only_there: bool = False
) -> Iterator[bytes]:
    for chunk in chunks(scored):
        yield zadd(key, chunk, only_there=only_there)


def zrem_chunks(key: bytes, offsets: Sequence[int]) -> Iterator[bytes]:
    for chunk in chunks(offsets):
        yield pack("ZREM", key, *map(member, chunk))


def chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for first in range(0, len(items), CHUNK):
        yield items[first : first + CHUNK]
