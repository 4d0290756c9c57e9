"""How an owner opens a shard's index: keeps it, empties it, or binds it to something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import orjson

from blackbox.core.bits import SEGMENT, Bits
from blackbox.core.offset_set import OffsetSet
from blackbox.core.plan import Binding, IndexMetadata, Plan, Positions, Tail, View
from blackbox.index.command_builder import CHUNK, chunks, zrem_chunks
from blackbox.index.connection import pack
from blackbox.index.keys import SENTINEL
from blackbox.index.lookups import Lookups
from blackbox.index.packed_commands import by_score
from blackbox.index.refused_bitmaps import segment_of
from blackbox.index.stored_fields import FORMAT, OLDER, claims_of, positions_of, stretch_of
from blackbox.index.when_full import SeenState
from blackbox.records.errors import PositionsMoved
from blackbox.records.receipt import Mark


class OpeningChanges(Lookups):
    """The changes of recovery and `rebind`; if another process stores anything during that time, they start again."""

    earlier_binding: Binding | None = None
    """The binding of an index that counts as empty because an earlier version wrote it."""

    def load(self) -> IndexMetadata | None:
        """Read what the index says of itself, and take its positions as last seen; None: it is empty.

        Raises ForeignIndex when a newer version wrote it.
        """
        names = (
            b"token", b"cluster_id", b"topic_id", b"receipts_id", b"group",
            b"rebuild", b"mark", b"tail", b"unknown", b"gone", b"doubtful", *self._expected,
        )  # fmt: skip
        look = [*self._read_positions(*names), pack("ZRANGE", self._keys.due, -1, -1)]
        with self._lock:
            state, receipts, last, *there = self._redis.run([*look, *self._look_expected()])
            found = positions_of(self.shard, state, receipts)
            self._loaded = (*state[:3], receipts)
            expected = state[-len(self._expected) :]
            token, *bound, rebuild, mark, tail, unknown, gone, doubtful = state[2 : -len(expected)]
            binding = None if bound[1] is None else Binding(*((b or b"").decode() for b in bound))
            self.earlier_binding = binding if state[0] in OLDER else None
            if found is None:
                return None
            self.positions = found
        self.doubtful = claims_of(doubtful)
        return IndexMetadata(
            found,
            is_whole=self._lost(last, expected, there, found.requests) is None,
            is_rebuilding=rebuild is not None,
            binding=binding,
            mark=None if mark is None else Mark(*orjson.loads(mark)),
            tail=None if tail is None else Tail(*orjson.loads(tail)),
            unknown_ms=int(unknown or 0),
            gone=stretch_of(gone),
            token=(token or b"").decode(),
        )

    def begin(
        self,
        positions: Positions,
        *,
        binding: Binding | None = None,
        mark: Mark | None = None,
        verdicts_below: int = 0,
        judged: int = 0,
        unknown_ms: int = 0,
        gone: tuple[int, int] | None = None,
        is_rebuild: bool = False,
    ) -> None:
        """Remove the entries in steps, then empty the rest and write the first positions in one MULTI.

        Conditional records below `verdicts_below` counted, unless they are `ignored`. Callers'
        rules do not judge requests below `judged` again. Requests that were due before `unknown_ms`
        may have an outcome that is in no receipt. `gone` is as in `lost_before`. With `is_rebuild` no
        other process stores until `finish`. Raises PositionsMoved when the positions are not those
        that `load` found.
        """
        with self._lock:
            self._drop_payloads()
            about: list[bytes | str | int] = [
                b"known_from",
                positions.requests,
                b"verdicts_below",
                verdicts_below,
            ]
            about += (b"judged", judged)
            if mark is not None:
                about += (b"mark", orjson.dumps(tuple(mark)))
            if unknown_ms:
                about += (b"unknown", unknown_ms)
            if gone is not None:
                about += (b"gone", orjson.dumps(gone))
            callers = self._redis.ask("ZRANGE", self._keys.callers, 0, -1)
            first = [
                self._empty(callers),
                pack("ZADD", self._keys.due, "+inf", SENTINEL),
                self._write_requests(positions.requests, *about, *self._bound(binding)),
                self._write_receipts(positions.receipts),
            ]
            if is_rebuild:
                first.append(pack("HSET", self._keys.state, b"rebuild", self._token))
            self._run_multi_while_opening(first)
            self.positions, self.doubtful = positions, {}
            requests, receipts = (b"%d" % position for position in positions)
            self._loaded = (FORMAT, requests, self._token, receipts)

    def take_over(self, binding: Binding, *, is_rebuild: bool = False) -> None:
        """Write this opening's token into an index that is kept; earlier reads of it are void."""
        with self._lock:
            self._watch_loaded()
            more = (b"rebuild", self._token) if is_rebuild else ()
            about = pack("HSET", self._keys.state, *self._bound(binding), *more)
            self._run_multi_while_opening([about], even_if_full=True)
            self._loaded = (*self._loaded[:2], self._token, self._loaded[3])

    def discard(self) -> None:
        """Empty an index; the next opening begins it from the journals."""
        with self._lock:
            self._drop_payloads()
            callers = self._redis.ask("ZRANGE", self._keys.callers, 0, -1)
            self._run_multi_while_opening([self._empty(callers)])
            self.positions = Positions(-1, -1)

    def rebind(
        self, positions: Positions, binding: Binding, unknown_ms: int = 0, tail: Tail | None = None
    ) -> None:
        """Bind a kept index to something else, at these positions.

        Apart from entries, it forgets what it holds about requests at or above them. `tail` is the
        last request record below them. With `unknown_ms` it has other receipts, which lack the
        outcomes of requests that were due before.
        """
        with self._lock:
            self._watch_loaded()
            keys, first = self._keys, positions.requests
            look = [
                pack("HGETALL", keys.cold),
                pack("ZRANGE", keys.ignored, first, "+inf", "BYSCORE"),
                pack("HGET", keys.state, "known_from"),
            ]
            flat, ignored, known_from = self._redis.run(look)
            changes = [
                self._write_requests(first, *self._bound(binding)),
                self._write_receipts(positions.receipts),
            ]
            # The mark belongs to the former receipts. A barrier will name `unknown` in the new ones.
            if unknown_ms:
                about = pack("HSET", keys.state, "unknown", unknown_ms)
                changes += [pack("HDEL", keys.state, "mark"), about]
            if first < self.positions.requests:
                cold = Bits({int(s): bits for s, bits in zip(flat[::2], flat[1::2], strict=True)})
                gone = {offset for offset in cold if offset >= first}
                changes += [
                    # The next walk begins there: it must not pass over requests with these offsets.
                    pack("HSET", keys.state, "known_from", min(first, int(known_from or 0))),
                    *(pack("ZREM", keys.ignored, *names) for names in chunks(ignored)),
                    *self._move_cold(Plan(from_cold=gone), View(positions, (), {}, cold)),
                    *self._forget_from(first, tail),
                ]
            if not self._exec_even_if_full(changes, self.positions):
                raise PositionsMoved(
                    f"{self.shard}: the index changed during the operation; check whether a "
                    "service is running"
                )
            self.positions = positions

    def ignore(self, offsets: Sequence[int]) -> None:
        """Record that these records ended nothing, according to receipts, until they are read."""
        with self._lock:
            self._mark_while_opening(self._keys.ignored, offsets)

    def finish(self, receipts: int, ended: OffsetSet) -> None:
        """End a rebuild: set the position `receipts`, and `skip` for ended requests that are not read yet."""
        with self._lock:
            self._watch_positions(self._keys.state, self._keys.receipts)
            # `skip` has only requests that are not read yet: the rebuild did not store the others.
            later = ended.bits_from(self.positions.requests)
            done = [pack("HSET", self._keys.skip, segment, bits) for segment, bits in later.items()]
            if later:
                done.append(pack("HSET", self._keys.state, b"ahead", (max(later) + 1) * SEGMENT))
            done += [
                self._write_receipts(receipts),
                pack("HDEL", self._keys.state, b"rebuild", b"unknown"),
            ]
            if not self._exec_even_if_full(done, self.positions):
                raise PositionsMoved(f"{self.shard}: the index changed while it was being rebuilt")
            self.positions = self.positions._replace(receipts=receipts)

    def judged_before(self, judged: int) -> None:
        """Exempt requests below `judged` from callers' rules; 0: all that are read from now on are judged."""
        with self._lock:
            self._watch_positions(self._keys.state)
            state = self._keys.state
            change = ("HSET", state, "judged", judged) if judged else ("HDEL", state, "judged")
            self._run_multi_while_opening([pack(*change)], even_if_full=True)

    def lost_before(self, first: int, verdicts_below: int, gone: tuple[int, int]) -> None:
        """Move the position to `first`: retention removed the requests in between before they were read.

        Conditional records below `verdicts_below` that name one of these are assumed to have counted.
        `gone` are all removed requests that no opening has reported yet, [from, up to].
        """
        with self._lock:
            start = self._watch_positions(self._keys.state).requests
            about: tuple[bytes, ...] = (b"gone", orjson.dumps(gone))
            if start < first:
                about += (b"gap", orjson.dumps((start, first, verdicts_below)))
            # Another process may have passed them: a position never goes back.
            first = max(start, first)
            moved = self._write_requests(first, *about)
            # A full Redis must not keep the shard closed: its deliveries make the room.
            self._run_multi_while_opening(
                [moved, *self._forget_skipped(start, first)], even_if_full=True
            )
            self.positions = self.positions._replace(requests=first)

    def forget_gone(self) -> None:
        """Record that the removed requests are reported."""
        with self._lock:
            self._watch_positions(self._keys.state)
            forget = pack("HDEL", self._keys.state, b"gone")
            self._run_multi_while_opening([forget], even_if_full=True)

    def _forget_from(self, first: int, tail: Tail | None) -> list[bytes]:
        """Commands that remove what is said of requests at or above this offset, apart from entries."""
        # Other requests will have these offsets.
        keys = self._keys
        return [
            pack("HDEL", keys.state, "mark", "ahead"),
            *self._doubt({o: claim for o, claim in self.doubtful.items() if o < first}),
            pack("HDEL", keys.state, "tail")
            if tail is None
            else pack("HSET", keys.state, "tail", orjson.dumps(tuple(tail))),
            pack("UNLINK", keys.skip, keys.early),
            *self._unmark_refused(first),
            *(
                pack("ZREMRANGEBYSCORE", key, first, "(+inf")
                for key in (keys.moved, keys.ended, keys.unwanted)
            ),
            *(pack("HDEL", keys.ids, *callers) for callers in chunks(self._holders_from(first))),
            *(
                command
                for of, offsets in self._counted_from(first).items()
                for command in zrem_chunks(of, offsets)
            ),
        ]

    def _unmark_refused(self, first: int) -> Iterator[bytes]:
        flat = self._redis.ask("HGETALL", self._keys.refused)
        for field, bitmap in zip(flat[::2], flat[1::2], strict=True):
            if field != SENTINEL and (segment := segment_of(field)) >= first // SEGMENT:
                marked = Bits({segment: bitmap})
                later = [offset for offset in marked if offset >= first]
                yield pack("HSET", self._keys.refused, field, marked.changed((), later)[segment])

    def _holders_from(self, first: int) -> list[bytes]:
        """The caller ids that requests at or above this offset hold, including those of the cold tier."""
        flat = self._redis.ask("HGETALL", self._keys.ids)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return [caller for caller, name in pairs if name and int(name, 16) >= first]

    def _counted_from(self, first: int) -> dict[bytes, list[int]]:
        """The counted requests at or above this offset, by the key of each caller."""
        callers = self._redis.ask("ZRANGE", self._keys.callers, 0, -1)
        sets = [self._keys.of(caller.decode()) for caller in callers]
        every = self._redis.run([pack("ZRANGE", of, 0, -1) for of in sets]) if sets else []
        return {
            of: [offset for name in names if (offset := int(name, 16)) >= first]
            for of, names in zip(sets, every, strict=True)
        }

    def _drop_payloads(self) -> None:
        # Payloads would take up memory until they expire. Each step compares the positions: an
        # owner that was frozen must take nothing from the next one.
        while True:
            self._watch_loaded()
            names = self._redis.ask(*by_score(self._keys.due, "-inf", "(+inf", 0, CHUNK))
            if not names:
                return
            drop = pack("UNLINK", *(self._keys.message(name) for name in names))
            removals = [drop, pack("ZREM", self._keys.due, *names)]
            # A full Redis must not keep its own room. An index of an earlier version has no `positions`.
            format, requests, _, receipts = (found or b"" for found in self._loaded)
            if not self._exec_even_if_full(removals, SeenState(format, requests, receipts)):
                raise self._changed_while_opening()

    def _watch_loaded(self) -> None:
        """Watch the index; raise PositionsMoved when it is not the one that `load` found."""
        watch = pack("WATCH", self._keys.state, self._keys.receipts)
        _, state, receipts = self._redis.run([watch, *self._read_positions(b"token")])
        if (*state, receipts) != self._loaded:
            raise PositionsMoved(
                f"{self.shard}: the index has changed: expected {self._loaded}, found "
                f"{(*state, receipts)}"
            )
