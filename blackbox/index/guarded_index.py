"""Changes of an index that happen only while its positions are those that were last seen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from threading import RLock
from typing import Any

from blackbox.core.bits import SEGMENT, Bits
from blackbox.core.plan import Positions, Postponed
from blackbox.index import refused_bitmaps
from blackbox.index.command_builder import CommandBuilder, chunks
from blackbox.index.connection import Connections, RedisSession, pack
from blackbox.index.payload_heads import HEAD_BYTES, read_heads
from blackbox.index.stored_fields import FORMAT, positions_of
from blackbox.index.when_full import SeenState, in_one_script
from blackbox.records.errors import IndexFull, PositionsMoved, RecoveryRequired
from blackbox.records.receipt import Claim
from blackbox.records.request import Shard, member

MAX_BATCH_BYTES = 16 << 20
MAX_CONTENTION = 1000
_MULTI = pack("MULTI")
_EXEC = pack("EXEC")


class GuardedIndex(CommandBuilder):
    """One connection to a shard's index, the positions last seen in it, and WATCH, MULTI and EXEC."""

    def __init__(
        self,
        shard: Shard,
        connections: Connections,
        *,
        grace_s: int,
        is_behind: Callable[[int], bool] | None = None,
        topic_id: Callable[[], str | None] = lambda: None,
    ) -> None:
        super().__init__(shard, grace_s)
        self.shard = shard
        self.connections = connections
        self.is_behind = is_behind
        self.topic_id = topic_id
        self._redis = RedisSession(connections, self._keys.state)
        self._lock = RLock()
        # format, requests, token and receipts, as `load` found them
        self._loaded: tuple[bytes | None, ...] = (None, None, None, None)
        self.positions = Positions(-1, -1)
        self.removed = 0
        self._settled = -1  # the highest `receipts` that was seen
        self._parked: dict[int, str] | None = None  # the targets of bands, once they are looked up
        self.doubtful: Mapping[int, Claim] = {}

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        with self._lock:
            self._redis.close()

    def _run_multi(
        self, commands: Iterable[bytes], while_busy: Callable[[], None] | None = None
    ) -> bool:
        replies = self._redis.run(chain((_MULTI,), commands, (_EXEC,)), while_busy)[-1]
        for reply in replies or ():
            if isinstance(reply, Exception):
                raise reply
        return replies is not None

    def _exec_even_if_full(self, commands: Sequence[bytes], seen: Positions | SeenState) -> bool:
        try:
            return self._run_multi(commands)
        except IndexFull:
            # A full Redis refuses even a MULTI that only removes; a script may do that. EXEC has
            # ended the WATCH, so the script compares the positions itself.
            seen = seen if isinstance(seen, SeenState) else SeenState(FORMAT, *seen)
            script = in_one_script(self._keys, seen, commands)
            return bool(self._redis.run([script])[0])

    def _run_multi_while_opening(
        self, commands: Iterable[bytes], *, even_if_full: bool = False
    ) -> None:
        if even_if_full:
            is_done = self._exec_even_if_full(list(commands), self.positions)
        else:
            is_done = self._run_multi(commands)
        if not is_done:
            raise self._changed_while_opening()

    def _changed_while_opening(self) -> PositionsMoved:
        return PositionsMoved(f"{self.shard}: the index changed while it was being opened")

    def _mark_while_opening(self, key: bytes, offsets: Sequence[int]) -> None:
        self._watch_positions(self._keys.state)
        self._run_multi_while_opening(self._add_members(key, offsets), even_if_full=True)

    def _write_even_if_full(self, command: bytes) -> None:
        for _ in range(MAX_CONTENTION):
            found = self._check(*self._redis.run(self._read_positions()))
            script = in_one_script(self._keys, SeenState(FORMAT, *found), [command])
            if self._redis.run([script])[0]:
                return
        raise self._contended("marking deliveries in flight")

    def _contended(self, what: str) -> RecoveryRequired:
        return RecoveryRequired(
            f"{self.shard}: the index changed {MAX_CONTENTION} times while {what}"
        )

    def _watch_positions(self, *keys: bytes) -> Positions:
        commands = [pack("WATCH", *keys), *self._read_positions()]
        return self._check(*self._redis.run(commands)[1:])

    def _watch_pending(
        self, changes: Mapping[int, Postponed], *keys: bytes
    ) -> tuple[Positions, dict[int, Postponed]]:
        """Watch these keys; return the positions, and the changes of entries that are pending."""
        if not changes:
            return self._watch_positions(*keys), {}
        names = [member(offset) for offset in changes]
        look = pack("ZMSCORE", self._keys.due, *names)
        _, *positions, here = self._redis.run([pack("WATCH", *keys), *self._read_positions(), look])
        pending = {
            offset: change
            for (offset, change), score in zip(changes.items(), here, strict=True)
            if score is not None
        }
        return self._check(*positions), pending

    def _check(self, state: Sequence[bytes | None], receipts: bytes | None) -> Positions:
        found, seen = positions_of(self.shard, state, receipts), self.positions
        # Intake of another process may advance `requests`; only the shard's owner moves `receipts`.
        if found is None or found.receipts != seen.receipts or found.requests < seen.requests:
            raise PositionsMoved(f"{self.shard}: the index is at {found}, but {seen} was expected")
        self._saw(found.requests)
        return found

    def _saw(self, requests: int) -> None:
        if requests > self.positions.requests:
            self.removed += 1  # another process stored requests: there may be cancels among them
            self.positions = self.positions._replace(requests=requests)

    def _consistent(self, commands: Sequence[bytes]) -> list[Any]:
        """The state and the replies to these reads, consistent with each other."""
        # Not in a MULTI, which a full Redis refuses: the positions are read before and after.
        positions = self._read_positions(b"largest", b"doubtful", *self._expected)
        while True:
            state, position, *replies, state_after, position_after = self._redis.run(
                [*positions, *commands, *positions]
            )
            self._check(state, position)
            if (state, position) == (state_after, position_after):
                return [state, *replies]

    def _scores(self, key: bytes, offsets: Sequence[int]) -> dict[int, int]:
        """The scores of these offsets in a sorted set; those that are not in it are left out."""
        scores = self._ask_about([member(offset) for offset in offsets], "ZMSCORE", key)
        return {o: int(float(s)) for o, s in zip(offsets, scores, strict=True) if s is not None}

    def _bits(self, key: bytes, offsets: Iterable[int]) -> Bits:
        """The bitmaps under this key, as far as these offsets need them."""
        segments = sorted({offset // SEGMENT for offset in offsets})
        found = self._ask_about(segments, "HMGET", key)
        return Bits({s: bitmap for s, bitmap in zip(segments, found, strict=True) if bitmap})

    def _causes(self, offsets: Collection[int]) -> dict[int, str]:
        """The causes of those of these requests that have no payload because they were refused."""
        fields = refused_bitmaps.fields(offsets)
        found = self._ask_about(fields, "HMGET", self._keys.refused)
        return refused_bitmaps.causes_of(offsets, fields, found)

    def _payloads(self, names: list[bytes], largest: int) -> list[tuple[bytes, bytes | None]]:
        # A size costs a command: read only if payloads of the largest size could exceed the limit.
        if len(names) * largest > MAX_BATCH_BYTES:
            names = names[: self._fitting(names)]
        return list(zip(names, self._mget(names), strict=True))

    def _fitting(self, names: list[bytes]) -> int:
        lengths = [pack("STRLEN", self._keys.message(name)) for name in names]
        total = 0
        for count, length in enumerate(self._redis.run(lengths)):
            total += length
            if total > MAX_BATCH_BYTES:
                return max(1, count)
        return len(names)

    def _heads(self, names: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """The heads of those of these payloads that are there, as (member, head); see `read_heads`."""
        if int(self._redis.run([self._look_largest])[0] or 0) <= HEAD_BYTES:
            # Nothing else would be read, and one MGET takes less time than a thousand GETRANGE.
            small = zip(names, self._mget(names), strict=True)
            yield from ((name, payload) for name, payload in small if payload is not None)
            return
        empty: list[bytes] = []
        for name, head in read_heads(names, self._starts):
            if head:
                yield name, head
            else:
                empty.append(name)
        # GETRANGE replies the same to a missing key as to an empty value, which is an unreadable payload.
        for chunk in chunks(empty):
            look = [pack("EXISTS", self._keys.message(name)) for name in chunk]
            there = zip(chunk, self._redis.run(look), strict=True)
            yield from ((name, b"") for name, is_there in there if is_there)

    def _starts(self, names: Sequence[bytes], count: int) -> list[bytes]:
        """The first so many bytes of each of these payloads."""
        keys = map(self._keys.message, names)
        return self._redis.run(pack("GETRANGE", key, 0, count - 1) for key in keys)

    def _mget(self, names: Sequence[bytes]) -> list[bytes | None]:
        return self._ask_about([self._keys.message(name) for name in names], "MGET")

    def _ask_about(self, many: Sequence[Any], *command: bytes | str) -> list[Any]:
        """The replies of a command about each of these, asked about a thousand at once."""
        return [one for chunk in chunks(many) for one in self._redis.ask(*command, *chunk)]
