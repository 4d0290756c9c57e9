"""The audit: reads journals, index and targets, and checks that every request has exactly one state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeVar

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, least, lit

from blackbox.config.settings import Settings
from blackbox.config.wiring import kafka
from blackbox.index.inspector import Inspector
from blackbox.jobs.audit.counts import LatenessCounts, Series, by_shard, series, totals
from blackbox.jobs.audit.exceptions import EXCEPTIONS, exceptions, gone, named_and_counted
from blackbox.jobs.audit.positions import (
    PositionFinding,
    SeenPositions,
    marks,
    positions_ahead,
    positions_behind,
)
from blackbox.jobs.audit.request_statuses import (
    REQUEST_COLUMNS,
    STATUS_COLUMNS,
    request_statuses,
    requests,
)
from blackbox.jobs.audit.targets import TargetPartitions
from blackbox.jobs.audit.tasks import HELD, HeldRows
from blackbox.jobs.audit.topic_check import check_topics
from blackbox.jobs.audit.tuning import tune, tune_for_few
from blackbox.jobs.ledger.ledger import Ledger
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.records.clock import CLOCKS_APART_MS
from blackbox.records.request import Shard
from blackbox.spark.job_failures import AuditError
from blackbox.spark.journals import JournalTables, Reach, of_table, reach
from blackbox.spark.spark_session import numbered
from blackbox.support.logs import NO_CLIENT_LOG

# A position may be beyond its journal's end for a moment: readers see a transaction's end late.
PATIENCE_S = 10.0
PATIENCE_LOOK_S = 0.1

Found = TypeVar("Found", bound=Sized)


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """The result of an audit. Counts are of requests, by state.

    `cold` counts pending requests that wait in Kafka, not in Redis. `unknown` counts requests that
    cannot be judged because the journals no longer keep them, or cannot be read yet. `by_kind` counts
    all exceptions; `exceptions` names the first of them. The keys of `hours` are the hours of the due
    times, epoch ms. `seen_ms` is when the audit began, `took_s` how long it took.
    """

    seen_ms: int
    took_s: float
    topics: Sequence[str]
    shards: int
    states: Mapping[str, int]
    callers: Mapping[str | None, Mapping[str, int]]
    targets: Mapping[str | None, Mapping[str, int]]
    hours: Mapping[int, Mapping[str, int]]
    cancels: int
    cold: int
    unknown: int
    by_kind: Mapping[str, int]
    exceptions: Sequence[PositionFinding]
    lateness: LatenessCounts | None
    due: Series | None
    asked: Series | None
    delivered: Series | None
    read_targets: Sequence[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.by_kind

    @property
    def requests(self) -> int:
        return sum(self.states.values())

    @property
    def found(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True, slots=True)
class Audited:
    """A verdict, and the tables it was made from; these are valid until the context ends."""

    verdict: AuditVerdict
    statuses: DataFrame
    exceptions: DataFrame

    def write(self, folder: str) -> None:
        """Write both tables as Parquet, `statuses` and `exceptions`, under this folder or Hadoop path."""
        for name, table in (("statuses", self.statuses), ("exceptions", self.exceptions)):
            table.write.mode("overwrite").parquet(f"{folder.rstrip('/')}/{name}")


@contextmanager
def audited(
    session: SparkSession,
    settings: Settings,
    *,
    kept: Ledger | None = None,
    targets: bool = False,
    late_s: float | None = None,
) -> Iterator[Audited]:
    """Audit everything. What changes during the audit is judged only where the result is certain.

    1. read the bounds of the journals;
    2. read the positions, then all entries of the indexes, then the positions again;
    3. wait until the journals' readable ends reach these positions, then read the requests up to their end;
    4. with `targets`, read the target topics up to their end;
    5. with `targets`, wait until the receipts that exist by now can be read; then read the receipts up to
       their end: they account for everything read before;
    6. read the positions a last time.

    What Kafka removes before it is read is not judged, nor are messages whose receipts may be hidden.
    With `late_s`, requests that were delivered, or are pending, later than this are exceptions.
    Raises JournalLost or IndexLost when Kafka or Redis does not answer, AuditError when only some of the
    request topics exist, when the receipts of one are missing, or when Spark had to read records again
    that were gone.
    """
    with ExitStack() as ending:
        yield _Audit(session, settings, kept, ending).run(targets=targets, late_s=late_s)


class _Audit:
    def __init__(
        self, session: SparkSession, settings: Settings, kept: Ledger | None, ending: ExitStack
    ) -> None:
        self._session = session
        self._settings = settings
        self._access = kafka(settings, NO_CLIENT_LOG)
        self._kept = kept
        self._ending = ending
        self._inspector = Inspector.of(settings.redis_url.get_secret_value())
        ending.callback(self._inspector.close)

    def run(self, *, targets: bool, late_s: float | None) -> Audited:
        seen_ms, began = time.time_ns() // 1_000_000, time.monotonic()
        first = reach(self._settings, self._access)  # 1
        check_topics(first, self._settings, self._access)
        rows_to_read = _rows(first) + (0 if self._kept is None else _rows(self._kept.reach))
        tune(self._session, rows_to_read, self._ending)
        shards = tuple(of_table(first, "requests"))
        before = self._positions(shards)  # 2
        held = self._held(shards)
        after = self._positions(shards)
        beyond = self._wait_for_journals(after)  # 3
        journals = self._journals()
        asked = self._keep(_limit_timestamps(journals.requests().select(REQUEST_COLUMNS)))
        there = self._targets(asked) if targets else None  # 4
        rows_to_read += 0 if there is None else sum(p.end - p.start for p in there.partitions)
        tune_for_few(self._session, rows_to_read, self._ending)
        hiding = self._wait_for_receipts(shards) if targets else set()
        found = None if there is None else self._keep(there.messages(self._settings.topics))
        later = self._journals()  # 5
        outcomes = self._keep(later.outcomes())
        self._read_now(journals, later, [asked, outcomes, found])
        spans = None if there is None else there.spans()
        known = marks(self._session, first, journals, later, outcomes, before, after, hiding)
        judged = self._keep(request_statuses(asked, outcomes, held, known, found, spans))
        # Everything above is read before the positions are read a last time.
        counts = by_shard(judged)
        stuck = positions_behind(counts, before, self._positions(shards))  # 6
        late_ms = None if late_s is None else round(late_s * 1000)
        of_requests = exceptions(judged, seen_ms, late_ms, there)
        wrong = self._keep(of_requests.unionByName(gone(outcomes)))
        of_positions = [*beyond, *stuck]
        named, by_kind = named_and_counted(wrong, of_positions)
        rows = requests(judged)
        verdict = AuditVerdict(
            seen_ms=seen_ms,
            took_s=round(time.monotonic() - began, 3),
            topics=list(self._settings.topics),
            shards=len(shards),
            **totals(rows),
            cancels=sum(one["cancels"] for one in counts),
            cold=sum(one["cold"] for one in counts),
            unknown=sum(one["unknown"] for one in counts),
            by_kind=by_kind,
            exceptions=named,
            **series(rows, counts),
            read_targets=there.topics if there else [],
        )
        self._check_read_once()
        positions = self._session.createDataFrame(of_positions, EXCEPTIONS)
        return Audited(verdict, rows.select(STATUS_COLUMNS), wrong.unionByName(positions))

    def _keep(self, table: DataFrame) -> DataFrame:
        kept = table.persist(StorageLevel.MEMORY_AND_DISK)
        self._ending.callback(kept.unpersist)
        return kept

    def _journals(self) -> JournalTables:
        return JournalTables(self._session, self._settings, self._access, self._kept)

    def _positions(self, shards: Iterable[Shard]) -> SeenPositions:
        return {shard: self._inspector.positions(shard) for shard in shards}

    def _held(self, shards: tuple[Shard, ...]) -> DataFrame:
        task = HeldRows(self._settings, shards)
        tasks = numbered(self._session, len(shards) + 1)
        # Never calculated again, as a second read would show another moment: if a part is lost,
        # the audit fails.
        return tasks.mapInArrow(task, HELD).localCheckpoint(eager=True)

    def _wait_for_journals(self, positions: SeenPositions) -> list[PositionFinding]:
        """Wait until the journals can be read up to the positions; positions still beyond are exceptions."""
        return _patiently(
            lambda: list(positions_ahead(positions, reach(self._settings, self._access)))
        )

    def _wait_for_receipts(self, shards: Iterable[Shard]) -> set[Shard]:
        """Wait until all receipts that exist now can be read; return the shards where some still cannot."""
        # The end of a transaction reaches one partition after the other, perhaps a target first.
        kept = of_table(reach(self._settings, self._access), "outcomes")
        places = {s: (receipts_topic(s.topic), s.partition) for s in shards if s in kept}
        written = Topics(self._access.admin()).ends(places.values(), committed=False)

        def hiding() -> set[Shard]:
            there = of_table(reach(self._settings, self._access), "outcomes")
            return {shard for shard, at in places.items() if there[shard].end < written.get(at, 0)}

        return _patiently(hiding)

    def _targets(self, asked: DataFrame) -> TargetPartitions:
        named = asked.select("target").where(col("target").isNotNull()).distinct().collect()
        names = [row.target for row in named]
        return TargetPartitions.named(names, self._session, self._settings, self._access)

    def _read_now(
        self, requests: JournalTables, outcomes: JournalTables, tables: Iterable[DataFrame | None]
    ) -> None:
        """Read what these tables hold, and note what Kafka removed before it was read."""
        rows = [table.select(lit(1)) for table in tables if table is not None]
        self._read = reduce(DataFrame.union, rows)
        self._read_rows = self._read.count()
        # Only now: the service trims its journals at any time, and a target has its retention.
        left = reach(self._settings, self._access)
        requests.leave_out_removed(left)
        outcomes.leave_out_removed(left)

    def _check_read_once(self) -> None:
        # Tables that an executor held are read again if it is lost, then without what Kafka removed.
        if self._read.count() != self._read_rows:
            raise AuditError(
                "Spark lost records that it had read, and Kafka has removed some of them since; run the "
                "audit again"
            )


def _patiently(look: Callable[[], Found]) -> Found:
    """The last result: an empty one, or that at the end of the patience."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = look()
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(PATIENCE_LOOK_S)


def _rows(there: Reach) -> int:
    return sum(span.end - span.start for span in there.values())


def _limit_timestamps(asked: DataFrame) -> DataFrame:
    # Callers may set timestamps to anything: at most a minute from now counts.
    soon_ms = lit(time.time_ns() // 1_000_000 + CLOCKS_APART_MS)
    return asked.withColumn("timestamp_ms", least(col("timestamp_ms"), soon_ms))
