"""How intake stores a batch of request records."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import chain

import orjson

from blackbox.core.bits import SEGMENT, Bits
from blackbox.core.plan import Gap, Plan, Tail, Touched, View
from blackbox.index import refused_bitmaps
from blackbox.index.command_builder import zadd_chunks, zrem_chunks
from blackbox.index.connection import pack
from blackbox.index.guarded_index import MAX_CONTENTION
from blackbox.index.keys import SENTINEL
from blackbox.index.lookups import Lookups
from blackbox.index.stored_fields import claims_of, in_flight, positions_of
from blackbox.records import entry as entries
from blackbox.records.entry import Entry
from blackbox.records.errors import ForeignIndex, PositionsMoved, RecoveryRequired
from blackbox.records.request import member

IN_FLIGHT_LOOK_S = 0.01
IN_FLIGHT_WAIT_S = 2.0  # other shards of the process are not read in that time


class IntakeChanges(Lookups):
    """The part of ShardIndex that stores; most of its commands are made in `command_builder.py`."""

    def store(
        self,
        start: int,
        end: int,
        touched: Touched,
        make_plan: Callable[[View], Plan],
        now_ms: int,
        while_busy: Callable[[], None] | None = None,
        ended: Container[int] | None = None,
    ) -> Plan:
        """Apply what `make_plan` decides for the records read from `start` to `end` - 1.

        A rebuild passes what has `ended`, which is used instead of `skip`. Raises RecoveryRequired
        when another owner rebuilds the index.

        Data and the position `requests` change in one MULTI. Nothing happens when the position is at or beyond `end`
        already. Raises PositionsMoved when it is below `start`. `while_busy` is called at most once, while Redis is
        busy with the batch. A request to be replaced that is in flight is waited for, at most 2 s: RecoveryRequired.
        """
        deadline = time.monotonic() + IN_FLIGHT_WAIT_S
        for attempt in range(MAX_CONTENTION):
            with self._lock:
                view, largest = self._read_view(start, end, touched, ended)
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
                refused = self._marked_refused(plan)
                commands = self._commands_that_store(plan, view, refused, end, largest, now_ms)
                if not is_in_flight and self._run_multi(
                    commands, while_busy if attempt == 0 else None
                ):
                    # before the position: dispatch looks at both
                    self.removed += len(plan.removals)
                    self.positions = self.positions._replace(requests=end)
                    return plan
            if is_in_flight and time.monotonic() > deadline:
                raise RecoveryRequired(
                    f"{self.shard}: the request to replace is still in flight after "
                    f"{IN_FLIGHT_WAIT_S:g} s; requests are read again from {start}"
                )
            if is_in_flight:  # outside the lock, so that dispatch can settle the batch
                time.sleep(IN_FLIGHT_LOOK_S)
        raise self._contended("storing")

    def _read_view(
        self, start: int, end: int, touched: Touched, ended: Container[int] | None
    ) -> tuple[View, int]:
        segments = range(start // SEGMENT, (max(start, end - 1)) // SEGMENT + 1)
        # `receipts` is not watched: dispatch moves it all the time, and would make intake retry.
        watched = [self._keys.state, self._keys.skip]
        if touched.replaced:
            # before any read: what dispatch takes or settles after it makes the EXEC fail
            watched.append(self._keys.in_flight)
        commands = [pack("WATCH", *watched)]
        commands += self._read_positions(
            b"rebuild", b"topic_id", b"gap",
            b"tail", b"doubtful", b"known_from", b"cold", b"largest", b"judged", b"verdicts_below",
            b"renewed",
        )  # fmt: skip
        commands.append(pack("HMGET", self._keys.skip, *segments))
        _, state, receipts, bitmaps = self._redis.run(commands)
        positions = positions_of(self.shard, state, receipts)
        if positions is None:
            raise PositionsMoved(
                f"{self.shard}: the index is empty, but positions {self.positions} were expected"
            )
        if state[2] is not None and (ended is None or state[2] != self._token):
            raise RecoveryRequired(
                f"{self.shard}: its owner rebuilds the index; requests wait in Kafka until then"
            )
        # A topic that is created again begins at offset 0: positions of the old one mean nothing.
        now = self.topic_id()
        if now is not None and state[3] is not None and state[3] != now.encode():
            raise ForeignIndex(f"{self.shard}: the index belongs to another topic of this name")
        gap = Gap() if state[4] is None else Gap(*orjson.loads(state[4]))
        tail = None if state[5] is None else Tail(*orjson.loads(state[5]))
        known_from, cold, largest, judged, verdicts_below, renewed = (
            int(n or 0) for n in state[7:]
        )
        named = self.named(touched.ids)
        theirs = {one.caller_id for one in named.values() if one.caller_id is not None}
        holders = self.holders([*touched.caller_ids, *theirs.difference(touched.caller_ids)])
        # With marks in `skip`, Redis went back: receipts have outcomes. A rebuild knows them itself.
        with_verdicts = [*touched.holding] if ended is None and any(bitmaps) else []
        with_verdicts += touched.conditional if known_from or touched.replaced else ()
        may_be_cold = list(touched.cold)
        if cold:
            may_be_cold += [*holders.values(), *(one.offset for one in named.values())]
        marked = {s: bitmap for s, bitmap in zip(segments, bitmaps, strict=True) if bitmap}
        skipped: Container[int] = Bits(marked) if marked else frozenset[int]()
        view = View(
            positions, skipped if ended is None else ended, holders,
            self._bits(self._keys.cold, may_be_cold), known_from,
            named, judged, verdicts_below,
            frozenset(self._scores(self._keys.ignored, with_verdicts)), gap,
            frozenset(self._scores(self._keys.early, touched.conditional if touched.replaced else ())),
            self._scores(self._keys.ended, touched.origins), bool(cold), renewed, tail=tail,
            doubtful=claims_of(state[6]).keys(),
            topic_id=None if state[3] is None else state[3].decode(),
        )  # fmt: skip
        return view, largest

    def _commands_that_store(
        self,
        plan: Plan,
        view: View,
        refused: Mapping[str, bytes],
        end: int,
        largest: int,
        now_ms: int,
    ) -> Iterator[bytes]:
        """The commands of the MULTI that stores a batch.

        For each usual request: `SET msg:<member> <entry> EX <s>`, `ZADD due <due_ms> <member>` and, if it has a caller
        id, `HSET ids <caller id> <member>`. One beyond the horizon has only a bit in `cold`. A large refused one has a
        bit in `refused` instead of a payload. For the batch: `HSET state requests <end>`.
        """
        if refused:
            flat = [part for field in refused.items() for part in field]
            yield pack("HSET", self._keys.refused, *flat, SENTINEL, b"")
            yield pack("HSET", self._keys.state, b"refused", 1)
        for offset, entry in plan.puts.items():
            if type(entry) is Entry and entry.cause is not None:
                continue
            stored = entries.encode(entry)
            if len(stored) > largest:
                largest = len(stored)
            is_letter = type(entry) is Entry and entry.reason is not None
            yield self._set_payload(offset, stored, entry.due_ms, now_ms, is_letter=is_letter)
        yield from zadd_chunks(self._keys.due, [(e.due_ms, o) for o, e in plan.puts.items()])
        yield from self._remove(plan.removals)
        # Written only where it differs from what the index has.
        moved = {c: o for c, o in plan.holders.items() if view.holders.get(c) != o}
        yield from self._set_caller_ids(moved)
        yield from self._move_cold(plan, view)
        for caller, scored in plan.counted.items():
            yield from zadd_chunks(self._keys.of(caller), scored)
            yield from zrem_chunks(self._keys.of(caller), plan.removals)
            if scored:
                yield pack("ZADD", self._keys.callers, 0, caller)
        yield from self._add_members(self._keys.ignored, sorted(plan.ignored))
        yield from self._add_members(self._keys.unwanted, sorted(plan.ended_in_doubt))
        yield from zrem_chunks(self._keys.early, sorted(view.early))
        ended = [(by, original) for original, by in plan.cancelled_cold.items()]
        yield from self._add_to_lasting_set(self._keys.ended, b"ended", ended)
        hot = [(now, original) for original, now in plan.moved.items() if now in plan.puts]
        yield from self._add_to_lasting_set(self._keys.moved, b"moved", hot)
        names = (b"named", 1) if any(offset is not None for offset in moved.values()) else ()
        tail = () if plan.tail is None else (b"tail", orjson.dumps(tuple(plan.tail)))
        is_renewal = plan.renewed_below > view.renewed_below
        renewed = (b"renewed", plan.renewed_below) if is_renewal else ()
        yield self._write_requests(end, b"largest", largest, *names, *tail, *renewed)
        if isinstance(view.skipped, Bits):
            yield from self._forget_skipped(view.positions.requests, end)

    def _marked_refused(self, plan: Plan) -> Mapping[str, bytes]:
        """The bitmaps that mark the puts without a payload, by field."""
        refused: dict[str, list[int]] = {}
        for offset, put in plan.puts.items():
            if type(put) is Entry and (cause := put.cause) is not None:
                refused.setdefault(cause, []).append(offset)
        if not refused:
            return {}
        offsets = list(chain(*refused.values()))
        fields = refused_bitmaps.fields(offsets, refused)
        found = self._ask_about(fields, "HMGET", self._keys.refused)
        before = refused_bitmaps.by_cause(fields, found)
        return {
            f"{segment}:{cause}": bitmap
            for cause, added in refused.items()
            for segment, bitmap in before.get(cause, Bits()).changed(added, ()).items()
        }

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
        """Whether what looks pending may have a receipt."""
        # Asked until the answer is no: this connection sees no other Redis after that.
        if self.is_behind is None or self.is_behind(receipts):
            return self.is_behind is not None
        self.is_behind = None
        return False

    def _is_in_flight(self, offsets: Sequence[int]) -> bool:
        """Whether one of these requests is in flight."""
        named = self._redis.ask("HGETALL", self._keys.in_flight)
        return not set(map(member, offsets)).isdisjoint(in_flight(named))
