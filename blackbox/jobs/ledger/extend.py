"""Extend the ledger: add what the journals have and it lacks, step by step."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql.functions import count, lit

from blackbox.config.settings import Settings
from blackbox.jobs.ledger import manifest as manifests
from blackbox.jobs.ledger.files import Files
from blackbox.jobs.ledger.ledger import spark_errors_explained
from blackbox.jobs.ledger.manifest import Covered, Last, LedgerFile, Manifest, Replaced
from blackbox.jobs.ledger.mismatches import gap, ids_in_kafka, mismatches
from blackbox.jobs.ledger.table_files import POSITION, Measured, day_of, measure, rows
from blackbox.jobs.ledger.upkeep import (
    UpkeepLimits,
    clean,
    repartitioned,
    still_read,
    worth_compacting,
)
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.records.request import Shard
from blackbox.spark.job_failures import LedgerError
from blackbox.spark.journals import (
    PIECE,
    TABLES,
    JournalKey,
    Span,
    of_table,
    reach,
    read_outcomes,
    read_requests,
)

STEP = 2_000_000

WRITING = {
    "compression": "zstd",
    # Version 1: if a task ran twice, only the files of one attempt are kept.
    "mapreduce.fileoutputcommitter.algorithm.version": "1",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}


@dataclass(slots=True)
class TableDone:
    """The result of a run for one table, and the table's size now."""

    rows_added: int = 0
    compacted: int = 0
    compacted_into: int = 0
    rows: int = 0
    files: int = 0
    bytes: int = 0
    days: int = 0


@dataclass(slots=True)
class Done:
    path: str
    manifest: Manifest
    steps: int = 0
    tables: dict[str, TableDone] = field(
        default_factory=lambda: {table: TableDone() for table in TABLES}
    )
    seconds: float = 0.0


def extend(
    session: SparkSession,
    settings: Settings,
    access: KafkaAccess,
    path: str,
    *,
    accept_gap: bool = False,
    limits: UpkeepLimits | None = None,
) -> Done:
    """Extend the ledger to the current end of the journals; creates it if there is none.

    1. compare its manifest with the journals in Kafka;
    2. step by step: write new files, then publish a manifest that names them;
    3. compact days with many small files, published the same way;
    4. remove old manifests, and files that no manifest names.

    A kill at any moment leaves the newest manifest intact. Raises LedgerError, and JournalLost when
    Kafka does not answer; published steps stay.
    """
    started_s = time.monotonic()
    with spark_errors_explained():
        files = Files(session, path)
        # A step has work for every slot.
        step = max(STEP, PIECE * session.sparkContext.defaultParallelism)
        run = _Extension(session, settings, access, files, limits or UpkeepLimits(step))
        with run.as_published_by_another_run():
            run.compare(accept_gap=accept_gap)
            run.read_on()
            run.compact()
            clean(files, run.done.manifest, run.limits)
    for table, done in run.done.tables.items():
        held = run.done.manifest.of(table)
        done.rows = sum(file.rows for file in held)
        done.files = len(held)
        done.bytes = sum(file.bytes for file in held)
        done.days = len({file.day for file in held})
    run.done.seconds = time.monotonic() - started_s
    return run.done


