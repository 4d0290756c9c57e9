"""The audit: check from the journals, the index and the targets that every request has exactly one fate.

Runs beside a live service and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import (
    array,
    col,
    count,
    explode,
    floor,
    greatest,
    least,
    lit,
    log10,
    struct,
    when,
)
from pyspark.sql.functions import grouping as is_summed
from pyspark.sql.functions import max as largest
from pyspark.sql.functions import min as smallest

from blackbox.config.settings import Settings
from blackbox.config.wiring import kafka
from blackbox.core.plan import Positions
from blackbox.index.inspector import Inspector
from blackbox.jobs.audit.fates import (
    ASKED,
    FATE,
    MARKS,
    SPANS,
    STATES,
    exceptions,
    fates,
    is_known,
    lateness,
    requests,
)
from blackbox.jobs.audit.index_tasks import HELD, HeldRows
from blackbox.jobs.audit.target_tasks import FOUND, FoundRows
from blackbox.jobs.ledger.ledger import Ledger
from blackbox.journal.ranges import Ends, Range
from blackbox.journal.topics import Topics
from blackbox.records.request import Shard, id_prefix
from blackbox.spark.journals import (
    SHARD,
    TABLES,
    Journal,
    Journals,
    Reach,
    Span,
    of_table,
    pieces,
    reach,
)
from blackbox.spark.session import numbered
from blackbox.support.logs import QUIET

PATIENCE_S = 10.0
"""How long a position may be beyond its journal's end: readers see a transaction's end a little late."""
PATIENCE_LOOK_S = 0.1
CLOCKS_APART_MS = 60_000
NAMED = 10_000
"""How many exceptions a verdict names; the others are only counted, and are in the tables."""
ROWS_A_TASK = 200_000
BUCKETS = 60
STEPS_A_DECADE = 40

Seen = Mapping[Shard, Positions | None]


class Finding(NamedTuple):
    """An exception. `offset` is that of a request, or a position of the shard."""

    kind: str
    topic: str
    partition: int
    offset: int
    id: str | None
    caller: str | None
    detail: str


class Series(NamedTuple):
    """Counts in buckets of equal width: `counts[0]` from `start_ms` on."""

    start_ms: int
    width_ms: int
    counts: list[int]


class Lateness(NamedTuple):
    """The lateness of deliveries. `counts` is by step: ms + 1 grows tenfold in `STEPS_A_DECADE` steps."""

    p50_ms: int
    p99_ms: int
    longest_ms: int
    counts: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of an audit. Counts are of requests, by state.

    `cold` counts pending requests that wait in Kafka, not in Redis. `unknown` counts requests that
    cannot be judged because the journals no longer keep them. `by_kind` counts all exceptions;
    `exceptions` names the first of them. The keys of `hours` are the hours of the due times, epoch
    ms. `seen_ms` is when the audit began, `took_s` how long it took.
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
    exceptions: Sequence[Finding]
    lateness: Lateness | None
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
        """How many exceptions there are."""
        return sum(self.by_kind.values())


@dataclass(frozen=True, slots=True)
class Audited:
    """A verdict, and the tables it was made from; the tables are valid until the context ends."""

    verdict: Verdict
    fates: DataFrame
    exceptions: DataFrame

    def write(self, folder: str) -> None:
        """Write both tables as Parquet, `fates` and `exceptions`, under this folder or Hadoop path."""
        for name, table in (("fates", self.fates), ("exceptions", self.exceptions)):
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
    5. read the receipts up to their end: they account for everything read before;
    6. read the positions a last time.

    With `late_s`, requests that were delivered, or are pending, later than this are exceptions.
    Raises JournalLost or IndexLost when Kafka or Redis does not answer.
    """
    with ExitStack() as ending:
        yield _Look(session, settings, kept, ending).judge(targets=targets, late_s=late_s)


