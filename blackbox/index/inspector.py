"""Read-only queries of a shard's index for operators, from outside the shard's owner."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from blackbox.core.bits import SEGMENT, Bits
from blackbox.core.parking import BAND_MS, band_at, bands_of, parked_at, span, time_at, waits_for
from blackbox.core.plan import Positions
from blackbox.index import refused_bitmaps
from blackbox.index.connection import Clients, Connections, pool
from blackbox.index.keys import Keys
from blackbox.index.packed_commands import by_score
from blackbox.index.payload_heads import LONG_HEAD_BYTES, read_heads
from blackbox.index.stored_fields import as_entry, claims_of, in_flight, positions_of
from blackbox.records import entry as entries
from blackbox.records.entry import Entry
from blackbox.records.request import Shard, member


class ShardStats(NamedTuple):
    """The state of a shard. `positions` is None for an index that was never begun, or is lost.

    `oldest_due_ms` is the due time of the first entry that is due now, `next_due_ms` that of the
    first one that is not due yet. `pending` does not count the `cold` requests. `has_cold_tier`:
    there ever were some.
    """

    positions: Positions | None
    pending: int
    due_now: int
    oldest_due_ms: int | None
    next_due_ms: int | None
    cold: int = 0
    has_cold_tier: bool = False


class Pending(NamedTuple):
    """A pending request. `at_ms` is its score: when it is looked at next, above all times while parked.

    `entry` is None when the payload is gone from Redis; dispatch then reads it again from Kafka.
    With a `cause` there never was one, as it was refused. In a list, `read_bytes` is how much was read of
    the payload.
    """

    at_ms: int
    entry: Entry | None
    read_bytes: int = 0
    cause: str | None = None

    @property
    def next_try_ms(self) -> int | None:
        """When it is looked at next: its due time, or later if postponed; None while it is parked."""
        return time_at(self.at_ms)


class Inspector:
    """Reads any shard without taking part in it, even while Redis is full.

    Every method raises IndexLost when Redis does not answer, ForeignIndex for an index that a newer
    version wrote. The number of commands does not depend on the number of entries in the shard. `list_pending` takes
    one or two for each request that it returns, and with `behind` the binary logarithm of how many are due at that
    instant; `bands` one for each band, `bands_of` two for each band that its targets can have, `pending_counts` one
    for each interval. `cold` reads all bitmaps of the cold tier.
    """

    def __init__(self, connections: Connections) -> None:
        self._clients = Clients(connections)

    @classmethod
    def of(cls, url: str) -> Inspector:
        return cls(pool(url))

    def shard_stats(self, shard: Shard, now_ms: int) -> ShardStats:
        """Positions and pending entries of a shard; the counts may be from slightly different moments."""
        # Not in a MULTI, which a full Redis refuses.
        keys = Keys(shard)
        state, receipts, pending, due_now, first, after = self._clients.together(
            ("HMGET", keys.state, "format", "requests", "cold"),
            ("GET", keys.receipts),
            ("ZCARD", keys.due),
            ("ZCOUNT", keys.due, "-inf", now_ms),
            by_score(keys.due, "-inf", now_ms, 0, 1, "WITHSCORES"),
            by_score(keys.due, f"({now_ms}", f"({BAND_MS}", 0, 1, "WITHSCORES"),
        )
        positions = positions_of(shard, state, receipts)
        cold = state[2]
        return ShardStats(
            positions,
            max(0, pending - 1),  # without the sentinel
            due_now,
            _score(first),
            _score(after),
            int(cold or 0),
            cold is not None,
        )

    def positions(self, shard: Shard) -> Positions | None:
        """The positions of a shard; None for an index that was never begun, or is lost."""
        keys = Keys(shard)
        state, receipts = self._clients.together(
            ("HMGET", keys.state, "format", "requests"), ("GET", keys.receipts)
        )
        return positions_of(shard, state, receipts)

    def is_ready(self, shard: Shard) -> bool:
        """Whether requests can be stored: there is an index, and it is not being rebuilt."""
        keys = Keys(shard)
        state, receipts = self._clients.together(
            ("HMGET", keys.state, "format", "requests", "rebuild"), ("GET", keys.receipts)
        )
        return positions_of(shard, state, receipts) is not None and state[2] is None

    def is_in_flight(self, shard: Shard, offset: int) -> bool:
        """Whether this request is in flight or in doubt, so that it cannot be cancelled any more."""
        keys = Keys(shard)
        named, doubtful = self._clients.together(
            ("HGETALL", keys.in_flight), ("HGET", keys.state, "doubtful")
        )
        return member(offset) in in_flight(named) or offset in claims_of(doubtful)

    def pending_at(self, shard: Shard, offset: int) -> Pending | None:
        keys = Keys(shard)
        name = member(offset)
        # The score is read before and after: in between, the request may end or be stored.
        before, stored, score = self._clients.together(
            ("ZSCORE", keys.due, name),
            ("GET", keys.message(name)),
            ("ZSCORE", keys.due, name),
        )
        if before is None or score is None:
            return None
        if stored is not None:
            return Pending(int(float(score)), entries.decode(stored))
        return Pending(int(float(score)), None, cause=self._causes(keys, [offset]).get(offset))

    def list_pending(
        self,
        shard: Shard,
        from_ms: int,
        to_ms: int,
        behind: int | None,
        count: int,
        *,
        whole_bytes: int | None = None,
    ) -> list[tuple[int, Pending]]:
        """Pending requests whose scores are from `from_ms` to `to_ms`, in that order, as (offset, request).

        Of those at `from_ms`, only the ones after the offset `behind`, if it is given. Requests
        that end during the read may be left out. Entries have a message only with `whole_bytes`: as
        many as are stored in so many bytes, but at least one. Otherwise those with more than 64 KiB
        of headers count as gone.
        """
        keys = Keys(shard)
        skip = 0 if behind is None else self._rank_behind(keys, from_ms, behind)
        (found,) = self._clients.together(
            by_score(keys.due, from_ms, to_ms, skip, count, "WITHSCORES")
        )
        names, scores = found[::2], found[1::2]  # Redis replies with them in turn
        keyed = [keys.message(name) for name in names]
        stored = self._heads(keyed) if whole_bytes is None else self._whole(keyed, whole_bytes)
        offsets = [int(name, 16) for name in names]
        bare = [o for o, (entry, _) in zip(offsets, stored, strict=False) if entry is None]
        causes = self._causes(keys, bare)
        return [
            (offset, Pending(int(float(score)), entry, read_bytes, causes.get(offset)))
            for offset, score, (entry, read_bytes) in zip(offsets, scores, stored, strict=False)
        ]

    def _causes(self, keys: Keys, offsets: Sequence[int]) -> Mapping[int, str]:
        """The causes of those of these requests that have no payload because they were refused."""
        fields = refused_bitmaps.fields(offsets)
        if not fields:
            return {}
        (found,) = self._clients.together(("HMGET", keys.refused, *fields))
        return refused_bitmaps.causes_of(offsets, fields, found)

    def bands(self, shard: Shard) -> Iterator[int]:
        """The bands that have parked entries; one command for each."""
        keys, first = Keys(shard), parked_at(1, 0)
        while True:
            look = by_score(keys.due, first, "(+inf", 0, 1, "WITHSCORES")
            score = _score(self._clients.together(look)[0])
            if score is None:
                return
            yield (band := band_at(score))
            first = parked_at(band + 1, 0)

    def bands_of(self, shard: Shard, targets: Collection[str]) -> list[int]:
        """The bands in which requests are parked for these targets."""
        keys = Keys(shard)
        possible = sorted({band for target in targets for band in bands_of(target)})
        firsts = self._clients.together(*(by_score(keys.due, *span(b), 0, 1) for b in possible))
        held = {band: names[0] for band, names in zip(possible, firsts, strict=True) if names}
        heads = self._heads([keys.message(name) for name in held.values()])
        return [
            band
            for band, (entry, _) in zip(held, heads, strict=True)
            if entry is None or waits_for(entry) in targets
        ]

    def _whole(self, names: Sequence[bytes], most_bytes: int) -> list[tuple[Entry | None, int]]:
        # Sizes first: a hundred messages may have a megabyte each.
        sizes = self._clients.together(*(("STRLEN", name) for name in names))
        count = max(1, bisect_right(list(accumulate(sizes)), most_bytes))
        payloads = self._clients.together(*(("GET", name) for name in names[:count]))
        return [(as_entry(payload), len(payload or b"")) for payload in payloads]

    def _heads(self, names: Sequence[bytes]) -> list[tuple[Entry | None, int]]:
        starts = dict(read_heads(names, self._starts, LONG_HEAD_BYTES))
        found = ((as_entry(starts[name]), len(starts[name])) for name in names)
        return [
            (None if entry is None else entry._replace(message=None), read_bytes)
            for entry, read_bytes in found
        ]

    def _starts(self, names: Sequence[bytes], count: int) -> list[bytes]:
        """The first so many bytes of each of these payloads."""
        return self._clients.together(*(("GETRANGE", name, 0, count - 1) for name in names))

    def pending_counts(self, shard: Shard, edges_ms: Sequence[int]) -> list[int]:
        """How many pending requests are looked at next from each instant to before the following one."""
        keys = Keys(shard)
        asked = [("ZCOUNT", keys.due, first, f"({end}") for first, end in pairwise(edges_ms)]
        return self._clients.together(*asked)

    def _rank_behind(self, keys: Keys, at_ms: int, offset: int) -> int:
        """How many of the requests at this instant have this offset or a lower one."""
        # By bisection: Redis orders members of one score by their bytes, and so by offset.
        (high,) = self._clients.together(("ZCOUNT", keys.due, at_ms, at_ms))
        low, name = 0, member(offset)
        while low < high:
            middle = (low + high) // 2
            (found,) = self._clients.together(by_score(keys.due, at_ms, at_ms, middle, 1))
            if found and found[0] <= name:
                low = middle + 1
            else:
                high = middle
        return low

    def is_cold(self, shard: Shard, offset: int) -> bool:
        keys = Keys(shard)
        (bitmap,) = self._clients.together(("HGET", keys.cold, offset // SEGMENT))
        return bitmap is not None and offset in Bits({offset // SEGMENT: bitmap})

    def is_ended(self, shard: Shard, origin: int) -> bool:
        """Whether a cancel by id has ended this cold request, which stays cold until it is written again."""
        keys = Keys(shard)
        (score,) = self._clients.together(("ZSCORE", keys.ended, member(origin)))
        return score is not None

    def cold(self, shard: Shard) -> tuple[Positions | None, Bits]:
        """The positions, and the requests of the cold tier at that moment or a little later."""
        positions, keys = self.positions(shard), Keys(shard)
        (bitmaps,) = self._clients.together(("HGETALL", keys.cold))
        return positions, Bits({int(segment): bitmap for segment, bitmap in bitmaps.items()})

    def offset_of(self, shard: Shard, caller_id: str) -> int | None:
        """The offset of the pending request under this caller id; None when there is none."""
        keys = Keys(shard)
        (name,) = self._clients.together(("HGET", keys.ids, caller_id))
        return None if name is None else int(name, 16)

    def close(self) -> None:
        self._clients.close()


def _score(ranged: list[bytes]) -> int | None:
    return int(float(ranged[1])) if ranged else None
