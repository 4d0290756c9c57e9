"""Spark tasks that fill lost indexes again with what is pending, and finish them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from blackbox.connect import formats
from blackbox.doubt import Doubt, IndexFull
from blackbox.entry import Entry
from blackbox.formats import may_have_caller_id
from blackbox.index.bits import Bits
from blackbox.index.connection import pool
from blackbox.index.restoring import NOTHING, Content, Restoring, Superseded
from blackbox.intake import parse
from blackbox.journal.access import KafkaAccess
from blackbox.journal.ranges import Range, read_ranges
from blackbox.journal.records import read_records
from blackbox.pipeline.tasks.ended import Bitmaps, flags, numbers
from blackbox.plan import Batch, Carried, Cold, Labels, Replacement
from blackbox.request import Cancel, Reason, Record, Request, Shard
from blackbox.settings import Settings

Asked = Sequence[tuple[int, Request | Entry]]
"""Pending requests by offset, an invalid one as the entry it becomes."""

Change = tuple[int, Request | Cancel | Entry]

COLD_TIER = "restore does not know the cold tier: start the service, which rebuilds both tiers"


BY_ID = "restore does not know such cancels: start the service, which does"


class BeyondRestore(Doubt):
    """Some of the requests are, or were, in the cold tier, or were cancelled by their id."""


PUT_ENTRIES = 2000
PUT_BYTES = 8 << 20

FILLED = (
    "topic string, partition int, piece int, scanned long, named long, entries long, caller_ids long, "
    "checksum long, largest long, seconds double, problem string, "
    "offset long, caller_id string, is_cancel boolean"
)
"""What became of a piece; or, without `piece`, what it has last of a caller id: request or cancel."""

_FILLED = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("piece", pa.int32()),
        ("scanned", pa.int64()),
        ("named", pa.int64()),
        ("entries", pa.int64()),
        ("caller_ids", pa.int64()),
        ("checksum", pa.int64()),
        ("largest", pa.int64()),
        ("seconds", pa.float64()),
        ("problem", pa.string()),
        ("offset", pa.int64()),
        ("caller_id", pa.string()),
        ("is_cancel", pa.bool_()),
    ]
)


class Shipped(Protocol):
    """Bitmaps that Spark brings to each Python worker once."""

    @property
    def value(self) -> Bitmaps: ...


class Moment(NamedTuple):
    """What all tasks of a run agree on; `run` is None for one that writes nothing.

    `latest_ms` is the later of Redis' and the driver's clock: a record's timestamp beyond it counts
    as it. Payloads expire as from `now_ms` on.
    """

    run: str | None
    now_ms: int
    latest_ms: int


@dataclass(slots=True)
class Done:
    """What a task did of a shard; `piece` is its range's number, -1 where it has none.

    It has so many caller ids `named`. `problem` says why it ended too early.
    """

    shard: Shard
    piece: int = -1
    scanned: int = 0
    named: int = 0
    content: Content = NOTHING
    largest: int = 0
    seconds: float = 0.0
    problem: str | None = None

    @classmethod
    def of(cls, row: Any) -> Done:
        """From a row of the schema."""
        content = Content(row.entries, row.caller_ids, row.checksum)
        return cls(
            Shard(row.topic, row.partition), row.piece, row.scanned, row.named, content,
            row.largest, row.seconds, row.problem,
        )  # fmt: skip

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of this block; what ends the filling of this shard alone is a `problem`."""
        began = time.monotonic()
        try:
            yield
        except (Superseded, IndexFull, BeyondRestore) as reason:
            self.problem = str(reason)
        finally:
            self.seconds += time.monotonic() - began


