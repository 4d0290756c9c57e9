"""A shard's index in Redis: due times, payloads, caller ids, and the two positions that define them.

Entries are the requests below `positions.requests` minus the removals below `positions.receipts`.
Other keys hold:

- `skip`: removals that were read although their request is not in the index yet;
- `cold`: requests that are due beyond the horizon and so are not entries;
- `ignored`: conditional records that did not count, as long as no receipt says so;
- `early`: replacements that wait in Kafka for room, though what they replace is removed already;
- `moved`: by which records requests of the cold tier came into the index;
- `ended`: requests of the cold tier that a cancel by id has ended while only Kafka knew their
  record;
- `in-flight`: requests whose delivery is under way;
- `unwanted`: requests in doubt that something else ends if they were not delivered.

Data and positions change in one MULTI. So a Redis that loses its last writes loses both, and the
journals restore them.

Intake and dispatch of one shard may be two processes. Each position has a key of its own, which its
writer watches, so that neither process makes the other one retry. Intake moves `requests`, and
watches the `skip` it read. Settling moves `receipts`, and watches `requests` only for what depends
on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from secrets import token_hex
from threading import RLock
from typing import Any

import orjson

from blackbox.core.bits import SEGMENT, Bits
from blackbox.core.ended import Ended
from blackbox.core.parking import BAND_MS, BANDS, band_at, parked_at, waits_for
from blackbox.core.plan import (
    Binding,
    Due,
    Gap,
    Kept,
    Named,
    Plan,
    Positions,
    Postponed,
    Tail,
    Touched,
    View,
)
from blackbox.index.connection import Connections, Session, pack
from blackbox.index.keys import IDS_SENTINEL, SENTINEL, Keys, by_score, set_ex_template, zadd
from blackbox.index.walk import Walk
from blackbox.index.when_full import in_one_script
from blackbox.records import entry as entries
from blackbox.records.entry import Entry
from blackbox.records.errors import ForeignIndex, IndexFull, PositionsMoved, RecoveryRequired
from blackbox.records.receipt import Claim, Mark
from blackbox.records.request import OUTCOME_UNKNOWN, Reason, Shard, member, offset_in

FORMAT = b"5"
OLDER = (b"1", b"2", b"3", b"4")
"""Formats of earlier versions: such an index is emptied, and rebuilt from the journals."""

MAX_BATCH_BYTES = 16 << 20
MAX_CONTENTION = 1000
LOOKED_AT = 100
HEAD_BYTES = 65_536
"""Bytes of a parked entry that are read to find its target."""

PARKED_FOR_S = 30 * 86_400
"""How long the payload of a parked entry stays in Redis; after that it is read again from Kafka."""
LETTER_FOR_S = 10 * 365 * 86_400
"""The same for a dead letter. Only its payload says that it is one: what is read again is admitted."""
IN_FLIGHT_LOOK_S = 0.01
IN_FLIGHT_WAIT_S = 2.0
"""How long `store` waits for what is in flight. Other shards of the process are not read in that time."""
_CHUNK = 1000
_WHY_ALONE = (
    "check that maxmemory-policy is noeviction and that the key was not deleted; rebuilding from "
    "the journals"
)
_MULTI = pack("MULTI")
_EXEC = pack("EXEC")
_NOTHING: Mapping[Any, Any] = {}


@dataclass(eq=False, repr=False)
class ShardIndex:
    """One owner's access to a shard's index. Every method is atomic and safe to call from any thread.

    `removed` grows whenever intake, here or elsewhere, may have replaced or cancelled something.
    Remembers the positions this owner last saw and raises PositionsMoved as soon as Redis has
    others; IndexLost when the connection fails. Both mean: recover with a new ShardIndex.

    `is_behind` says whether Kafka has a receipt at an offset or after it, `topic_id` which topic
    requests are read from. To be given by a process that stores while another one dispatches: the
    index that it sees may be one that went back, or one of another topic.
    """

    shard: Shard
    connections: Connections
    _: KW_ONLY
    grace_s: int
    is_behind: Callable[[int], bool] | None = None
    topic_id: Callable[[], str | None] = lambda: None

    def __post_init__(self) -> None:
        self._keys = keys = Keys(self.shard)
        # fields of the state, and the keys that must exist if the field is above 0
        self._expected = {
            b"named": keys.ids,  # whether there ever was a caller id
            b"cold": keys.cold,  # how many requests are cold
            b"moved": keys.moved,  # whether promotion ever brought one in
            b"ended": keys.ended,  # whether a cancel ever ended one that only Kafka knew
            b"ahead": keys.skip,  # up to where `skip` may have something
        }
        self._set_ex = set_ex_template(self._keys)
        self._session = Session(self.connections, self._keys.state)
        self._lock = RLock()
        self._token = token_hex(8).encode()
        self._loaded: tuple[bytes | None, ...] = (None, None, None, None)
        self.positions = Positions(-1, -1)
        self.removed = 0
        self._settled = -1
        self._parked: dict[int, str] | None = None
        self.doubtful: Mapping[int, Claim] = {}

    def load(self) -> Kept | None:
        """Read what the index says of itself, and take its positions as last seen; None: it is empty.

        Raises ForeignIndex when a newer version wrote it.
        """
        names = (
            b"token", b"cluster_id", b"topic_id", b"receipts_id", b"group",
            b"rebuild", b"mark", b"tail", b"unknown", b"doubtful", *self._expected,
        )  # fmt: skip
        look = [*self._read_positions(*names), pack("ZRANGE", self._keys.due, -1, -1)]
        with self._lock:
            state, receipts, last, *there = self._session.run([*look, *self._look_expected()])
            found = positions_of(self.shard, state, receipts)
            self._loaded = (*state[:3], receipts)
            if found is None:
                return None
            self.positions = found
        expected = state[-len(self._expected) :]
        token, *bound, rebuild, mark, tail, unknown, doubtful = state[2 : -len(expected)]
        self.doubtful = claims_of(doubtful)
        return Kept(
            found,
            is_whole=self._lost(last, expected, there, found.requests) is None,
            is_rebuilding=rebuild is not None,
            binding=None if bound[1] is None else Binding(*((b or b"").decode() for b in bound)),
            mark=None if mark is None else Mark(*orjson.loads(mark)),
            tail=None if tail is None else Tail(*orjson.loads(tail)),
            unknown_ms=int(unknown or 0),
            token=(token or b"").decode(),
        )

    def begin(
        self,
        positions: Positions,
        *,
        binding: Binding | None = None,
        mark: Mark | None = None,
        told: int = 0,
        judged: int = 0,
        unknown_ms: int = 0,
        is_rebuild: bool = False,
    ) -> None:
        """Empty the index and give it its first positions, in one MULTI.

        It knows nothing of requests below the first position: conditional records below `told`
        counted, unless they are `ignored`. Requests below `judged` are not judged by callers' rules
        again. Requests that were due before `unknown_ms` may have had an outcome that is in no
        receipt; this is kept until `finish`. With `is_rebuild` no other process stores anything
        until `finish`. Raises PositionsMoved when the positions are not those that `load` found.
        """
        with self._lock:
            self._drop_payloads()
            about: list[bytes | str | int] = [b"known_from", positions.requests, b"told", told]
            about += (b"judged", judged)
            if mark is not None:
                about += (b"mark", orjson.dumps(tuple(mark)))
            if unknown_ms:
                about += (b"unknown", unknown_ms)
            callers = self._session.ask("ZRANGE", self._keys.callers, 0, -1)
            first = [
                self._empty(callers),
                pack("ZADD", self._keys.due, "+inf", SENTINEL),
                self._write_requests(positions.requests, *about, *self._bound(binding)),
                self._write_receipts(positions.receipts),
            ]
            if is_rebuild:
                first.append(pack("HSET", self._keys.state, b"rebuild", self._token))
            self._exec_while_opening(first)
            self.positions, self.doubtful = positions, {}
            self._loaded = (
                FORMAT,
                b"%d" % positions.requests,
                self._token,
                b"%d" % positions.receipts,
            )

    def take_over(self, binding: Binding, *, is_rebuild: bool = False) -> None:
        """Write this opening's token into an index that is kept.

        What was read under an earlier token has to be read again.
        """
        with self._lock:
            self._watch_loaded()
            more = (b"rebuild", self._token) if is_rebuild else ()
            about = pack("HSET", self._keys.state, *self._bound(binding), *more)
            self._exec_while_opening([about], even_if_full=True)
            self._loaded = (*self._loaded[:2], self._token, self._loaded[3])

    def discard(self) -> None:
        """Empty an index; the next opening begins it from the journals."""
        with self._lock:
            self._drop_payloads()
            callers = self._session.ask("ZRANGE", self._keys.callers, 0, -1)
            self._exec_while_opening([self._empty(callers)])
            self.positions = Positions(-1, -1)

    def rebind(
        self, positions: Positions, binding: Binding, unknown_ms: int = 0, tail: Tail | None = None
    ) -> None:
        """Bind a kept index to something else, at these positions.

        Apart from entries, it forgets what it holds about requests at or above them: other requests
        will have their offsets. `tail` is the last request record below them. With `unknown_ms` it
        has other receipts, which lack the outcomes of requests that were due before. Then its mark
        is removed, and the next opening writes this in a receipt.
        """
        with self._lock:
            self._watch_loaded()
            keys, first = self._keys, positions.requests
            look = [
                pack("HGETALL", keys.cold),
                pack("ZRANGE", keys.ignored, first, "+inf", "BYSCORE"),
                pack("HGET", keys.state, "known_from"),
            ]
            flat, ignored, known_from = self._session.run(look)
            changes = [
                self._write_requests(first, *self._bound(binding)),
                self._write_receipts(positions.receipts),
            ]
            if unknown_ms:
                about = pack("HSET", keys.state, "unknown", unknown_ms)
                changes += [pack("HDEL", keys.state, "mark"), about]
            if first < self.positions.requests:
                cold = Bits({int(s): bits for s, bits in zip(flat[::2], flat[1::2], strict=True)})
                gone = {offset for offset in cold if offset >= first}
                changes += [
                    pack("HSET", keys.state, "known_from", min(first, int(known_from or 0))),
                    *(pack("ZREM", keys.ignored, *names) for names in _chunks(ignored)),
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
        """Record that these conditional records did not count, according to receipts."""
        with self._lock:
            self._mark_while_opening(self._keys.ignored, offsets)

    def is_ignored(self, offset: int) -> bool:
        """Whether the index lists this conditional record as one that did not count.

        It does not list records that `settle` was `told`.
        """
        with self._lock:
            return bool(self._scores(self._keys.ignored, [offset]))

    def finish(self, receipts: int, ended: Ended) -> None:
        """End a rebuild: set the position `receipts`, and `skip` for ended requests that are not read yet."""
        with self._lock:
            self._watch_positions(self._keys.state, self._keys.receipts)
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

    def doubt(self, claims: Mapping[int, Claim]) -> None:
        """Record that it is not known whether these were delivered: until it is, nothing else ends them."""
        with self._lock:
            self._watch_positions(self._keys.state)
            every = {**self.doubtful, **claims}
            self._exec_while_opening(self._doubt(every), even_if_full=True)
            self.doubtful = every

    def unwant(self, offsets: Collection[int]) -> None:
        """Record that something in Kafka ends these requests in doubt, if they were not delivered."""
        with self._lock:
            self._mark_while_opening(self._keys.unwanted, sorted(offsets))

    def unwanted(self, offsets: Sequence[int]) -> set[int]:
        """Those of these requests that something has ended while they were in doubt."""
        with self._lock:
            return set(self._scores(self._keys.unwanted, offsets))

    def believe(self, offsets: Collection[int]) -> set[int]:
        """End the doubt about these requests, which are now known not to be delivered.

        Those that were ended while they were in doubt stay as they are, and are returned.
        """
        with self._lock:
            for _ in range(MAX_CONTENTION):
                found = self._watch_positions(self._keys.receipts, self._keys.unwanted)
                unwanted = set(self._scores(self._keys.unwanted, list(offsets)))
                left = _without(self.doubtful, set(offsets) - unwanted)
                if self._exec_even_if_full(list(self._doubt(left)), found):
                    self.doubtful = left
                    return unwanted
            raise self._contended("resolving doubtful requests")

    def outcome_unknown(self, due_before_ms: int, now_ms: int) -> int:
        """Make dead letters of pending requests that were due before this; return how many."""
        count, first = 0, 0
        while True:
            with self._lock:
                upto = first + _CHUNK - 1
                flat = self._session.ask("ZRANGE", self._keys.due, first, upto, "WITHSCORES")
                scores = dict(zip(flat[::2], flat[1::2], strict=True))
                names = [name for name, score in scores.items() if float(score) < BAND_MS]
                stored = self._mget(names)
            if not names:
                return count + sum(
                    self._parked_unknown(band, due_before_ms, now_ms)
                    for band in list(self.parked())
                )
            first += len(names)
            changes: dict[int, Postponed] = {}
            for name, payload in zip(names, stored, strict=True):
                entry = as_entry(payload)
                if entry is not None and entry.reason is None and entry.due_ms <= due_before_ms:
                    letter = entry._replace(reason=Reason.OUTCOME_UNKNOWN, detail=OUTCOME_UNKNOWN)
                    at_ms = int(float(scores[name]))  # unchanged: paging needs the order
                    changes[int(name, 16)] = at_ms, letter
            count += len(changes)
            self.defer(changes, now_ms)

    def _parked_unknown(self, band: int, due_before_ms: int, now_ms: int) -> int:
        """The same for a band. Its entries leave it: a dead letter does not wait for the target."""
        count, end = 0, parked_at(band, min(due_before_ms, BAND_MS - 1))
        while True:
            with self._lock:
                look = by_score(self._keys.due, parked_at(band, 0), end, 0, _CHUNK, "WITHSCORES")
                flat = self._session.ask(*look)
                names = flat[::2]
                stored = self._mget(names)
            if not names:
                return count
            changes: dict[int, Postponed] = {}
            for name, score, payload in zip(names, flat[1::2], stored, strict=True):
                entry, at_ms = as_entry(payload), int(float(score)) % BAND_MS
                if entry is not None and entry.reason is None:
                    entry = entry._replace(reason=Reason.OUTCOME_UNKNOWN, detail=OUTCOME_UNKNOWN)
                    count += 1
                changes[int(name, 16)] = at_ms, entry
            self.defer(changes, now_ms)

    def untold(self, most: int) -> tuple[int, list[int]]:
        """The position `requests`, and the first conditional records below it that did not count."""
        with self._lock:
            while True:
                read = self._read_positions()
                state, receipts = self._session.run(read)
                position = self._check(state, receipts).requests
                look = pack(*by_score(self._keys.ignored, "-inf", f"({position}", 0, most))
                names, state, receipts = self._session.run([look, *read])
                if self._check(state, receipts).requests == position:
                    return position, [int(name, 16) for name in names]

    def walk(self) -> Walk:
        """A walk along the requests, over a connection of its own."""
        return Walk(self.shard, self.connections, self._token)

    def store(
        self,
        start: int,
        end: int,
        touched: Touched,
        make_plan: Callable[[View], Plan],
        now_ms: int,
        meanwhile: Callable[[], None] | None = None,
        ended: Container[int] | None = None,
    ) -> Plan:
        """Apply what `make_plan` decides for the records read from `start` to `end` - 1.

        A rebuild passes what has `ended`, which is used instead of `skip`. Raises RecoveryRequired
        when another owner rebuilds the index.

        In one MULTI: entries, removals, caller ids and marks of the cold tier, then the position
        `requests` = `end`, then used `skip` segments are removed. Nothing happens when the position
        is at or beyond `end` already. Raises PositionsMoved when it is below `start`. `meanwhile`
        is called at most once, while Redis is busy with the batch. If a request to be replaced is
        in flight, this is waited for; raises RecoveryRequired when that takes more than 2 s.
        """
        deadline = time.monotonic() + IN_FLIGHT_WAIT_S
        for attempt in range(MAX_CONTENTION):
            with self._lock:
                view, largest = self._look(start, end, touched, ended)
                if view.positions.requests < start:
                    raise PositionsMoved(
                        f"{self.shard}: records were read from {start}, but the index is at "
                        f"{view.positions}"
                    )
                if view.positions.requests >= end:
                    self._saw(view.positions.requests)
                    return Plan()
                is_in_flight = self._is_any_in_flight(touched, view)
                plan = Plan() if is_in_flight else make_plan(view)
                commands = self._intake_commands(plan, view, end, largest, now_ms)
                if not is_in_flight and self._exec(commands, meanwhile if attempt == 0 else None):
                    # before the position: dispatch looks at both
                    self.removed += len(plan.removals)
                    self.positions = self.positions._replace(requests=end)
                    return plan
            if is_in_flight and time.monotonic() > deadline:
                raise RecoveryRequired(
                    f"{self.shard}: the request to replace is still in flight after "
                    f"{IN_FLIGHT_WAIT_S:g} s; requests are read again from {start}"
                )
            if is_in_flight:
                time.sleep(IN_FLIGHT_LOOK_S)
        raise self._contended("storing")

    def judged_before(self, judged: int) -> None:
        """Exempt requests below `judged` from callers' rules; 0: all that are read from now on are judged."""
        with self._lock:
            self._watch_positions(self._keys.state)
            state = self._keys.state
            write = (
                pack("HSET", state, "judged", judged) if judged else pack("HDEL", state, "judged")
            )
            self._exec_while_opening([write])

    def lost_before(self, first: int, told: int) -> None:
        """Record that retention removed the requests from the position to `first` before they were read.

        Conditional records below `told` that name one of these are assumed to have counted.
        """
        with self._lock:
            start = self._watch_positions(self._keys.state).requests
            gap = orjson.dumps((start, first, told))
            self._exec_while_opening([pack("HSET", self._keys.state, "gap", gap)])

    def due(
        self,
        now_ms: int,
        limit: int,
        passing_over: Collection[int] = (),
        release: Collection[str] = (),
    ) -> Due:
        """The entries due at `now_ms`, oldest first, at most `limit` and about 16 MiB of them.

        Checks the positions even when nothing is due. `passing_over` are due entries that are being
        delivered already and so left out. Entries that are parked for the targets in `release` come
        first, as many again at most: others do not wait until a backlog is through.
        """
        with self._lock:
            known = self._bands()
            bands = sorted(band for band, to in known.items() if to in release)
            share = max(1, limit // max(1, len(bands)))
            look = [
                *self._look_due(now_ms, len(passing_over), limit),
                *self._look_expected(),
                *(self._read_band(band, share) for band in bands),
                *self._count_parked(known),
            ]
            state, ready, after, first, last, pending, paused, *more = self._consistent(look)
            there, more = more[: len(self._expected)], more[len(self._expected) :]
            in_bands, (total, *counts) = more[: len(bands)], more[len(bands) :]
            self.doubtful = claims_of(state[3])
            if (lost := self._lost(last, state[4:], there, int(state[1]))) is not None:
                raise PositionsMoved(
                    f"{self.shard}: Redis lost a single key, {lost.decode()}; {_WHY_ALONE}"
                )
            if total != sum(counts):
                self._parked = None  # Redis went back, or an owner that was fenced parked something
                return self.due(now_ms, limit, passing_over, release)
            left = {band: count for band, count in zip(known, counts, strict=True) if count}
            self._parked = {band: known[band] for band in left}
            released = list(chain.from_iterable(in_bands))
            stored = self._payloads(ready + released, int(state[2] or 0))
            is_cut = len(stored) < len(ready) + len(released)
            for band, names in zip(bands, in_bands, strict=True):
                if names and len(names) == left[band] and not is_cut:
                    del left[band]
            found = self._still_there(stored[len(ready) :] + stored[: len(ready)])
            is_timed = pending > 1 and float(first[1]) < BAND_MS
            any_full = len(ready) == limit or any(len(names) == share for names in in_bands)
            return Due(
                entries=[
                    (offset, payload)
                    for name, payload in found
                    if (offset := int(name, 16)) not in passing_over
                ],
                is_full=is_cut or any_full,
                next_due_ms=int(float(after[1])) if after else None,
                oldest_ms=int(float(first[1])) if is_timed else None,
                pending=pending - 1,
                paused=frozenset(topic.decode() for topic in paused),
                parked=self._parked,
                backlogs=frozenset(known[band] for band in left),
                released=frozenset(int(name, 16) for name in released),
                doubtful=self.doubtful,
            )

    def _look_due(self, now_ms: int, skipped: int, limit: int) -> list[bytes]:
        due = self._keys.due
        return [
            pack(*by_score(due, "-inf", now_ms, skipped, limit)),
            pack(*by_score(due, f"({now_ms}", f"({BAND_MS}", 0, 1, "WITHSCORES")),
            pack("ZRANGE", due, 0, 0, "WITHSCORES"),
            pack("ZRANGE", due, -1, -1),
            pack("ZCARD", due),
            pack("HKEYS", self._keys.paused),
        ]

    def _count_parked(self, bands: Iterable[int]) -> list[bytes]:
        """Counts of all parked entries, then of those in each of these bands."""
        spans = [(BAND_MS, _span(BANDS)[1]), *map(_span, bands)]
        return [pack("ZCOUNT", self._keys.due, *span) for span in spans]

    def parked(self) -> Mapping[int, str]:
        """The target of each band that has parked entries, or had some until a moment ago."""
        with self._lock:
            return self._bands()

    def mark_in_flight(self, offsets: Sequence[int], removed: int) -> set[int]:
        """Mark these requests as in flight; return those that are not pending any more.

        Those are not to be delivered. `removed` is the value of that attribute when the requests
        were read. From here until they are settled, a cancel is too late.
        """
        names = [member(offset) for offset in offsets]
        key = self._keys.in_flight
        # one field for each opening: a fenced owner that does not know it cannot write its successor's
        forget = pack("HDEL", key, self._token)
        command = pack("HSET", key, self._token, b"".join(names)) if names else forget
        with self._lock:
            try:
                self._check(*self._session.run([command, *self._read_positions()])[1:])
            except PositionsMoved:
                self._session.run([forget])  # no other owner takes it back
                raise
            except IndexFull:
                self._write_even_if_full(command)
            if self.removed == removed or not names:
                return set()
            scores = self._session.ask("ZMSCORE", self._keys.due, *names)
        return {o for o, score in zip(offsets, scores, strict=True) if score is None}

    def settle(
        self,
        removals: Mapping[int, str | None],
        receipts: int,
        postpone: Mapping[int, Postponed] = _NOTHING,
        now_ms: int = 0,
        counted: Mapping[str, Sequence[int]] = _NOTHING,
        origins: Sequence[int] = (),
        told: Sequence[int] = (),
        mark: Mark | None = None,
        early: Sequence[int] = (),
    ) -> None:
        """Remove delivered or dead requests (offset -> caller id) and set the position `receipts`.

        `counted` are those of the callers whose pending requests are counted, `origins` the first
        records of those that promotion wrote. `told` are ignored records that are in a receipt now,
        `mark` is the low-water mark that it carries. `early` are replacements, still in Kafka,
        of what is removed here.

        Dispatch and recovery both end with this. Removals at or above the position `requests` are
        remembered in `skip` until their request is read. `postpone` is what `defer` takes, in the
        same MULTI.
        """
        with self._lock:
            freed = [c for c in removals.values() if c is not None]
            for _ in range(MAX_CONTENTION):
                keys = [self._keys.receipts, *([self._keys.ids] if freed else [])]
                found, pending = self._watch_pending(postpone, *keys)
                ahead: Sequence[int] = ()
                if removals and max(removals) >= found.requests:
                    found = self._watch_positions(self._keys.state, self._keys.skip)
                    ahead = [offset for offset in removals if offset >= found.requests]
                holders = self.holders(freed)
                commands = list(self._settle_commands(removals, holders, found, receipts))
                commands += self._skip(ahead)
                commands += _zrem(self._keys.moved, origins)
                commands += self._told(told, mark)
                commands += self._mark(self._keys.early, early)
                commands += self._defer_commands(pending, now_ms)
                for caller, offsets in counted.items():
                    commands += _zrem(self._keys.of(caller), offsets)
                if self._exec_even_if_full(commands, found):
                    self.positions = Positions(found.requests, receipts)
                    self._settled = receipts
                    self.doubtful = _without(self.doubtful, removals)
                    return
            raise self._contended("settling")

    def defer(self, changes: Mapping[int, Postponed], now_ms: int) -> None:
        """Postpone these pending entries, by offset, in one MULTI; those that have ended are left out."""
        with self._lock:
            for _ in range(MAX_CONTENTION):
                keys = self._keys.state, self._keys.receipts
                found, pending = self._watch_pending(changes, *keys)
                commands = self._defer_commands(pending, now_ms)
                if not commands or self._exec_even_if_full(commands, found):
                    return
            raise self._contended("postponing")

    def count_cold(self) -> int:
        """How many requests are in the cold tier."""
        with self._lock:
            return int(self._session.ask("HGET", self._keys.state, "cold") or 0)

    def pending(self, rank: int, limit: int) -> list[int]:
        """The entries from this rank on, by due time."""
        with self._lock:
            names = self._session.ask("ZRANGE", self._keys.due, rank, rank + limit - 1)
        return [int(name, 16) for name in names if name != SENTINEL]

    def stored(self, rank: int, limit: int) -> list[tuple[int, bytes | None]]:
        """The entries from this rank on, by due time, with their stored form; about 16 MiB at most."""
        with self._lock:
            look = pack("ZRANGE", self._keys.due, rank, rank + limit - 1)
            names, largest = self._session.run([look, pack("HGET", self._keys.state, "largest")])
            there = [name for name in names if name != SENTINEL]
            found = self._payloads(there, int(largest or 0))
        return [(int(name, 16), payload) for name, payload in found]

    def caller_ids(self, offsets: Sequence[int]) -> dict[int, str | None]:
        """The caller id of each of these requests that is pending; others are left out."""
        with self._lock:
            if not offsets or not self._session.ask("EXISTS", self._keys.ids):
                return {}
            stored = self._mget([member(offset) for offset in offsets])
        found = {
            o: as_entry(held) for o, held in zip(offsets, stored, strict=True) if held is not None
        }
        return {offset: entry and entry.caller_id for offset, entry in found.items()}

    def moved(self, offsets: Sequence[int]) -> dict[int, int]:
        """The record by which each of these requests came into the index, if promotion wrote it again."""
        with self._lock:
            if not offsets or not self._session.ask("EXISTS", self._keys.moved):
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
            stored = self._mget([member(offset) for offset in places.values()])
        return {
            id: Named(
                offset,
                offset in there and (entry is None or entry.reason is None),
                None if entry is None else entry.caller_id,
                offsets[id] if offset != offsets[id] else None,
            )
            for (id, offset), entry in zip(places.items(), map(as_entry, stored), strict=True)
        }

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        with self._lock:
            self._session.close()

    def _forget_from(self, first: int, tail: Tail | None) -> list[bytes]:
        """Commands that remove what is said of requests at or above this offset, apart from entries."""
        keys = self._keys
        return [
            pack("HDEL", keys.state, "mark", "ahead"),
            *self._doubt({o: claim for o, claim in self.doubtful.items() if o < first}),
            pack("HDEL", keys.state, "tail")
            if tail is None
            else pack("HSET", keys.state, "tail", orjson.dumps(tuple(tail))),
            pack("UNLINK", keys.skip, keys.early),
            *(
                pack("ZREMRANGEBYSCORE", key, first, "(+inf")
                for key in (keys.moved, keys.ended, keys.unwanted)
            ),
            *(pack("HDEL", keys.ids, *callers) for callers in _chunks(self._holders_from(first))),
            *(
                command
                for of, offsets in self._counted_from(first).items()
                for command in _zrem(of, offsets)
            ),
        ]

    def _holders_from(self, first: int) -> list[bytes]:
        """The caller ids that requests at or above this offset hold, including those of the cold tier."""
        flat = self._session.ask("HGETALL", self._keys.ids)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return [caller for caller, name in pairs if name and int(name, 16) >= first]

    def _counted_from(self, first: int) -> dict[bytes, list[int]]:
        """The counted requests at or above this offset, by the key of each caller."""
        callers = self._session.ask("ZRANGE", self._keys.callers, 0, -1)
        sets = [self._keys.of(caller.decode()) for caller in callers]
        every = self._session.run([pack("ZRANGE", of, 0, -1) for of in sets]) if sets else []
        return {
            of: [offset for name in names if (offset := int(name, 16)) >= first]
            for of, names in zip(sets, every, strict=True)
        }

    def _bands(self) -> dict[int, str]:
        """The target of each band, found in its entries: it is stored nowhere else, so they cannot differ."""
        if self._parked is None:
            bands: list[int] = []
            lowest = parked_at(1, 0)
            while first := self._session.ask(
                *by_score(self._keys.due, lowest, "(+inf", 0, 1, "WITHSCORES")
            ):
                bands.append(band_at(int(float(first[1]))))
                lowest = parked_at(bands[-1] + 1, 0)
            found = ((band, self._target_of(band)) for band in bands)
            self._parked = {band: target for band, target in found if target is not None}
        return self._parked

    def _target_of(self, band: int) -> str | None:
        """The target of a band; None if nothing is left in it.

        Entries whose payloads are gone become due, and are read again from Kafka.
        """
        while names := self._session.run([self._read_band(band, LOOKED_AT)])[0]:
            heads = self._session.run(
                [pack("GETRANGE", self._keys.message(name), 0, HEAD_BYTES - 1) for name in names]
            )
            for name, head in zip(names, heads, strict=True):
                entry = as_entry(head) or (as_entry(self._mget([name])[0]) if head else None)
                if entry is not None:
                    return waits_for(entry)
            scores = self._scores(self._keys.due, [int(name, 16) for name in names])
            self.defer({offset: (score % BAND_MS, None) for offset, score in scores.items()}, 0)
        return None

    def _read_band(self, band: int, limit: int) -> bytes:
        return pack(*by_score(self._keys.due, *_span(band), 0, limit))

    def _is_any_in_flight(self, touched: Touched, view: View) -> bool:
        """Whether a request to be replaced is in flight, or may have a receipt that is not settled.

        Raises PositionsMoved if the index went back: what looks pending may have been delivered.
        """
        self._settled = max(self._settled, view.positions.receipts)
        if not touched.replaced:
            return False
        if view.positions.receipts < self._settled:
            raise PositionsMoved(
                f"{self.shard}: receipts were settled up to {self._settled}, but the index is at "
                f"{view.positions}"
            )
        named = [view.named[id].offset for id in touched.replaced if id in view.named]
        return self._may_have_gone_back(view.positions.receipts) or self._is_in_flight(named)

    def _may_have_gone_back(self, receipts: int) -> bool:
        """Whether what looks pending may have a receipt.

        Asked until the answer is no: this connection sees no other Redis after that.
        """
        if self.is_behind is None or self.is_behind(receipts):
            return self.is_behind is not None
        self.is_behind = None
        return False

    def _is_in_flight(self, offsets: Sequence[int]) -> bool:
        """Whether one of these requests is in flight; from now on this is watched as well."""
        watch = pack("WATCH", self._keys.in_flight)
        _, named = self._session.run([watch, pack("HGETALL", self._keys.in_flight)])
        return not set(map(member, offsets)).isdisjoint(in_flight(named))

    def _look(
        self, start: int, end: int, touched: Touched, ended: Container[int] | None
    ) -> tuple[View, int]:
        segments = range(start // SEGMENT, (max(start, end - 1)) // SEGMENT + 1)
        commands = [pack("WATCH", self._keys.state, self._keys.skip)]
        commands += self._read_positions(
            b"rebuild", b"topic_id", b"gap",
            b"tail", b"doubtful", b"known_from", b"cold", b"largest", b"judged", b"told",
        )  # fmt: skip
        commands.append(pack("HMGET", self._keys.skip, *segments))
        _, state, receipts, bitmaps = self._session.run(commands)
        positions = positions_of(self.shard, state, receipts)
        if positions is None:
            raise PositionsMoved(
                f"{self.shard}: the index is empty, but positions {self.positions} were expected"
            )
        if state[2] is not None and (ended is None or state[2] != self._token):
            raise RecoveryRequired(
                f"{self.shard}: its owner rebuilds the index; requests wait in Kafka until then"
            )
        now = self.topic_id()
        if now is not None and state[3] is not None and state[3] != now.encode():
            raise ForeignIndex(f"{self.shard}: the index belongs to another topic of this name")
        gap = Gap() if state[4] is None else Gap(*orjson.loads(state[4]))
        tail = None if state[5] is None else Tail(*orjson.loads(state[5]))
        known_from, cold, largest, judged, told = (int(number or 0) for number in state[7:])
        named = self.named(touched.ids)
        theirs = {one.caller_id for one in named.values() if one.caller_id is not None}
        holders = self.holders([*touched.caller_ids, *theirs.difference(touched.caller_ids)])
        may_be_told = known_from or touched.replaced
        may_be_cold = list(touched.cold)
        if cold:
            may_be_cold += [*holders.values(), *(one.offset for one in named.values())]
        marked = {s: bitmap for s, bitmap in zip(segments, bitmaps, strict=True) if bitmap}
        skipped: Container[int] = Bits(marked) if marked else frozenset[int]()
        view = View(
            positions, skipped if ended is None else ended, holders,
            self._bits(self._keys.cold, may_be_cold), known_from,
            named, judged, told,
            frozenset(self._scores(self._keys.ignored, touched.conditional if may_be_told else ())),
            gap,
            frozenset(self._scores(self._keys.early, touched.conditional if touched.replaced else ())),
            self._scores(self._keys.ended, touched.origins), bool(cold), tail=tail,
            doubtful=claims_of(state[6]).keys(),
        )  # fmt: skip
        return view, largest

    def _scores(self, key: bytes, offsets: Sequence[int]) -> dict[int, int]:
        """The scores of these offsets in a sorted set; those that are not in it are left out."""
        scores = self._ask_about([member(offset) for offset in offsets], "ZMSCORE", key)
        return {o: int(float(s)) for o, s in zip(offsets, scores, strict=True) if s is not None}

    def _intake_commands(
        self, plan: Plan, view: View, end: int, largest: int, now_ms: int
    ) -> Iterator[bytes]:
        encode, put = entries.encode, self._set
        for offset, entry in plan.puts.items():
            stored = encode(entry)
            if len(stored) > largest:
                largest = len(stored)
            yield put(offset, stored, entry.due_ms, now_ms)
        due = [(entry.due_ms, offset) for offset, entry in plan.puts.items()]
        yield from _zadd(self._keys.due, due)
        yield from self._remove(plan.removals)
        moved = {c: o for c, o in plan.holders.items() if view.holders.get(c) != o}
        yield from self._hold(moved)
        yield from self._move_cold(plan, view)
        for caller, scored in plan.counted.items():
            yield from _zadd(self._keys.of(caller), scored)
            yield from _zrem(self._keys.of(caller), plan.removals)
            if scored:
                yield pack("ZADD", self._keys.callers, 0, caller)
        yield from self._mark(self._keys.ignored, sorted(plan.ignored))
        yield from self._mark(self._keys.unwanted, sorted(plan.unwanted))
        yield from _zrem(self._keys.early, sorted(view.early))
        ended = [(by, asked) for asked, by in plan.ended.items()]
        yield from self._remember(self._keys.ended, b"ended", ended)
        hot = [(now, asked) for asked, now in plan.moved.items() if now in plan.puts]
        yield from self._remember(self._keys.moved, b"moved", hot)
        names = (b"named", 1) if any(offset is not None for offset in moved.values()) else ()
        tail = () if plan.tail is None else (b"tail", orjson.dumps(tuple(plan.tail)))
        yield self._write_requests(end, b"largest", largest, *names, *tail)
        if isinstance(view.skipped, Bits):
            used = range(view.positions.requests // SEGMENT, end // SEGMENT)
            for segments in _chunks(list(used)):
                yield pack("HDEL", self._keys.skip, *segments)

    def _remember(
        self, key: bytes, name: bytes, scored: Sequence[tuple[int, int]]
    ) -> Iterator[bytes]:
        """Add to a sorted set that continues to exist, whatever is removed from it."""
        if scored:
            yield pack("ZADD", key, "+inf", SENTINEL)
            yield pack("HSET", self._keys.state, name, 1)
        yield from _zadd(key, scored)

    def _mark(self, key: bytes, offsets: Sequence[int]) -> Iterator[bytes]:
        return _zadd(key, [(offset, offset) for offset in offsets])

    def _bound(self, binding: Binding | None) -> tuple[bytes | str, ...]:
        about: list[bytes | str] = [b"token", self._token]
        for name, value in binding._asdict().items() if binding is not None else ():
            about += (name, value)
        return tuple(about)

    def _drop_payloads(self) -> None:
        """Remove the payloads of an index that is emptied: they would take up memory until they expire.

        Each step only while the positions are those that `load` found: the index may be another
        owner's by now.
        """
        while True:
            self._watch_loaded()
            names = self._session.ask(*by_score(self._keys.due, "-inf", "(+inf", 0, _CHUNK))
            if not names:
                return
            drop = pack("UNLINK", *(self._keys.message(name) for name in names))
            self._exec_while_opening([drop, pack("ZREM", self._keys.due, *names)])

    def _watch_loaded(self) -> None:
        """Watch the index; raise PositionsMoved when it is not the one that `load` found."""
        watch = pack("WATCH", self._keys.state, self._keys.receipts)
        _, state, receipts = self._session.run([watch, *self._read_positions(b"token")])
        if (*state, receipts) != self._loaded:
            raise PositionsMoved(
                f"{self.shard}: the index has changed: expected {self._loaded}, found "
                f"{(*state, receipts)}"
            )

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

    def _settle_commands(
        self,
        removals: Mapping[int, str | None],
        holders: Mapping[str, int],
        found: Positions,
        receipts: int,
    ) -> Iterator[bytes]:
        yield from self._remove([offset for offset in removals if offset < found.requests])
        freed = [c for offset, c in removals.items() if c is not None and holders.get(c) == offset]
        yield from self._hold(dict.fromkeys(freed))
        yield pack("UNLINK", self._keys.in_flight)
        if not self.doubtful.keys().isdisjoint(removals):
            yield from self._doubt(_without(self.doubtful, removals))
            yield from _zrem(self._keys.unwanted, [o for o in self.doubtful if o in removals])
        yield self._write_receipts(receipts)

    def _doubt(self, claims: Mapping[int, Claim]) -> Iterator[bytes]:
        if claims:
            yield pack(
                "HSET", self._keys.state, "doubtful", orjson.dumps([*map(tuple, claims.values())])
            )
        else:
            yield pack("HDEL", self._keys.state, "doubtful")

    def _skip(self, offsets: Sequence[int]) -> Iterator[bytes]:
        for segment, bitmap in self._bits(self._keys.skip, offsets).changed(offsets, ()).items():
            yield pack("HSET", self._keys.skip, segment, bitmap)
        if offsets:
            yield pack("HSET", self._keys.state, b"ahead", max(offsets) + 1)

    def _told(self, told: Sequence[int], mark: Mark | None) -> Iterator[bytes]:
        yield from _zrem(self._keys.ignored, told)
        if mark is not None:
            yield pack("HSET", self._keys.state, "mark", orjson.dumps(tuple(mark)))
            yield pack("HDEL", self._keys.state, "unknown")  # the earlier barrier says it
            # requests below the mark have ended, or moved since
            for key in (self._keys.moved, self._keys.ended):
                yield pack("ZREMRANGEBYSCORE", key, "-inf", f"({mark.requests}")

    def _defer_commands(self, changes: Mapping[int, Postponed], now_ms: int) -> list[bytes]:
        commands = [
            self._set(
                offset, entries.encode(entry), at_ms, now_ms, is_letter=entry.reason is not None
            )
            for offset, (at_ms, entry) in changes.items()
            if entry is not None
        ]
        scored = [(at_ms, offset) for offset, (at_ms, _) in changes.items()]
        for at_ms, entry in changes.values():
            if band := band_at(at_ms):
                assert entry is not None, "a parked request needs a target"
                if self._parked is not None:  # else it is looked up later, not before a MULTI
                    self._parked[band] = waits_for(entry)
        return [*commands, *_zadd(self._keys.due, scored, only_there=True)]

    def _remove(self, offsets: Sequence[int]) -> Iterator[bytes]:
        for chunk in _chunks(offsets):
            names = [member(offset) for offset in chunk]
            yield pack("ZREM", self._keys.due, *names)
            yield pack("UNLINK", *(self._keys.message(name) for name in names))

    def _bits(self, key: bytes, offsets: Iterable[int]) -> Bits:
        """The bitmaps under this key, as far as these offsets need them."""
        segments = sorted({offset // SEGMENT for offset in offsets})
        found = self._ask_about(segments, "HMGET", key)
        return Bits({s: bitmap for s, bitmap in zip(segments, found, strict=True) if bitmap})

    def _payloads(self, names: list[bytes], largest: int) -> list[tuple[bytes, bytes | None]]:
        if len(names) * largest > MAX_BATCH_BYTES:
            names = names[: self._fitting(names)]
        return list(zip(names, self._mget(names), strict=True))

    def _fitting(self, names: list[bytes]) -> int:
        lengths = [pack("STRLEN", self._keys.message(name)) for name in names]
        total = 0
        for count, length in enumerate(self._session.run(lengths)):
            total += length
            if total > MAX_BATCH_BYTES:
                return max(1, count)
        return len(names)

    def _mget(self, names: Sequence[bytes]) -> list[bytes | None]:
        return self._ask_about([self._keys.message(name) for name in names], "MGET")

    def _ask_about(self, many: Sequence[Any], *command: bytes | str) -> list[Any]:
        """The replies of a command about each of these, asked about a thousand at once."""
        return [one for chunk in _chunks(many) for one in self._session.ask(*command, *chunk)]

    def _still_there(
        self, stored: list[tuple[bytes, bytes | None]]
    ) -> list[tuple[bytes, bytes | None]]:
        lost = [name for name, payload in stored if payload is None]
        if not lost:
            return stored
        scores = self._session.ask("ZMSCORE", self._keys.due, *lost)
        ended = {name for name, score in zip(lost, scores, strict=True) if score is None}
        return [(name, payload) for name, payload in stored if name not in ended]

    def _set(
        self, offset: int, stored: bytes, due_ms: int, now_ms: int, *, is_letter: bool = False
    ) -> bytes:
        if due_ms >= BAND_MS:
            left_s = LETTER_FOR_S if is_letter else PARKED_FOR_S
        else:
            left_s = (due_ms - now_ms + 999) // 1000 if due_ms > now_ms else 0
        expires_s = b"%d" % (left_s + self.grace_s)
        return self._set_ex % (offset, len(stored), stored, len(expires_s), expires_s)

    def _hold(self, holders: Mapping[str, int | None]) -> Iterator[bytes]:
        for chunk in _chunks([(c, offset) for c, offset in holders.items() if offset is not None]):
            flat = [part for c, offset in chunk for part in (c.encode(), member(offset))]
            yield pack("HSET", self._keys.ids, *flat, IDS_SENTINEL, b"")
        for freed in _chunks([c for c, offset in holders.items() if offset is None]):
            yield pack("HDEL", self._keys.ids, *freed)

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
        """The command that empties the index, without its payloads.

        Payloads of requests that are read again are overwritten, others expire. What is counted of
        these callers is removed: a rebuild counts what is pending then.
        """
        keys = self._keys
        return pack(
            "UNLINK", keys.due, keys.ids, keys.cold, keys.skip, keys.ignored, keys.early, keys.moved,
            keys.ended, keys.unwanted, keys.in_flight, keys.state, keys.receipts,
            keys.callers, *(keys.of(caller.decode()) for caller in callers),
        )  # fmt: skip

    def _read_positions(self, *more: bytes) -> list[bytes]:
        return [
            pack("HMGET", self._keys.state, "format", "requests", *more),
            pack("GET", self._keys.receipts),
        ]

    def _write_requests(self, position: int, *more: bytes | str | int) -> bytes:
        return pack("HSET", self._keys.state, "format", FORMAT, "requests", position, *more)

    def _write_receipts(self, position: int) -> bytes:
        return pack("SET", self._keys.receipts, position)

    def _exec(self, commands: Iterable[bytes], meanwhile: Callable[[], None] | None = None) -> bool:
        replies = self._session.run(chain((_MULTI,), commands, (_EXEC,)), meanwhile)[-1]
        for reply in replies or ():
            if isinstance(reply, Exception):
                raise reply
        return replies is not None

    def _watch_pending(
        self, changes: Mapping[int, Postponed], *keys: bytes
    ) -> tuple[Positions, dict[int, Postponed]]:
        """Watch these keys; return the positions, and the changes of entries that are pending."""
        if not changes:
            return self._watch_positions(*keys), {}
        names = [member(offset) for offset in changes]
        look = pack("ZMSCORE", self._keys.due, *names)
        _, *positions, here = self._session.run(
            [pack("WATCH", *keys), *self._read_positions(), look]
        )
        pending = {
            offset: change
            for (offset, change), score in zip(changes.items(), here, strict=True)
            if score is not None
        }
        return self._check(*positions), pending

    def _watch_positions(self, *keys: bytes) -> Positions:
        commands = [pack("WATCH", *keys), *self._read_positions()]
        return self._check(*self._session.run(commands)[1:])

    def _check(self, state: Sequence[bytes | None], receipts: bytes | None) -> Positions:
        found, seen = positions_of(self.shard, state, receipts), self.positions
        if found is None or found.receipts != seen.receipts or found.requests < seen.requests:
            raise PositionsMoved(f"{self.shard}: the index is at {found}, but {seen} was expected")
        self._saw(found.requests)
        return found

    def _saw(self, requests: int) -> None:
        if requests > self.positions.requests:
            self.removed += 1  # another process stored requests: there may be cancels among them
            self.positions = self.positions._replace(requests=requests)

    def _consistent(self, commands: Sequence[bytes]) -> list[Any]:
        """The state and the replies to these reads, consistent with each other. No MULTI: see when_full."""
        positions = self._read_positions(b"largest", b"doubtful", *self._expected)
        while True:
            state, position, *replies, state_after, position_after = self._session.run(
                [*positions, *commands, *positions]
            )
            self._check(state, position)
            if (state, position) == (state_after, position_after):
                return [state, *replies]

    def _write_even_if_full(self, command: bytes) -> None:
        for _ in range(MAX_CONTENTION):
            found = self._check(*self._session.run(self._read_positions()))
            if self._session.run([in_one_script(self._keys, found, [command])])[0]:
                return
        raise self._contended("marking deliveries in flight")

    def _contended(self, what: str) -> RecoveryRequired:
        return RecoveryRequired(
            f"{self.shard}: the index changed {MAX_CONTENTION} times while {what}"
        )

    def _mark_while_opening(self, key: bytes, offsets: Sequence[int]) -> None:
        self._watch_positions(self._keys.state)
        self._exec_while_opening(self._mark(key, offsets), even_if_full=True)

    def _exec_while_opening(self, commands: Iterable[bytes], *, even_if_full: bool = False) -> None:
        if even_if_full:
            is_done = self._exec_even_if_full(list(commands), self.positions)
        else:
            is_done = self._exec(commands)
        if not is_done:
            raise PositionsMoved(f"{self.shard}: the index changed while it was being opened")

    def _exec_even_if_full(self, commands: Sequence[bytes], seen: Positions) -> bool:
        try:
            return self._exec(commands)
        except IndexFull:
            script = in_one_script(self._keys, seen, commands)
            return bool(self._session.run([script])[0])


def positions_of(
    shard: Shard, state: Sequence[bytes | None], receipts: bytes | None
) -> Positions | None:
    """The positions, from (format, requests, …) and receipts as Redis has them; None if there are none.

    None also for an index of an earlier version, which counts as empty. Raises ForeignIndex for one
    of a later version.
    """
    version, requests, *_ = state
    if version == FORMAT and requests is not None and receipts is not None:
        return Positions(int(requests), int(receipts))
    if version not in (None, FORMAT, *OLDER):
        raise ForeignIndex(
            f"the index of {shard} in Redis has format {version.decode(errors='replace')!r}, but "
            f"this version reads {FORMAT.decode()}; run the version of blackbox that wrote it"
        )
    return None  # there is none, or it is being emptied between the two reads


def claims_of(stored: bytes | None) -> dict[int, Claim]:
    """The claims that the state lists as in doubt."""
    return {one[0]: Claim(*one) for one in orjson.loads(stored or b"[]")}


def _without(claims: Mapping[int, Claim], offsets: Container[int]) -> dict[int, Claim]:
    return {offset: claim for offset, claim in claims.items() if offset not in offsets}


def _span(band: int) -> tuple[int, str]:
    """The scores of a band, from its first to before the next band's first."""
    return parked_at(band, 0), f"({parked_at(band + 1, 0)}"


def in_flight(named: Sequence[bytes] | Mapping[bytes, bytes]) -> Iterator[bytes]:
    """The members that owners marked as in flight, from the whole key, flat or as a mapping."""
    every = named.values() if isinstance(named, Mapping) else named[1::2]
    return (names[at : at + 16] for names in every for at in range(0, len(names), 16))


def as_entry(stored: bytes | None) -> Entry | None:
    """Decode an entry; None if it is gone or cannot be read: dispatch reads it again from Kafka."""
    try:
        return entries.decode(stored or b"")
    except ValueError:
        return None


def _zadd(
    key: bytes, scored: Sequence[tuple[int, int]], *, only_there: bool = False
) -> Iterator[bytes]:
    for chunk in _chunks(scored):
        yield zadd(key, chunk, only_there=only_there)


def _zrem(key: bytes, offsets: Sequence[int]) -> Iterator[bytes]:
    for chunk in _chunks(offsets):
        yield pack("ZREM", key, *map(member, chunk))


def _chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for first in range(0, len(items), _CHUNK):
        yield items[first : first + _CHUNK]
