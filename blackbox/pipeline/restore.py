"""A lost Redis filled again from the journals, many tasks at once; nothing else may run meanwhile."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql.functions import col, lead, lit
from pyspark.sql.functions import max as largest

from blackbox.clock import Clock
from blackbox.connect import own_topics
from blackbox.doubt import Doubt, IndexFull
from blackbox.index.bits import SEGMENT
from blackbox.index.connection import pool
from blackbox.index.inspector import Inspector
from blackbox.index.restoring import NotEmpty, Restoring
from blackbox.index.server import RedisServer
from blackbox.journal.access import KafkaAccess
from blackbox.journal.members import count_members
from blackbox.journal.ranges import Range
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.journal.writer import Writer
from blackbox.pipeline.failures import in_one_line
from blackbox.pipeline.journals import PIECE, PLACE, SHARD, Journals, Kept, Reach, Span, pieces
from blackbox.pipeline.tasks.restore import (
    DONE,
    MARKS,
    NAMES,
    SEGMENT_BYTES,
    Done,
    FillFromKafka,
    FillFromRows,
    MarkReceipts,
    MarkRows,
    Moment,
    ReadNames,
    Void,
)
from blackbox.plan import Labels
from blackbox.recovery import commit_barrier
from blackbox.request import Shard
from blackbox.settings import Settings

RECEIPTS_PIECE = 20_000
"""Receipts that one task reads, each of up to some thousand outcomes."""

OPENED_AT_ONCE = 8

Bits = dict[int, int]
"""Bitmaps of 65,536 offsets by segment, as numbers."""

RECORD = [*PLACE, "timestamp_ms", "reason", "detail", "key", "value", "headers"]


class RestoreRefused(Exception):
    """A restore would do harm, or nothing; the text says what to do first."""


class RestoreFailed(Exception):
    """A restore ended before its end. The indexes it did not finish are empty for every service."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What became of a shard. `seconds` is the time of its tasks, several of which run at once.

    `checked`: Redis was read back, holds what the journals gave, and the index is finished. Else
    `problem` says why not; a dry run has neither.
    """

    shard: Shard
    scanned: int
    pending: int
    seconds: float
    checked: bool = False
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What a restore did. `notes` name offsets that are unknown, and what a dry run found in the way."""

    shards: Sequence[Restored]
    took_s: float
    notes: Sequence[str]

    @property
    def scanned(self) -> int:
        return sum(one.scanned for one in self.shards)

    @property
    def pending(self) -> int:
        return sum(one.pending for one in self.shards)


