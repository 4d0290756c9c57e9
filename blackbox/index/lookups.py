"""Reads of a shard's index by its owner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from blackbox.core.plan import Named
from blackbox.index.connection import pack
from blackbox.index.guarded_index import GuardedIndex
from blackbox.index.keys import SENTINEL
from blackbox.index.packed_commands import by_score
from blackbox.index.stored_fields import as_entry
from blackbox.records.request import member, offset_in


class Identity(NamedTuple):
    """The part of a payload about the end of its entry: its reason as a dead letter, and its caller id."""

    reason: str | None
    caller_id: str | None


class Lookups(GuardedIndex):
    """The reads of recovery, intake and dispatch."""

    def pending(self, rank: int, limit: int) -> list[int]:
        """The entries from this rank on, by due time."""
        with self._lock:
            names = self._redis.ask("ZRANGE", self._keys.due, rank, rank + limit - 1)
        return [int(name, 16) for name in names if name != SENTINEL]

    def stored(self, rank: int, limit: int) -> list[tuple[int, bytes | None]]:
        """The entries from this rank on, by due time, with their stored form; about 16 MiB at most."""
        with self._lock:
            look = pack("ZRANGE", self._keys.due, rank, rank + limit - 1)
            names, largest = self._redis.run([look, self._look_largest])
            there = [name for name in names if name != SENTINEL]
            found = self._payloads(there, int(largest or 0))
        return [(int(name, 16), payload) for name, payload in found]

    def refused(self, offsets: Sequence[int]) -> Mapping[int, str]:
        """The causes of those of these requests that have no payload because they were refused."""
        with self._lock:
            return self._causes(offsets)

    def count_cold(self) -> int:
        with self._lock:
            return int(self._redis.ask("HGET", self._keys.state, "cold") or 0)

    def cold_among(self, offsets: Iterable[int]) -> set[int]:
        """Those of these requests that are in the cold tier."""
        asked = set(offsets)
        with self._lock:
            cold = self._bits(self._keys.cold, asked)
        return {offset for offset in asked if offset in cold}

    def caller_ids(self, offsets: Sequence[int]) -> dict[int, str | None]:
        """The caller id of each of these requests that is pending; others are left out."""
        with self._lock:
            # Without any caller id, payloads need not be read.
            if not offsets or not self._redis.ask("EXISTS", self._keys.ids):
                return {}
            known = self._identities(offsets)
        return {o: None if found is None else found.caller_id for o, found in known.items()}

    def moved(self, offsets: Sequence[int]) -> dict[int, int]:
        """The record by which each of these requests came into the index, if promotion wrote it again."""
        with self._lock:
            if not offsets or not self._redis.ask("EXISTS", self._keys.moved):
                return {}
            return self._scores(self._keys.moved, offsets)

    def holders(self, caller_ids: Sequence[str]) -> dict[str, int]:
        """The request that holds each of these caller ids; caller ids without one are left out."""
        with self._lock:
            names = self._ask_about(caller_ids, "HMGET", self._keys.ids)
        return {c: int(name, 16) for c, name in zip(caller_ids, names, strict=True) if name}

    def named(self, ids: Sequence[str]) -> dict[str, Named]:
        """The requests of these ids, as far as they belong to this shard."""
        offsets = {id: offset for id in ids if (offset := offset_in(self.shard, id)) is not None}
        if not offsets:
            return {}
        with self._lock:
            moved = self._scores(self._keys.moved, list(offsets.values()))
            places = {id: moved.get(offset, offset) for id, offset in offsets.items()}
            there = self._scores(self._keys.due, list(places.values()))
            known = self._identities(list(places.values()))
            refused = self._causes([o for o in places.values() if o not in known])
        found = {id: (offset, known.get(offset)) for id, offset in places.items()}
        return {
            id: Named(
                offset,
                offset in there
                and (offset not in refused if identity is None else identity.reason is None),
                None if identity is None else identity.caller_id,
                offsets[id] if offset != offsets[id] else None,
            )
            for id, (offset, identity) in found.items()
        }

    def _identities(self, offsets: Sequence[int]) -> dict[int, Identity | None]:
        """The identities in the payloads of these requests, None if it cannot be read; without those that have none."""
        # No more is kept of each: thousands of requests may have long headers.
        entries = (
            (int(name, 16), as_entry(head))
            for name, head in self._heads([member(offset) for offset in offsets])
        )
        return {
            offset: None if entry is None else Identity(entry.reason, entry.caller_id)
            for offset, entry in entries
        }

    def ended_in_doubt(self, offsets: Sequence[int]) -> set[int]:
        """Those of these requests that something has ended while they were in doubt."""
        with self._lock:
            return set(self._scores(self._keys.unwanted, offsets))

    def ignored(self, offsets: Sequence[int]) -> set[int]:
        """Those of these records which the index lists as ones that ended nothing.

        It does not list records that `settle` was given as `recorded`.
        """
        with self._lock:
            return set(self._scores(self._keys.ignored, offsets))

    def unrecorded(self, most: int) -> tuple[int, list[int]]:
        """The position `requests`, and the first conditional records below it that did not count."""
        with self._lock:
            # Intake of another process may store in between, but names and position must match.
            while True:
                read = self._read_positions()
                state, receipts = self._redis.run(read)
                position = self._check(state, receipts).requests
                look = pack(*by_score(self._keys.ignored, "-inf", f"({position}", 0, most))
                names, state, receipts = self._redis.run([look, *read])
                if self._check(state, receipts).requests == position:
                    return position, [int(name, 16) for name in names]