@dataclass(frozen=True, slots=True)
class Fill:
    """Reads ranges of request topics: puts what is not ended and has no caller id, which nothing
    that comes later can replace or cancel; tells each caller id of the others, ended or not, once.
    """

    settings: Settings
    access: KafkaAccess
    ranges: tuple[Range, ...]
    ended: Shipped
    moment: Moment

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with _filling(self.settings, self.moment) as filling:
            for range_, done in _begun(self.ranges, rows):
                named: dict[str | None, tuple[int, bool]] = {}
                with done.timed():
                    ended = flags(self.ended.value.get(done.shard, {}), range_)
                    for chunk in read_ranges(self.access, [range_]):
                        done.scanned += len(chunk.messages)
                        for offset, change in self._put(done, chunk.messages, ended, filling):
                            named[change.caller_id] = offset, type(change) is Cancel
                done.named = len(named)
                if named:
                    yield _name_rows(done.shard, named)
                yield _done_rows([done])

    def _put(
        self, done: Done, messages: Sequence[Any], ended: bytes, filling: _Filling
    ) -> list[Change]:
        """Returns what has a caller id."""
        start = self.ranges[done.piece].start
        may_be_named = may_have_caller_id(self.settings.topics[done.shard.topic])
        plain, others = [], []
        for message in messages:
            if may_be_named(message.value()):
                others.append(message)
            elif not ended[message.offset() - start]:
                plain.append(message)
        pending = filling.read(done.shard, read_records(plain))
        named: list[Change] = []
        for change in filling.read(done.shard, read_records(others)) if others else ():
            if change[1].caller_id is not None:
                named.append(change)
            elif not ended[change[0] - start]:
                pending.append(change)
        filling.put(done, pending)
        return named


@dataclass(frozen=True, slots=True)
class FillChosen:
    """Reads ranges of request topics again: puts those requests that are `chosen`."""

    settings: Settings
    access: KafkaAccess
    ranges: tuple[Range, ...]
    chosen: Shipped
    moment: Moment

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with _filling(self.settings, self.moment) as filling:
            for range_, done in _begun(self.ranges, rows):
                with done.timed():
                    chosen = flags(self.chosen.value[done.shard], range_)
                    for chunk in read_ranges(self.access, [range_]):
                        wanted = [m for m in chunk.messages if chosen[m.offset() - range_.start]]  # type: ignore[operator]
                        filling.put(done, filling.read(done.shard, read_records(wanted)))
                yield _done_rows([done])


@dataclass(frozen=True, slots=True)
class FillFromRows:
    """Puts those requests that rows of the ledger hold: all that are not ended, but of those with a
    caller id only the `chosen` ones.
    """

    settings: Settings
    ended: Shipped
    chosen: Shipped
    moment: Moment

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        ended, chosen = (
            {shard: Bits(bitmaps) for shard, bitmaps in shipped.value.items()}
            for shipped in (self.ended, self.chosen)
        )
        none = Bits({})
        done: dict[Shard, Done] = {}
        with _filling(self.settings, self.moment) as filling:
            for some in rows:
                for shard, held in _by_shard(some.to_pylist()).items():
                    part = done.setdefault(shard, Done(shard))
                    part.scanned += len(held)
                    is_ended, is_chosen = ended.get(shard, none), chosen.get(shard, none)
                    pending = [
                        _record(row)
                        for row in held
                        if row["offset"] not in is_ended
                        and (row["caller_id"] is None or row["offset"] in is_chosen)
                    ]
                    if part.problem is None:
                        with part.timed():
                            filling.put(part, filling.read(shard, pending))
        yield _done_rows(list(done.values()))


@dataclass(frozen=True, slots=True)
class Finish:
    """Reads back the indexes whose numbers are its rows, and finishes those that are as they should be."""

    settings: Settings
    run: str
    parts: tuple[tuple[Done, Labels], ...]

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with _filling(self.settings, Moment(self.run, 0, 0)) as filling:
            for number in numbers(rows):
                part, labels = self.parts[number]
                done = Done(part.shard, number)
                with done.timed():
                    try:
                        index = filling.index(part.shard, self.run)
                        index.finish(labels, part.largest, part.content)
                    except Doubt as reason:
                        done.problem = str(reason)
                yield _done_rows([done])


def _begun(ranges: Sequence[Range], rows: Iterator[pa.RecordBatch]) -> Iterator[tuple[Range, Done]]:
    """The ranges whose numbers are rows, and what is to be told of each."""
    for number in numbers(rows):
        range_ = ranges[number]
        yield range_, Done(Shard(range_.topic, range_.partition), number)