class Restore:
    """Fills the indexes of all shards from the journals, `kept` ones (the ledger) and Kafka's.

    `run` raises RestoreRefused before anything was changed, RestoreFailed or a Doubt when it
    cannot go on. It may be interrupted anywhere and run again: without its last step, an index is
    empty for every service, which then begins it anew.
    """

    def __init__(
        self,
        session: SparkSession,
        settings: Settings,
        access: KafkaAccess,
        kept: Kept | None = None,
    ) -> None:
        self._session = session
        self._settings = settings
        self._access = access
        self._kept = kept
        self._held = kept.reach if kept is not None else Reach({}, {})
        self._url = settings.redis_url.get_secret_value()
        self._clock = Clock()

    def run(self, *, replace: bool = False) -> Report:
        """Restore every shard.

        1. refuse while the service runs, and for indexes that are not empty, unless `replace`;
        2. become the owner of each shard, as recovery does: fence, look at the doubtful tail of the
           receipts, commit a barrier; the labels are the barrier and the end of the requests then;
        3. find the requests that have ended: bitmaps of what receipts settle;
        4. empty each index, and mark it as this run's;
        5. put what is pending into it, in portions that want the mark;
        6. read it back: as many entries with the same checksum; only then the labels.
        """
        began = time.monotonic()
        if reasons := self._reasons_against(replace):  # 1
            raise RestoreRefused("\n".join(reasons))
        self._observe()
        shards = self._shards()
        own_topics(self._settings, self._access).ensure()  # new partitions need receipts
        run = uuid.uuid4().hex
        with self._owned(shards) as barriers:  # 2
            journals = self._journals()
            labels = {
                shard: Labels(journals.in_kafka.requests[shard].end, label)
                for shard, label in barriers.items()
            }
            ended = self._settled(journals, labels)  # 3
            _check_ahead(ended, labels)
            self._begin(run, journals.reach, labels, replace)  # 4
            moment = Moment(run, self._clock.earliest_ms(), self._clock.latest_ms())
            parts = self._fill(journals, labels, ended, moment)  # 5
            restored = [self._finish(run, labels[shard], parts[shard]) for shard in shards]  # 6
        return Report(restored, time.monotonic() - began, _unknown(journals))

    def dry_run(self) -> Report:
        """What `run` would put into the indexes now; changes nothing, and may run beside a service.

        The last receipts are believed, and nothing is checked.
        """
        began = time.monotonic()
        self._observe()
        shards = self._shards()
        journals = self._journals()
        labels = {
            shard: Labels(journals.in_kafka.requests[shard].end, journals.in_kafka.receipts[shard].end)
            for shard in shards
        }  # fmt: skip
        ended = self._settled(journals, labels)
        moment = Moment(None, self._clock.earliest_ms(), self._clock.latest_ms())
        parts = self._fill(journals, labels, ended, moment)
        against = [f"would be refused: {reason}" for reason in self._reasons_against(False)]
        found = [_restored(parts[shard]) for shard in shards]
        return Report(found, time.monotonic() - began, [*against, *_unknown(journals)])

    def _reasons_against(self, replace: bool) -> list[str]:
        group = self._settings.group_id
        members = count_members(self._access, [group, f"{group}.intake"])
        reasons = [
            f"the service runs: the group {name} has {count} members; stop the service first "
            "(one that was killed is a member for some seconds more)"
            for name, count in members.items()
            if count
        ]
        if not replace and (held := self._not_empty()):
            reasons.append(
                f"the index is not empty: {', '.join(map(str, held))}; the service mends an index "
                "by itself; to throw these away and restore all, add --replace"
            )
        return reasons

    def _not_empty(self) -> list[Shard]:
        inspector = Inspector.of(self._url)
        try:
            return [s for s in self._shards() if _has_labels(inspector, s)]
        finally:
            inspector.close()

    def _shards(self) -> list[Shard]:
        names = list(self._settings.topics)
        counts = Topics(self._access.admin()).partitions(names)
        shards = [Shard(name, p) for name in names for p in range(counts.get(name, 0))]
        if not shards:
            servers = self._settings.kafka_bootstrap_servers
            raise RestoreRefused(f"no request topic ({', '.join(names)}) on {servers}")
        return shards

    def _observe(self) -> None:
        server = RedisServer(self._url)
        try:
            self._clock.observe(server.now_ms())
        finally:
            server.close()

    def _journals(self) -> Journals:
        return Journals(self._session, self._settings, self._access, self._kept)

    @contextmanager
    def _owned(self, shards: Sequence[Shard]) -> Iterator[dict[Shard, int]]:
        """The receipts label of each shard, whose producer stays open meanwhile."""
        with ExitStack() as closing, ThreadPoolExecutor(OPENED_AT_ONCE) as threads:
            writers = {shard: self._writer(shard, closing) for shard in shards}
            labels = threads.map(lambda shard: self._take_over(shard, writers[shard]), shards)
            yield dict(zip(shards, labels, strict=True))

    def _writer(self, shard: Shard, closing: ExitStack) -> Writer:
        exactly_once = self._settings.delivery == "exactly-once"
        writer = Writer(shard, self._access, exactly_once=exactly_once)
        closing.callback(writer.close)
        return writer

    def _take_over(self, shard: Shard, writer: Writer) -> int:
        journal = ShardJournal(shard, self._access)
        try:
            writer.open()
            start = journal.receipt_bounds().start
            label, _ = commit_barrier(shard, journal, writer, self._clock.earliest_ms, start)
            return label
        finally:
            journal.close()

    def _settled(self, journals: Journals, labels: Mapping[Shard, Labels]) -> dict[Shard, Bits]:
        """The requests that receipts below the labels end, but for those that were void."""
        ranges = [
            Range(receipts_topic(shard.topic), shard.partition, start, labels[shard].receipts)
            for shard, start in _starts(journals.in_kafka.receipts, self._held.receipts, labels)
        ]
        cut = tuple(pieces(ranges, RECEIPTS_PIECE))
        void = self._void_in_ledger()
        marks = self._run(MarkReceipts(self._access, cut, void), MARKS, len(cut))
        if any(row.bits is None for row in marks):  # seldom: a transaction was torn
            void = _with_voids(void, (row for row in marks if row.bits is None))
            marks = self._run(MarkReceipts(self._access, cut, void), MARKS, len(cut))
        if self._kept is not None:
            told = self._kept.outcomes().where(~col("outcome").isin("void", "gone"))
            marks += _collected(told.select(*PLACE, "receipt").mapInArrow(MarkRows(void), MARKS))
        return _merged({}, marks)

    def _void_in_ledger(self) -> Void:
        if self._kept is None:
            return {}
        told = self._kept.outcomes().where(col("outcome") == lit("void"))
        return _with_voids(
            {}, _collected(told.groupBy(PLACE).agg(largest("receipt").alias("receipt")))
        )

    def _begin(self, run: str, reach: Reach, labels: Mapping[Shard, Labels], replace: bool) -> None:
        for shard, label in labels.items():
            with self._index(run, shard) as index:
                try:
                    index.begin(range(reach.requests[shard].start, label.requests), replace=replace)
                except NotEmpty as found:
                    raise RestoreRefused(f"{found}: a service was here just now") from None

    def _fill(
        self,
        journals: Journals,
        labels: Mapping[Shard, Labels],
        settled: Mapping[Shard, Bits],
        moment: Moment,
    ) -> dict[Shard, Done]:
        """Three passes at most over the requests; each shard's part of all of them.

        1. what cannot have a caller id, and so is never replaced or cancelled;
        2. where others are: their caller ids, and which of them a later record replaces or cancels;
        3. the others.
        """
        settings, access = self._settings, self._access
        ranges = [
            Range(*shard, start, labels[shard].requests)
            for shard, start in _starts(journals.in_kafka.requests, self._held.requests, labels)
        ]
        cut = tuple(pieces(ranges, PIECE))
        with self._shipped(settled) as ended:
            task = FillFromKafka(settings, access, cut, False, ended, moment)
            parts = _done(self._run(task, DONE, len(cut)))  # 1
        named = tuple(cut[part.piece] for part in parts if part.named)
        if named or self._kept is not None:
            again = self._fill_named(named, labels, settled, moment)  # 2, 3
            parts += [replace(part, scanned=0) if part.piece >= 0 else part for part in again]
        return {shard: _sum(shard, parts) for shard in labels}

    def _fill_named(
        self,
        cut: tuple[Range, ...],
        labels: Collection[Shard],
        settled: Mapping[Shard, Bits],
        moment: Moment,
    ) -> list[Done]:
        settings, access = self._settings, self._access
        names = self._rows(ReadNames(settings, access, cut, moment.latest_ms), NAMES, len(cut))
        if self._kept is not None:
            held = self._kept.requests().where(col("caller_id").isNotNull())
            names = names.unionByName(held.select(*PLACE, "caller_id"))
        replaced = superseded(names).withColumn("receipt", lit(0))
        marks = _collected(replaced.mapInArrow(MarkRows({}), MARKS))
        with self._shipped(_merged(settled, marks)) as ended:
            task = FillFromKafka(settings, access, cut, True, ended, moment)
            parts = _done(self._run(task, DONE, len(cut)))
            if self._kept is not None:
                rows = self._kept.requests().where(col("kind") != lit("cancel")).select(RECORD)
                filled = rows.mapInArrow(FillFromRows(settings, ended, moment), DONE)
                parts += [part for part in _done(_collected(filled)) if part.shard in labels]
        return parts

    def _finish(self, run: str, labels: Labels, part: Done) -> Restored:
        restored = _restored(part)
        if restored.problem is not None:
            return restored
        try:
            with self._index(run, part.shard) as index:
                index.finish(labels, part.largest, part.content)
        except (Doubt, IndexFull) as reason:
            return replace(restored, problem=str(reason))
        return replace(restored, checked=True)

    @contextmanager
    def _index(self, run: str, shard: Shard) -> Iterator[Restoring]:
        connections = pool(self._url)
        index = Restoring(shard, connections, run, grace_s=self._settings.grace_s)
        try:
            yield index
        finally:
            index.close()
            connections.disconnect()

    @contextmanager
    def _shipped(self, ended: Mapping[Shard, Bits]) -> Iterator[Any]:
        bitmaps = {
            shard: {segment: bits.to_bytes(SEGMENT_BYTES, "big") for segment, bits in held.items()}
            for shard, held in ended.items()
        }
        shipped = self._session.sparkContext.broadcast(bitmaps)
        try:
            yield shipped
        finally:
            shipped.destroy()

    def _rows(self, task: Any, schema: str, count: int) -> DataFrame:
        """The answers of `count` tasks."""
        return self._session.range(0, count, 1, max(1, count)).mapInArrow(task, schema)

    def _run(self, task: Any, schema: str, count: int) -> list[Any]:
        return _collected(self._rows(task, schema, count)) if count else []


