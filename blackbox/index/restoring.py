"""A restore's hold on a shard's index, while many tasks fill it and nobody else may.

An index that is being restored has entries and caller ids, and in `state` no labels but a mark, the
name of the run. For a service it is an empty index, which it begins anew; that takes the mark away,
as another restore does. Every write here watches `state` and wants its own mark in it, so that a
task that is late writes nothing into the index of a successor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

from blackbox import entry as entries
from blackbox.doubt import Doubt, LabelsMoved
from blackbox.entry import Entry
from blackbox.index.bits import SEGMENT
from blackbox.index.connection import Connections, pack
from blackbox.index.shard_index import PackedIndex
from blackbox.plan import Labels
from blackbox.request import Request, Shard

MARK = b"restore"
_TRIES = 10
_READ = 2000
_READS_AT_ONCE = 8
_UNLINKED_AT_ONCE = 1000


class Superseded(LabelsMoved):
    """The index is not this restore's any more: a service or another restore has taken it over."""


class NotEmpty(LabelsMoved):
    """The index has labels, so that it is no lost one."""


class Content(NamedTuple):
    """What an index holds, in numbers that do not depend on an order.

    `checksum` is the sum of the CRC-32 of each entry's name and due time, as Redis shows both.
    """

    entries: int
    caller_ids: int
    checksum: int

    def __add__(self, other: object) -> Content:
        assert isinstance(other, Content)
        return Content(*(one + more for one, more in zip(self, other, strict=True)))


NOTHING = Content(0, 0, 0)


class Restoring(PackedIndex):
    """One process' part in the restore `run` of a shard; not safe for use from two threads at once.

    The driver calls `begin`, then tasks `put`, then the driver `finish`. Every method is atomic or
    can be repeated; each raises Superseded once the index is not this run's any more, IndexFull
    when Redis has no room, IndexLost when the connection fails.
    """

    def __init__(self, shard: Shard, connections: Connections, run: str, *, grace_s: int) -> None:
        super().__init__(shard, connections, grace_s=grace_s)
        self._run = run.encode()

    def begin(self, requests: range, *, replace: bool) -> None:
        """Empty the index, in one MULTI with the mark; then drop marks in `skip` for `requests`.

        Raises NotEmpty when there are labels, which `replace` drops as well.
        """
        first = requests.start
        mark = pack("HSET", self._keys.state, MARK, self._run, b"known_from", first)
        for _ in range(_TRIES):
            watch = pack("WATCH", self._keys.state, self._keys.receipts)
            _, state, receipts = self._session.run([watch, *self._read_labels()], 3)
            if not replace and (state[0] is not None or self._labels(state, receipts) is not None):
                raise NotEmpty(f"{self.shard}: the index is not empty")
            if self._exec((self._empty(), mark)):
                break
        else:
            raise Superseded(f"{self.shard}: others keep changing the index")
        first, last = requests.start // SEGMENT, requests.stop // SEGMENT
        for at in range(first, last + 1, _UNLINKED_AT_ONCE):
            segments = range(at, min(at + _UNLINKED_AT_ONCE, last + 1))
            self._write([pack("UNLINK", *map(self._keys.skip, segments))])

    def put(self, asked: Sequence[tuple[int, Request | Entry]], now_ms: int) -> tuple[Content, int]:
        """Store pending requests by offset, in one MULTI; what they are, and the largest in bytes.

        To be given a few thousand at most. The same again changes nothing.
        """
        stored = [(offset, entries.encode(one), one.due_ms) for offset, one in asked]
        holders = {one.caller_id: offset for offset, one in asked if one.caller_id is not None}
        scored = [(due_ms, offset) for offset, _, due_ms in stored]
        self._write(
            [
                *(self._set(offset, entry, due_ms, now_ms) for offset, entry, due_ms in stored),
                *self._zadd(scored),
                *self._hold(dict(holders)),
            ]
        )
        checksum = sum(crc32(b"%016x %d" % (offset, due_ms)) for due_ms, offset in scored)
        largest = max((len(entry) for _, entry, _ in stored), default=0)
        return Content(len(stored), len(holders), checksum), largest

    def finish(self, labels: Labels, largest: int, expected: Content) -> None:
        """Read back what is there, and if it is what is expected, make it a shard's index.

        Both under one WATCH. Raises a Doubt for any difference; there are no labels then.
        """
        self._watch()
        found = self._content()
        if found != expected:
            raise Doubt(
                f"{self.shard}: Redis holds {found}, the journals gave {expected}; "
                "did Redis lose writes meanwhile? Restore it again"
            )
        done = (
            pack("HDEL", self._keys.state, MARK),
            self._write_requests(labels.requests, b"largest", largest),
            self._write_receipts(labels.receipts),
        )
        if not self._exec(done):
            raise self._superseded()

    def close(self) -> None:
        """Give the connection up; safe to call twice."""
        self._session.close()

    def _write(self, commands: Sequence[bytes]) -> None:
        for _ in range(_TRIES):
            self._watch()
            if not commands or self._exec(commands):
                return
        raise self._superseded()

    def _watch(self) -> None:
        watch = [pack("WATCH", self._keys.state), pack("HGET", self._keys.state, MARK)]
        if self._session.run(watch, 2)[1] != self._run:
            raise self._superseded()

    def _superseded(self) -> Superseded:
        return Superseded(
            f"{self.shard}: a service or another restore has taken the index over meanwhile; "
            "nothing is lost, the index is theirs"
        )

    def _content(self) -> Content:
        sizes = [pack("ZCARD", self._keys.due), pack("HLEN", self._keys.ids)]
        count, caller_ids = self._session.run(sizes, 2)
        checksum = 0
        for first in range(0, count, _READ * _READS_AT_ONCE):
            starts = range(first, min(first + _READ * _READS_AT_ONCE, count), _READ)
            reads = [
                pack("ZRANGE", self._keys.due, start, start + _READ - 1, "WITHSCORES")
                for start in starts
            ]
            flat: list[Any] = list(chain.from_iterable(self._session.run(reads, len(reads))))
            pairs = zip(flat[::2], flat[1::2], strict=True)
            checksum += sum(map(crc32, map(b" ".join, pairs)))
        return Content(count, caller_ids, checksum)
