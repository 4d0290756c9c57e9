"""How dispatch takes what is due, and removes what has ended."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import orjson

from blackbox.core.bits import SEGMENT
from blackbox.core.parking import BAND_MS
from blackbox.core.plan import DueEntries, Positions
from blackbox.core.ports import NONE_RELEASED
from blackbox.core.settlement import Settlement
from blackbox.index.command_builder import zrem_chunks
from blackbox.index.connection import pack
from blackbox.index.doubt_changes import without
from blackbox.index.guarded_index import MAX_CONTENTION
from blackbox.index.keys import SENTINEL
from blackbox.index.packed_commands import by_score
from blackbox.index.postponing import PostponingChanges, not_emptied, released_shares
from blackbox.index.refused_bitmaps import segment_of
from blackbox.index.stored_fields import claims_of
from blackbox.records.errors import IndexFull, PositionsMoved
from blackbox.records.receipt import Mark
from blackbox.records.request import member

_WHY_ALONE = (
    "check that maxmemory-policy is noeviction and that the key was not deleted; rebuilding from "
    "the journals"
)


class DispatchChanges(PostponingChanges):
    """The steps of dispatch in Redis: `due` and `mark_in_flight` (D1), `settle` (D5)."""

    def due(
        self,
        now_ms: int,
        limit: int,
        passing_over: Collection[int] = (),
        release: Mapping[str, int] = NONE_RELEASED,
    ) -> DueEntries:
        """The entries due at `now_ms`, oldest first, at most `limit`; about 16 MiB with the parked ones.

        Checks the positions even when nothing is due. `passing_over` are due entries that are being delivered already
        and so left out. Entries that are parked for the targets in `release` come first and do not count towards
        `limit`: each target has an equal share of another `limit`, and at least one entry, but at most `release`.
        """
        with self._lock:
            for _ in range(MAX_CONTENTION):
                known = self._bands()
                shares = released_shares(known, release, limit)
                look = self._due_commands(now_ms, len(passing_over), limit)
                look += self._parked_commands(known, shares)
                state, ready, after, first, pending, paused, *more = self._look_unless_lost(look)
                in_bands, counts = more[: len(shares)], more[len(shares) :]
                self.doubtful = claims_of(state[3])
                if (left := self._note_parked(known, counts)) is not None:
                    break
            else:
                raise self._contended("looking for what is due")
            released = list(chain.from_iterable(in_bands))
            # `ready` first, so that a cut at 16 MiB does not leave the whole batch to a backlog.
            stored = self._payloads(ready + released, int(state[2] or 0))
            count = len(ready)
            is_cut = len(stored) < count + len(released)
            backlogs = left.keys() if is_cut else not_emptied(left, [*shares], in_bands)
            is_timed = pending > 1 and float(first[1]) < BAND_MS
            taken = zip(shares.values(), in_bands, strict=True)
            any_full = count == limit or any(len(names) == most for most, names in taken)
            entries, refused = self._still_there(stored[count:] + stored[:count], passing_over)
            return DueEntries(
                entries=entries,
                is_full=is_cut or any_full,
                next_due_ms=int(float(after[1])) if after else None,
                oldest_ms=int(float(first[1])) if is_timed else None,
                pending=pending - 1,
                paused=frozenset(topic.decode() for topic in paused),
                parked=self._bands(),
                backlogs=frozenset(known[band] for band in backlogs),
                released=frozenset(int(name, 16) for name in released),
                doubtful=self.doubtful,
                left_out=len(stored) - len(entries),
                refused=refused,
            )

    def _look_unless_lost(self, commands: Sequence[bytes]) -> list[Any]:
        """The state and the replies to these reads. Raises PositionsMoved if Redis lost one of the keys."""
        # These last: what is lost before or while the others are read must show here.
        checks = [pack("ZRANGE", self._keys.due, -1, -1), *self._look_expected()]
        state, *replies = self._consistent([*commands, *checks])
        replies, (last, *there) = replies[: len(commands)], replies[len(commands) :]
        if (lost := self._lost(last, state[4:], there, int(state[1]))) is not None:
            raise PositionsMoved(
                f"{self.shard}: Redis lost a single key, {lost.decode()}; {_WHY_ALONE}"
            )
        return [state, *replies]

    def _due_commands(self, now_ms: int, skipped: int, limit: int) -> list[bytes]:
        due = self._keys.due
        return [
            pack(*by_score(due, "-inf", now_ms, skipped, limit)),
            pack(*by_score(due, f"({now_ms}", f"({BAND_MS}", 0, 1, "WITHSCORES")),
            pack("ZRANGE", due, 0, 0, "WITHSCORES"),
            pack("ZCARD", due),
            pack("HKEYS", self._keys.paused),
        ]

    def _still_there(
        self, stored: list[tuple[bytes, bytes | None]], passing_over: Collection[int]
    ) -> tuple[list[tuple[int, bytes | None]], Mapping[int, str]]:
        """These entries without those to pass over, and those that ended while they were read.

        Also returns the causes of those that have no payload because they were refused.
        """
        # Without payload and score, it was cancelled or replaced since. With a score only, it was refused,
        # or its payload was lost or has expired; it is read again from Kafka.
        lost = [name for name, payload in stored if payload is None]
        scores = self._redis.ask("ZMSCORE", self._keys.due, *lost) if lost else []
        ended = {name for name, score in zip(lost, scores, strict=True) if score is None}
        entries = [
            (offset, payload)
            for name, payload in stored
            if name not in ended and (offset := int(name, 16)) not in passing_over
        ]
        return entries, self._causes([int(name, 16) for name in lost])

    def gone(self, offsets: Sequence[int], removed: int) -> set[int]:
        """Those of these requests that are not pending any more.

        `removed` is the value of that attribute when the requests were read.
        """
        with self._lock:
            if self.removed == removed:
                return set()
            return set(offsets) - self._scores(self._keys.due, offsets).keys()

    def mark_in_flight(self, offsets: Sequence[int], removed: int) -> set[int]:
        """Mark these requests as in flight; return those that are not pending any more, as `gone`.

        Those are not to be delivered. From here until they are settled, a cancel is too late.
        """
        names = [member(offset) for offset in offsets]
        key = self._keys.in_flight
        # one field for each opening: a fenced owner that does not know it cannot write its successor's
        forget = pack("HDEL", key, self._token)
        command = pack("HSET", key, self._token, b"".join(names)) if names else forget
        with self._lock:
            # Mark, then check: a concurrent cancel either finds the mark or is found by the check.
            try:
                self._check(*self._redis.run([command, *self._read_positions()])[1:])
            except PositionsMoved:
                self._redis.run([forget])  # no other owner takes it back
                raise
            except IndexFull:
                self._write_even_if_full(command)
            return self.gone(offsets, removed)

    def settle(self, done: Settlement) -> None:
        """Remove what has ended and set the position `receipts`, in one MULTI.

        Removals at or above the position `requests` are remembered in `skip` until their request is
        read.
        """
        removals = done.removals
        with self._lock:
            freed = [c for c in removals.values() if c is not None]
            for _ in range(MAX_CONTENTION):
                keys = [self._keys.receipts, *([self._keys.ids] if freed else [])]
                found, pending = self._watch_pending(done.postpone, *keys)
                # A cancel changes nothing that is watched: it removes a payload, and only one that
                # is there is replaced. For what Redis lost, nothing shows the cancel but the state.
                is_whole = self._has_payloads(pending)
                if not is_whole:
                    found, pending = self._watch_pending(pending, self._keys.state)
                unread: Sequence[int] = ()
                # Watched only if something depends on it: intake moves `requests` all the time, and
                # each of the two would make the other one retry.
                if removals and max(removals) >= found.requests:
                    found = self._watch_positions(self._keys.state, self._keys.skip)
                    unread = [offset for offset in removals if offset >= found.requests]
                holders = self.holders(freed)
                commands = list(self._commands_that_settle(done, found, holders, unread))
                commands += self._postpone_commands(pending, done.now_ms, only_there=is_whole)
                # Deliveries must leave a full Redis, because they make room in it.
                if self._exec_even_if_full(commands, found):
                    self.positions = Positions(found.requests, done.receipts)
                    self._settled = done.receipts
                    self.doubtful = without(self.doubtful, removals)
                    return
            raise self._contended("settling")

    def _commands_that_settle(
        self,
        done: Settlement,
        found: Positions,
        holders: Mapping[str, int],
        unread: Sequence[int],
    ) -> Iterator[bytes]:
        """The commands of the MULTI that removes what has ended.

        For the usual request: `ZREM due <member>`, `UNLINK msg:<member>` and, if it has a caller id, `HDEL ids <caller id>`.
        For the batch: `UNLINK in-flight`, `SET receipts <position>`.
        """
        removals = done.removals
        yield from self._remove([offset for offset in removals if offset < found.requests])
        # A later request may have taken the caller id since.
        freed = [c for offset, c in removals.items() if c is not None and holders.get(c) == offset]
        yield from self._set_caller_ids(dict.fromkeys(freed))
        if done.receipts != found.receipts:
            # not while an opening removes the delivered requests in parts: the rest is still in flight
            yield pack("UNLINK", self._keys.in_flight)
        if not self.doubtful.keys().isdisjoint(removals):
            yield from self._doubt(without(self.doubtful, removals))
            yield from zrem_chunks(self._keys.unwanted, [o for o in self.doubtful if o in removals])
        yield self._write_receipts(done.receipts)
        yield from self._skip_commands(unread)
        yield from zrem_chunks(self._keys.moved, done.origins)
        yield from self._recorded_commands(done.recorded, done.mark)
        yield from self._add_members(self._keys.early, done.early)
        for caller, offsets in done.counted.items():
            yield from zrem_chunks(self._keys.of(caller), offsets)

    def _skip_commands(self, offsets: Sequence[int]) -> Iterator[bytes]:
        for segment, bitmap in self._bits(self._keys.skip, offsets).changed(offsets, ()).items():
            yield pack("HSET", self._keys.skip, segment, bitmap)
        if offsets:
            yield pack("HSET", self._keys.state, b"ahead", max(offsets) + 1)

    def _recorded_commands(self, recorded: Sequence[int], mark: Mark | None) -> Iterator[bytes]:
        yield from zrem_chunks(self._keys.ignored, recorded)
        if mark is not None:
            yield pack("HSET", self._keys.state, "mark", orjson.dumps(tuple(mark)))
            yield pack("HDEL", self._keys.state, "unknown")  # the earlier barrier says it
            # requests below the mark have ended, or moved since
            for key in (self._keys.moved, self._keys.ended):
                yield pack("ZREMRANGEBYSCORE", key, "-inf", f"({mark.requests}")
            first = mark.requests // SEGMENT
            marked = self._redis.ask("HKEYS", self._keys.refused)
            if ended := [f for f in marked if f != SENTINEL and segment_of(f) < first]:
                yield pack("HDEL", self._keys.refused, *ended)