def superseded(names: DataFrame) -> DataFrame:
    """The requests whose caller id a later record of the same shard has: replaced, or cancelled."""
    by_name = Window.partitionBy(*SHARD, "caller_id").orderBy("offset")
    following = names.withColumn("next", lead("offset").over(by_name))
    return following.where(col("next").isNotNull()).select(PLACE)


def _starts(
    kafka: Mapping[Shard, Span], held: Mapping[Shard, Span], shards: Collection[Shard]
) -> list[tuple[Shard, int]]:
    """From where on each journal is read from Kafka: behind the ledger."""
    return [
        (shard, max(kafka[shard].start, held[shard].end if shard in held else 0))
        for shard in shards
    ]


def _collected(rows: DataFrame) -> list[Any]:
    try:
        return rows.collect()
    except (PySparkException, Py4JError) as failure:
        raise RestoreFailed(in_one_line(failure)) from failure


def _done(rows: Iterable[Any]) -> list[Done]:
    return list(map(Done.of, rows))


def _merged(settled: Mapping[Shard, Bits], marks: Iterable[Any]) -> dict[Shard, Bits]:
    merged = {shard: dict(bits) for shard, bits in settled.items()}
    for row in marks:
        if row.bits is not None:
            bits = merged.setdefault(Shard(row.topic, row.partition), {})
            more = int.from_bytes(row.bits, "big")
            bits[row.segment] = bits.get(row.segment, 0) | more
    return merged