class _Filling:
    """The indexes that one task fills."""

    def __init__(self, settings: Settings, moment: Moment) -> None:
        self._contracts = formats(settings)
        self._moment = moment
        self._grace_s = settings.grace_s
        self._connections = pool(settings.redis_url.get_secret_value())
        self._indexes: dict[Shard, Restoring] = {}

    def read(self, shard: Shard, records: Sequence[Record]) -> list[Change]:
        """What these records ask for. Raises a Doubt for one of the cold tier."""
        batch = Batch(0, 0, records)
        contract, latest_ms = self._contracts[shard.topic], self._moment.latest_ms
        changes: list[Change] = []
        for offset, change in parse(contract, batch, latest_ms, None).changes:
            if isinstance(change, (Cold, Carried)):
                raise BeyondRestore(
                    f"{shard.source(offset)} was carried from the cold tier; {COLD_TIER}"
                )
            if isinstance(change, Replacement):
                raise BeyondRestore(f"{shard.source(offset)} replaces by id; {BY_ID}")
            if isinstance(change, Cancel) and change.id is not None:
                raise BeyondRestore(f"{shard.source(offset)} cancels by id; {BY_ID}")
            changes.append((offset, change))
        return changes

    def put(self, done: Done, changes: Iterable[Change]) -> None:
        """Store the entries of these requests, and count them."""
        run, now_ms = self._moment.run, self._moment.now_ms
        for portion in _portions([(o, one) for o, one in changes if not isinstance(one, Cancel)]):
            if run is None:
                with_id = sum(one.caller_id is not None for _, one in portion)
                done.content += Content(len(portion), with_id, 0)
                continue
            content, largest = self.index(done.shard, run).put(portion, now_ms)
            done.content += content
            done.largest = max(done.largest, largest)

    def index(self, shard: Shard, run: str) -> Restoring:
        if shard not in self._indexes:
            self._indexes[shard] = Restoring(shard, self._connections, run, grace_s=self._grace_s)
        return self._indexes[shard]

    def close(self) -> None:
        for index in self._indexes.values():
            index.close()
        self._connections.disconnect()


@contextmanager
def _filling(settings: Settings, moment: Moment) -> Iterator[_Filling]:
    filling = _Filling(settings, moment)
    try:
        yield filling
    finally:
        filling.close()


def _portions(asked: Asked) -> Iterator[Asked]:
    """Of 2,000 entries and about 8 MiB at most."""
    first = size = 0
    for at, (_, one) in enumerate(asked):
        size += len(one.message or b"")
        if at > first and (at - first == PUT_ENTRIES or size > PUT_BYTES):
            yield asked[first:at]
            first, size = at, len(one.message or b"")
    if asked:
        yield asked[first:]


def _by_shard(rows: Iterable[Mapping[str, Any]]) -> dict[Shard, list[Mapping[str, Any]]]:
    found: dict[Shard, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(Shard(row["topic"], row["partition"]), []).append(row)
    return found


def _record(row: Mapping[str, Any]) -> Record:
    headers = [(header["key"], header["value"]) for header in row["headers"] or ()]
    # A record with such headers cannot be parsed again: they are not in the ledger.
    unreadable = row["detail"] if row["reason"] == Reason.BAD_HEADERS else None
    return Record(row["offset"], row["timestamp_ms"], row["key"], row["value"], headers, unreadable)


def _name_rows(shard: Shard, named: Mapping[str | None, tuple[int, bool]]) -> pa.RecordBatch:
    return _batch(
        topic=[shard.topic] * len(named),
        partition=[shard.partition] * len(named),
        offset=[offset for offset, _ in named.values()],
        caller_id=list(named),
        is_cancel=[is_cancel for _, is_cancel in named.values()],
    )


def _done_rows(parts: Sequence[Done]) -> pa.RecordBatch:
    return _batch(
        topic=[part.shard.topic for part in parts],
        partition=[part.shard.partition for part in parts],
        piece=[part.piece for part in parts],
        scanned=[part.scanned for part in parts],
        named=[part.named for part in parts],
        entries=[part.content.entries for part in parts],
        caller_ids=[part.content.caller_ids for part in parts],
        checksum=[part.content.checksum for part in parts],
        largest=[part.largest for part in parts],
        seconds=[part.seconds for part in parts],
        problem=[part.problem for part in parts],
    )


def _batch(**columns: list[Any]) -> pa.RecordBatch:
    count = len(columns["topic"])
    arrays = [
        pa.array(columns[field.name], field.type)
        if field.name in columns
        else pa.nulls(count, field.type)
        for field in _FILLED
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=_FILLED)