class _Look:
    """One run of the audit."""

    def __init__(
        self, session: SparkSession, settings: Settings, kept: Ledger | None, ending: ExitStack
    ) -> None:
        self._session = session
        self._settings = settings
        self._access = kafka(settings, QUIET)
        self._kept = kept
        self._ending = ending
        self._inspector = Inspector.of(settings.redis_url.get_secret_value())
        ending.callback(self._inspector.close)

    def judge(self, *, targets: bool, late_s: float | None) -> Audited:
        seen_ms, began = _now_ms(), time.monotonic()
        first = reach(self._settings, self._access)  # 1
        self._suit(first)
        shards = tuple(of_table(first, "requests"))
        before = self._positions(shards)  # 2
        held = self._held(shards)
        after = self._positions(shards)
        ahead = self._wait_for_journals(after)  # 3
        journals = self._journals()
        asked = self._keep(_dated(journals.requests().select(ASKED)))
        read, spans, found = self._found(asked) if targets else ((), None, None)  # 4
        told = self._journals()  # 5
        outcomes = self._keep(told.outcomes())
        marks = self._marks(first, journals, told, outcomes, before, after)
        judged = self._keep(fates(asked, outcomes, held, marks, found, spans))
        counts = _by_shard(judged)
        stuck = _behind(counts, before, self._positions(shards))  # 6
        late_ms = None if late_s is None else round(late_s * 1000)
        wrong = self._keep(exceptions(judged, seen_ms, late_ms, targets=targets))
        named, by_kind = _named(wrong, [*ahead, *stuck])
        rows = requests(judged)
        verdict = Verdict(
            seen_ms=seen_ms,
            took_s=round(time.monotonic() - began, 3),
            topics=list(self._settings.topics),
            shards=len(shards),
            **_totals(rows),
            cancels=sum(one["cancels"] for one in counts),
            cold=sum(one["cold"] for one in counts),
            unknown=sum(one["unknown"] for one in counts),
            by_kind=by_kind,
            exceptions=named,
            **_series(rows, counts),
            read_targets=sorted(set(read)),
        )
        positions = self._session.createDataFrame(
            [one for one in named if one.kind.startswith("positions-")], _EXCEPTIONS
        )
        return Audited(verdict, rows.select(FATE), wrong.unionByName(positions))

    def _suit(self, there: Reach) -> None:
        """Set the shuffle partitions by the journals' size, and disable automatic broadcast joins."""
        rows = sum(span.end - span.start for span in there.values())
        parts = max(self._session.sparkContext.defaultParallelism, rows // ROWS_A_TASK)
        chosen = {
            "spark.sql.shuffle.partitions": str(parts),
            "spark.sql.autoBroadcastJoinThreshold": "-1",
        }
        for name, value in chosen.items():
            self._ending.callback(self._session.conf.set, name, str(self._session.conf.get(name)))
            self._session.conf.set(name, value)

    def _keep(self, table: DataFrame) -> DataFrame:
        kept = table.persist(StorageLevel.MEMORY_AND_DISK)
        self._ending.callback(kept.unpersist)
        return kept

    def _journals(self) -> Journals:
        return Journals(self._session, self._settings, self._access, self._kept)

    def _positions(self, shards: Iterable[Shard]) -> Seen:
        return {shard: self._inspector.positions(shard) for shard in shards}

    def _held(self, shards: tuple[Shard, ...]) -> DataFrame:
        """All entries, read now and only once: if a part of the table is lost, the audit fails."""
        task = HeldRows(self._settings, shards)
        tasks = numbered(self._session, len(shards) + 1)
        return tasks.mapInArrow(task, HELD).localCheckpoint(eager=True)

    def _wait_for_journals(self, positions: Seen) -> list[Finding]:
        """Wait until the journals can be read up to the positions; positions still beyond are exceptions."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ahead = list(_ahead(positions, reach(self._settings, self._access)))
            if not ahead or time.monotonic() > deadline:
                return ahead
            time.sleep(PATIENCE_LOOK_S)

    def _marks(
        self,
        first: Reach,
        journals: Journals,
        told: Journals,
        outcomes: DataFrame,
        before: Seen,
        after: Seen,
    ) -> DataFrame:
        told_from = _told_from(self._cuts(told), outcomes)
        rows = []
        for shard in before:
            requests, receipts = (Journal(table, shard) for table in TABLES)
            waiting_from = before[shard] or (first[requests].start, first[receipts].start)
            span = journals.reach[requests]
            gaps = journals.gaps.get(requests, [])
            start = Positions(span.start, told.reach[receipts].start)
            pair = [before[shard] or start, after[shard] or start]
            low, high = Positions(*map(min, *pair)), Positions(*map(max, *pair))
            rows.append(
                (
                    *shard, id_prefix(shard), *span, told.reach[requests].end, gaps,
                    _whole_from(span, gaps),
                    low.requests, high.requests, low.receipts, high.receipts,
                    before[shard] is not None and pair[0] == low, told_from.get(shard),
                    *waiting_from, first[requests].end, first[receipts].end,
                )
            )  # fmt: skip
        return self._session.createDataFrame(rows, MARKS)

    def _cuts(self, told: Journals) -> dict[Shard, int]:
        """The receipt offset from which all are kept, for shards that no longer keep the first ones."""
        cuts = {
            shard: _whole_from(span, told.gaps.get(Journal("outcomes", shard), []))
            for shard, span in of_table(told.reach, "outcomes").items()
        }
        return {shard: cut for shard, cut in cuts.items() if cut > 0}

    def _found(self, asked: DataFrame) -> tuple[list[str], DataFrame, DataFrame]:
        """The targets of these requests, the spans that are read, and the messages found in them."""
        named = asked.select("target").where(col("target").isNotNull()).distinct().collect()
        counts = Topics(self._access.admin()).partitions([row.target for row in named], to="Read")
        there = [(topic, p) for topic, count in counts.items() for p in range(count)]
        with closing(Ends(self._access)) as ends:
            begins, lasts = ends.first(there), ends.last(there)
        whole = [Range(*at, begins[at], lasts[at]) for at in there]
        ranges = tuple(pieces(whole))
        task = FoundRows(self._access, ranges, frozenset(self._settings.topics))
        found = numbered(self._session, len(ranges)).mapInArrow(task, FOUND)
        topics = [one.topic for one in whole]
        return topics, self._session.createDataFrame(whole, SPANS), found


_EXCEPTIONS = (
    "kind string, topic string, partition int, offset long, id string, caller string, detail string"
)


def _dated(asked: DataFrame) -> DataFrame:
    """The requests with timestamps limited to a minute from now: callers may set them to anything."""
    soon_ms = lit(_now_ms() + CLOCKS_APART_MS)
    return asked.withColumn("timestamp_ms", least(col("timestamp_ms"), soon_ms))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _ahead(positions: Seen, there: Reach) -> Iterator[Finding]:
    for shard, seen in positions.items():
        ends = (there[Journal(table, shard)].end for table in TABLES)
        for position, end, journal in zip(seen or (), ends, Positions._fields, strict=False):
            if position > end:
                detail = f"the position {journal} is {position}, but the journal ends at {end}"
                yield Finding("positions-ahead", *shard, position, None, None, detail)


def _behind(counts: Iterable[Mapping[str, Any]], before: Seen, last: Seen) -> Iterator[Finding]:
    for one in counts:
        shard = Shard(one["topic"], one["partition"])
        was, now = before[shard], last[shard]
        for journal, waiting, what in (
            ("requests", one["unread"], "records"),
            ("receipts", one["unapplied"], "outcomes"),
        ):
            position = None if was is None else getattr(was, journal)
            if waiting and position == (None if now is None else getattr(now, journal)):
                at = (
                    "the shard has no position"
                    if position is None
                    else f"the position {journal} stays {position}"
                )
                detail = f"{at}, although {waiting:,} {what} wait"
                yield Finding("positions-behind", *shard, position or 0, None, None, detail)


def _whole_from(span: Span, gaps: Sequence[Span]) -> int:
    return max([span.start, *(gap.end for gap in gaps)])


def _told_from(cuts: Mapping[Shard, int], outcomes: DataFrame) -> dict[Shard, int]:
    """Since when all receipts are kept, epoch ms, by shard."""
    if not cuts:
        return {}
    first = smallest("at_ms").alias("first")
    found = {
        Shard(row.topic, row.partition): row.first
        for row in outcomes.where(_from(cuts)).groupBy(SHARD).agg(first).collect()
    }
    return {shard: found.get(shard, _now_ms()) for shard in cuts}


def _from(cuts: Mapping[Shard, int]) -> Any:
    is_any = lit(False)
    for shard, cut in cuts.items():
        here = (col("topic") == lit(shard.topic)) & (col("partition") == lit(shard.partition))
        is_any = is_any | (here & (col("receipt") >= lit(cut)))
    return is_any


def _by_shard(judged: DataFrame) -> list[dict[str, Any]]:
    """Per shard: the first and last times, and counts other than of request states.

    This is the first action on `judged`, and computes the table.
    """

    def counted(condition: Any) -> Any:
        return count(when(condition, lit(1)))

    def within(receipt: str) -> Any:
        return (col(receipt) >= col("receipts_from")) & (col(receipt) < col("receipts_to"))

    is_pending = col("state") == lit("pending")
    unread = (col("offset") >= col("requests_from")) & (col("offset") < col("requests_to"))
    unapplied = within("receipt") | within("again.receipt")
    is_cut = ~is_known() | (col("state") == lit("unknown"))
    rows = judged.groupBy(SHARD).agg(
        smallest("timestamp_ms").alias("first_ms"),
        largest(greatest("timestamp_ms", "outcome_ms")).alias("last_ms"),
        smallest(when(is_pending, col("due_ms"))).alias("due_first_ms"),
        largest(when(is_pending, col("due_ms"))).alias("due_last_ms"),
        largest(when(col("outcome") == lit("delivered"), lateness())).alias("longest_ms"),
        counted(col("kind") == lit("cancel")).alias("cancels"),
        counted(is_pending & col("cold")).alias("cold"),
        counted(is_cut).alias("unknown"),
        counted(col("kind").isNotNull() & unread).alias("unread"),
        counted(unapplied).alias("unapplied"),
    )  # fmt: skip
    return [row.asDict() for row in rows.collect()]


def _totals(rows: DataFrame) -> dict[str, Any]:
    """How many requests are in each state: in total, by caller, by target, and by due hour."""
    hour = (floor(col("due_ms") / lit(3_600_000)) * 3_600_000).alias("hour")
    parts = ("caller", "target", "hour")
    grouped = rows.select("state", "caller", "target", hour).groupingSets(
        [["state"], *(["state", part] for part in parts)], "state", *parts
    )
    summed = [is_summed(part).alias(f"no_{part}") for part in parts]
    counted = grouped.agg(count(lit(1)).alias("requests"), *summed).collect()
    states = dict.fromkeys(STATES, 0)
    by: dict[str, dict[Any, dict[str, int]]] = {part: {} for part in parts}
    for row in counted:
        part = next((part for part in parts if not row[f"no_{part}"]), None)
        if part is None:
            states[row.state] = row.requests
        else:
            by[part].setdefault(row[part], {})[row.state] = row.requests
    return {
        "states": states,
        "callers": dict(sorted(by["caller"].items(), key=_most)),
        "targets": dict(sorted(by["target"].items(), key=_most)),
        "hours": dict(sorted(by["hour"].items())),
    }


def _most(item: tuple[Any, Mapping[str, int]]) -> tuple[int, str]:
    return -sum(item[1].values()), str(item[0])


def _series(rows: DataFrame, counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lateness by step, pending requests by due time, and requests and deliveries by time."""
    first, last = _extremes(counts, "first_ms", "last_ms")
    due_first, due_last = _extremes(counts, "due_first_ms", "due_last_ms")
    width = even_width_ms(last - first, BUCKETS)
    due_width = even_width_ms(due_last - due_first, BUCKETS)
    is_delivered = col("outcome") == lit("delivered")
    points = {
        "late": when(is_delivered, floor(log10(lateness() + 1) * STEPS_A_DECADE)),
        "asked": floor((col("timestamp_ms") - first) / width),
        "delivered": when(is_delivered, floor((col("outcome_ms") - first) / width)),
        "due": when(col("state") == lit("pending"), floor((col("due_ms") - due_first) / due_width)),
    }
    counted = array(
        *(
            struct(lit(name).alias("name"), at.cast("long").alias("at"))
            for name, at in points.items()
        )
    )
    found: dict[str, dict[int, int]] = {name: {} for name in points}
    grouped = rows.select(explode(counted).alias("point")).groupBy("point.name", "point.at")
    for row in grouped.agg(count(lit(1)).alias("requests")).collect():
        if row.at is not None:
            found[row.name][row.at] = row.requests
    longest = max((one["longest_ms"] for one in counts if one["longest_ms"] is not None), default=0)
    return {
        "lateness": _lateness(found["late"], longest),
        "due": _evenly(due_first, due_width, found["due"]),
        "asked": _evenly(first, width, found["asked"]),
        "delivered": _evenly(first, width, found["delivered"]),
    }


def _extremes(counts: Sequence[Mapping[str, Any]], first: str, last: str) -> tuple[int, int]:
    firsts = [one[first] for one in counts if one[first] is not None]
    lasts = [one[last] for one in counts if one[last] is not None]
    return min(firsts, default=0), max(lasts, default=0)


_WIDTHS_MS = (
    100, 200, 500, 1000, 2000, 5000, 10_000, 15_000, 30_000, 60_000, 120_000, 300_000, 600_000,
    900_000, 1_800_000, 3_600_000, 7_200_000, 14_400_000, 21_600_000, 43_200_000, 86_400_000,
)  # fmt: skip


def even_width_ms(length_ms: int, parts: int) -> int:
    """A round width, such as 5 min or 1 h, of which about `parts` at most cover this length."""
    needed = length_ms / parts
    days = 86_400_000
    return next((width for width in _WIDTHS_MS if width >= needed), int(needed // days + 1) * days)


def _evenly(start_ms: int, width_ms: int, counts: Mapping[int, int]) -> Series | None:
    if not counts:
        return None
    return Series(start_ms, width_ms, [counts.get(at, 0) for at in range(max(counts) + 1)])


def _lateness(counts: Mapping[int, int], longest_ms: int) -> Lateness | None:
    if not counts:
        return None

    def at_share(share: float) -> int:
        wanted = share * sum(counts.values())
        reached = 0
        for step in sorted(counts):
            reached += counts[step]
            if reached >= wanted:
                break
        return min(longest_ms, round(10 ** ((step + 0.5) / STEPS_A_DECADE) - 1))

    return Lateness(at_share(0.5), at_share(0.99), longest_ms, dict(sorted(counts.items())))


def _named(wrong: DataFrame, more: Sequence[Finding]) -> tuple[list[Finding], dict[str, int]]:
    """The exceptions, all of `more` and at most `NAMED` others, and how many there are of each kind."""
    counted = wrong.groupBy("kind").agg(count(lit(1)).alias("found")).collect()
    by_kind = {row.kind: row.found for row in counted}
    for one in more:
        by_kind[one.kind] = by_kind.get(one.kind, 0) + 1
    found = [Finding(*row) for row in wrong.limit(NAMED).collect()] if counted else []
    named = [*more, *sorted(found, key=lambda one: one[:4])]
    return named, dict(sorted(by_kind.items(), key=lambda item: (-item[1], item[0])))