def _with_voids(void: Void, told: Iterable[Any]) -> Void:
    merged = {shard: dict(receipts) for shard, receipts in void.items()}
    for row in told:
        receipts = merged.setdefault(Shard(row.topic, row.partition), {})
        receipts[row.offset] = max(row.receipt, receipts.get(row.offset, -1))
    return merged


def _check_ahead(settled: Mapping[Shard, Bits], labels: Mapping[Shard, Labels]) -> None:
    for shard, bits in settled.items():
        if shard not in labels or not bits:
            continue
        segment = max(bits)
        following = (segment + 1) * SEGMENT
        last = following - (bits[segment] & -bits[segment]).bit_length()
        if last >= labels[shard].requests:
            raise RestoreRefused(
                f"{shard}: a receipt speaks of the request {last}, and the next one to be written is "
                f"{labels[shard].requests}; was the topic deleted and created anew? Then delete the "
                "receipts topic too: old receipts would end new requests"
            )


def _sum(shard: Shard, parts: Iterable[Done]) -> Done:
    total = Done(shard, -1)
    for part in parts:
        if part.shard == shard:
            total.scanned += part.scanned
            total.content += part.content
            total.largest = max(total.largest, part.largest)
            total.seconds += part.seconds
            total.problem = total.problem or part.problem
    return total


def _restored(part: Done) -> Restored:
    return Restored(
        part.shard, part.scanned, part.content.entries, part.seconds, problem=part.problem
    )


def _has_labels(inspector: Inspector, shard: Shard) -> bool:
    try:
        return inspector.labels(shard) is not None
    except ValueError:  # another version wrote it
        return True


def _unknown(journals: Journals) -> list[str]:
    """The offsets that neither Kafka nor the ledger has, and what follows."""
    notes = []
    for shard, span in journals.reach.requests.items():
        if span.start > 0:
            notes.append(f"{shard}: requests 0 to {span.start - 1} are unknown, they left Kafka")
        if (receipts := journals.reach.receipts[shard]).start > 0:
            notes.append(
                f"{shard}: receipts 0 to {receipts.start - 1} are unknown, they left Kafka: requests "
                "that they ended and that are still kept are delivered again"
            )
    for at, gap in journals.gaps.items():
        notes.append(f"{at}: {gap.start} to {gap.end - 1} are unknown, between ledger and Kafka")
    return notes