@dataclass(eq=False, repr=False)
class _Extension:
    session: SparkSession
    settings: Settings
    access: KafkaAccess
    files: Files
    limits: UpkeepLimits

    def __post_init__(self) -> None:
        self._todo: dict[JournalKey, Span] = {}
        self._is_changed = False
        self._oldest = min(manifests.published(self.files), default=0)
        self.done = Done(self.files.root, manifests.newest(self.files))

    @contextmanager
    def as_published_by_another_run(self) -> Iterator[None]:
        """Report a failure as published_by_another_run if another run published first."""
        # That run removes this one's files, so the failure may be any error.
        try:
            with spark_errors_explained():
                yield
        except LedgerError:
            number = self.done.manifest.number + 1
            if manifests.published(self.files)[-1:] >= [number]:
                raise manifests.published_by_another_run(self.files, number) from None
            raise

    def compare(self, *, accept_gap: bool) -> None:
        """Find what is to be read. Raises LedgerError when ledger and journals do not match."""
        manifest = self.done.manifest
        topics = self.settings.topics
        # Before the offsets: if a topic is created again in between, the next run then notices it.
        ids = ids_in_kafka(topics, self.access)
        in_kafka = reach(self.settings, self.access)
        if not in_kafka and not manifest.number:
            raise LedgerError(
                f"no request topic ({', '.join(topics)}) exists on "
                f"{self.settings.kafka_bootstrap_servers}; `blackbox run` creates them"
            )
        problems = mismatches(manifest, in_kafka, ids, topics, self.access)
        gaps = [j for j, span in in_kafka.items() if self._covered(j, span).end < span.start]
        if not accept_gap:
            problems += [gap(j, manifest.journals[j], in_kafka[j]) for j in gaps]
        if problems:
            raise LedgerError("\n".join(problems))
        held = dict(manifest.journals)
        for journal, span in in_kafka.items():
            covered = self._covered(journal, span)
            held[journal] = covered.beyond_gap(span.start) if journal in gaps else covered
            self._todo[journal] = Span(held[journal].end, span.end)
        self.done.manifest = replace(
            manifest, journals=held, topic_ids={**manifest.topic_ids, **ids}
        )
        self._is_changed = self.done.manifest != manifest

    def read_on(self) -> None:
        for step in _steps(self._todo, self.limits.step):
            written: list[LedgerFile] = []
            held = dict(self.done.manifest.journals)
            for table in TABLES:
                if spans := of_table(step, table):
                    added, last = self._write(table, self._fresh(table, spans))
                    written += added
                    self.done.tables[table].rows_added += sum(file.rows for file in added)
                    for shard, span in spans.items():
                        before = held[journal := JournalKey(table, shard)]
                        newest = last.get(shard, before.last)
                        held[journal] = replace(before, end=span.end, last=newest)
            manifest = self.done.manifest
            self._publish(replace(manifest, journals=held, files=(*manifest.files, *written)))
            self.done.steps += 1
        # Journals without new records, a gap that was accepted, or ids of topics that were unknown.
        if self._is_changed:
            self._publish(self.done.manifest)

    def compact(self) -> None:
        """Compact days with many small files; if there are too many for one run, later runs do the rest."""
        manifest = self.done.manifest
        gone: set[str] = set()
        made: list[LedgerFile] = []
        for table in TABLES:
            done = self.done.tables[table]
            for chosen in worth_compacting(manifest.of(table), self.limits):
                frame = rows(self.session, self.files, table, [file.path for file in chosen])
                fresh, _ = self._write(table, repartitioned(table, frame, chosen, self.limits))
                # The checksum depends neither on order nor on files, only on rows.
                if manifests.total(fresh) != manifests.total(chosen):
                    raise LedgerError(
                        f"{self.files.uri(table)}: compaction read different rows from those that "
                        "were written; nothing was changed; run `blackbox ledger --verify`"
                    )
                made += fresh
                gone |= {file.path for file in chosen}
                done.compacted += len(chosen)
                done.compacted_into += len(fresh)
        if made:
            by, at_ms = manifest.number + 1, _now_ms()
            replaced = (*manifest.replaced, *(Replaced(p, by, at_ms) for p in sorted(gone)))
            kept = (file for file in manifest.files if file.path not in gone)
            self._publish(replace(manifest, files=(*kept, *made), replaced=replaced))

    def _covered(self, journal: JournalKey, span: Span) -> Covered:
        return self.done.manifest.journals.get(journal) or Covered(span.start, span.start)

    def _fresh(self, table: str, spans: Mapping[Shard, Span]) -> DataFrame:
        if table == "requests":
            frame = read_requests(self.session, self.settings, self.access, spans, whole=True)
        else:
            frame = read_outcomes(self.session, self.access, spans)
        offsets = sum(span.end - span.start for span in spans.values())
        # Few files: the shards of a step may be many, with few records each.
        return frame.coalesce(-(-offsets // PIECE))

    def _write(self, table: str, frame: DataFrame) -> tuple[list[LedgerFile], dict[Shard, Last]]:
        """Write rows by day to files of the next manifest; they are visible once that is published."""
        # A folder for each run: two at once must not write over each other's files.
        folder = f"{table}/{self.done.manifest.number + 1:020d}-{uuid.uuid4().hex[:12]}"
        written = Observation()
        (
            frame.withColumn("day", day_of(POSITION[table][1]))
            .observe(written, count(lit(1)).alias("rows"))
            .write.partitionBy("day")
            .options(**WRITING)
            .parquet(self.files.uri(folder))
        )
        found = list(self.files.walk(folder))
        measured = measure(self.session, self.files, table, [file.path for file in found])
        held = [_file(table, one.path, one.bytes, measured[one.path]) for one in found]
        count_, _ = manifests.total(held)
        # Read back by the driver: executors may have written to a folder of their own machine.
        if count_ != written.get["rows"]:
            raise LedgerError(
                f"{self.files.uri(folder)}: {written.get['rows']} rows were written, but {count_} "
                "are readable; all Spark executors must see the same files, so on a cluster a "
                "local folder of one machine does not work"
            )
        last: dict[Shard, Last] = {}
        for one in measured.values():
            for shard, there in one.last.items():
                last[shard] = max(there, last.get(shard, there))
        return held, last

    def _publish(self, changed: Manifest) -> None:
        manifest = replace(
            changed,
            number=changed.number + 1,
            written_ms=_now_ms(),
            replaced=tuple(still_read(changed.replaced, self._oldest, self.limits)),
        )
        manifests.publish(self.files, manifest)
        self.done.manifest = manifest
        self._is_changed = False


def _steps(todo: Mapping[JournalKey, Span], size: int) -> Iterator[dict[JournalKey, Span]]:
    """The same spans, split into steps of at most `size` offsets."""
    # Requests go first (TABLES): the ledger must never hold an outcome without its request.
    step: dict[JournalKey, Span] = {}
    room = size
    for journal, span in sorted(todo.items(), key=lambda one: (TABLES.index(one[0].table), one[0])):
        start = span.start
        while start < span.end:
            end = min(span.end, start + room)
            step[journal] = Span(start, end)
            room -= end - start
            start = end
            if not room:
                yield step
                step, room = {}, size
    if step:
        yield step


def _file(table: str, path: str, size: int, measured: Measured) -> LedgerFile:
    day = path.split("/")[2].removeprefix("day=")
    return LedgerFile(table, path, day, measured.rows, size, measured.checksum)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
