"""Both journals as tables, for the batch jobs: requests and their outcomes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import broadcast, col, lit
from pyspark.sql.functions import max as largest

from blackbox.config.settings import Settings
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.ranges import Range
from blackbox.journal.readable_bounds import ReadableBounds
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.records.request import Shard
from blackbox.spark.journal_tasks import OUTCOMES, RECORDS, REQUESTS, OutcomeRows, RequestRows
from blackbox.spark.spark_session import numbered

# Offsets that one task reads: small enough for progress, large enough to be worth a task.
PIECE = 250_000

SHARD = ["topic", "partition"]
PLACE = [*SHARD, "offset"]


TABLES = ("requests", "outcomes")

NO_OUTCOMES = ("void", "gone", "ignored", "cut", "mark", "unknown")
"""The values of a row of outcomes that are not an end of a request."""


class JournalKey(NamedTuple):
    """One of the two journals of a shard, by the table that its records go to."""

    table: str
    shard: Shard

    def __str__(self) -> str:
        return f"{self.topic}/{self.shard.partition}"

    @property
    def topic(self) -> str:
        topic = self.shard.topic
        return topic if self.table == "requests" else receipts_topic(topic)


class Span(NamedTuple):
    """The offsets `start` to `end` - 1."""

    start: int
    end: int


Reach = Mapping[JournalKey, Span]
"""The offsets of each journal that can be read at one moment."""


def of_table(there: Reach, table: str) -> dict[Shard, Span]:
    return {journal.shard: span for journal, span in there.items() if journal.table == table}


class LedgerTables(Protocol):
    """A ledger: records of both journals that are kept elsewhere, and further back."""

    @property
    def reach(self) -> Reach: ...
    @property
    def gaps(self) -> Mapping[JournalKey, Sequence[Span]]: ...
    def check(self, there: Reach, topics: Collection[str], access: KafkaAccess) -> None: ...
    def requests(self) -> DataFrame: ...
    def outcomes(self) -> DataFrame: ...


@dataclass(eq=False, repr=False)
class JournalTables:
    """Both journals up to one moment: what the ledger has from there, the rest from Kafka.

    `reach` is what they have together. `gaps` are offsets within it that neither has: nothing is known
    about them. Records that Kafka removes before they are read are left out: `leave_out_removed` says
    which. Raises LedgerError for a ledger that is not of these journals.
    """

    session: SparkSession
    settings: Settings
    access: KafkaAccess
    kept: LedgerTables | None

    def __post_init__(self) -> None:
        self._fresh: dict[JournalKey, Span] = {}
        self.reach: dict[JournalKey, Span] = {}
        self.gaps: dict[JournalKey, list[Span]] = {}
        in_kafka = reach(self.settings, self.access)
        held: Reach = {}
        if self.kept is not None:
            self.kept.check(in_kafka, list(self.settings.topics), self.access)
            held = self.kept.reach
            self.gaps |= {journal: list(gaps) for journal, gaps in self.kept.gaps.items()}
        for journal, there in in_kafka.items():
            before = held.get(journal, Span(there.start, there.start))
            # The ledger's rows come first: records that both have must not be counted twice.
            self._fresh[journal] = Span(max(there.start, before.end), there.end)
            self.reach[journal] = Span(min(there.start, before.start), there.end)
            if before.end < there.start:
                self.gaps.setdefault(journal, []).append(Span(before.end, there.start))

    def leave_out_removed(self, left: Reach) -> None:
        """Take out what Kafka has removed since, because it may not have been read; `left` is its reach now."""
        for journal, fresh in self._fresh.items():
            first = min(left.get(journal, fresh).start, fresh.end)
            if first <= fresh.start:
                continue
            if self.reach[journal].start == fresh.start:
                self.reach[journal] = Span(first, fresh.end)
            else:  # the ledger has earlier records
                self.gaps.setdefault(journal, []).append(Span(fresh.start, first))

    def requests(self, *, whole: bool = False) -> DataFrame:
        """One row for each record of the request topics; see `read_requests`."""
        spans = of_table(self._fresh, "requests")
        fresh = read_requests(
            self.session, self.settings, self.access, spans, whole=whole, skip_removed=True
        )
        if self.kept is None:
            return fresh
        return self._asked_for(self.kept.requests()).select(fresh.columns).unionByName(fresh)

    def outcomes(self) -> DataFrame:
        """One row for each outcome that receipts name; `without_void` leaves the void ones out."""
        spans = of_table(self._fresh, "outcomes")
        fresh = read_outcomes(self.session, self.access, spans, skip_removed=True)
        if self.kept is None:
            return fresh
        return self._asked_for(self.kept.outcomes()).unionByName(fresh)

    def _asked_for(self, kept: DataFrame) -> DataFrame:
        # A ledger may also have topics that are not configured here.
        return kept.where(col("topic").isin(list(self.settings.topics)))


def reach(settings: Settings, access: KafkaAccess) -> Reach:
    """The current span of each journal. Raises JournalLost when Kafka does not answer."""
    topics = list(settings.topics)
    counts = Topics(access.admin()).partitions([*topics, *map(receipts_topic, topics)], to="Read")
    shards = [Shard(topic, p) for topic in topics for p in range(counts.get(topic, 0))]
    with closing(ReadableBounds(access)) as ends:

        def spans(table: str) -> dict[JournalKey, Span]:
            journals = [JournalKey(table, shard) for shard in shards]
            places = {journal: (journal.topic, journal.shard.partition) for journal in journals}
            there = [(topic, p) for topic, p in places.values() if p < counts.get(topic, 0)]
            first, last = ends.first(there), ends.last(there)
            # A journal that does not exist yet has an empty span.
            return {j: Span(first.get(at, 0), last.get(at, 0)) for j, at in places.items()}

        # Receipts first: each request that they name is older, and so within the span read next.
        outcomes = spans("outcomes")
        return spans("requests") | outcomes


def read_requests(
    session: SparkSession,
    settings: Settings,
    access: KafkaAccess,
    spans: Mapping[Shard, Span],
    *,
    whole: bool = False,
    skip_removed: bool = False,
) -> DataFrame:
    """One row for each record of these spans: what it asks for, and with `whole` its key, value and headers.

    Fails if Kafka removes some of them before they are read, unless `skip_removed`.
    """
    ranges = [Range(s.topic, s.partition, *span) for s, span in spans.items()]
    task = RequestRows(settings, access, tuple(pieces(ranges)), whole, skip_removed)
    return numbered(session, len(task.ranges)).mapInArrow(task, RECORDS if whole else REQUESTS)


def read_outcomes(
    session: SparkSession,
    access: KafkaAccess,
    spans: Mapping[Shard, Span],
    *,
    skip_removed: bool = False,
) -> DataFrame:
    """One row for each request that the receipts of these spans name, and for each mark; see OUTCOMES.

    Fails if Kafka removes some of them before they are read, unless `skip_removed`.
    """
    ranges = [Range(receipts_topic(s.topic), s.partition, *span) for s, span in spans.items()]
    task = OutcomeRows(access, tuple(pieces(ranges)), skip_removed)
    return numbered(session, len(task.ranges)).mapInArrow(task, OUTCOMES)


def without_void(outcomes: DataFrame) -> DataFrame:
    """The outcomes that no later receipt declared void, without those of a lost end of the log."""
    void = (
        outcomes.where(col("outcome") == lit("void"))
        .groupBy(PLACE)
        .agg(largest("receipt").alias("void_at"))
    )
    others = outcomes.where(~col("outcome").isin(*NO_OUTCOMES))
    # Torn transactions are rare. An outcome behind the void one is that of the next delivery.
    valid = (
        others.join(broadcast(void), PLACE, "left")
        .where(col("void_at").isNull() | (col("receipt") > col("void_at")))
        .drop("void_at")
    )
    return _without_lost_end(valid, outcomes)


def ignored(outcomes: DataFrame) -> DataFrame:
    """The conditional records that, by a receipt, did not count, without those of a lost end of the log."""
    return _without_lost_end(outcomes.where(col("outcome") == lit("ignored")), outcomes)


def _without_lost_end(rows: DataFrame, outcomes: DataFrame) -> DataFrame:
    cuts = (
        outcomes.where(col("outcome") == lit("cut"))
        .groupBy(*(col(name).alias(f"cut_{name}") for name in PLACE))
        .agg(largest("receipt").alias("cut_at"))
    )
    # A cut says that the log lost its end: receipts up to it name requests that are gone, and other
    # requests have their offsets now.
    is_of_others = (
        (col("topic") == col("cut_topic"))
        & (col("partition") == col("cut_partition"))
        & (col("offset") >= col("cut_offset"))
        & (col("receipt") <= col("cut_at"))
    )
    return rows.join(broadcast(cuts), is_of_others, "left_anti")


def pieces(ranges: Iterable[Range]) -> list[Range]:
    """The ranges, cut into pieces of at most PIECE offsets; without empty ones."""
    return [
        whole._replace(start=start, end=min(start + PIECE, whole.end))
        for whole in ranges
        for start in range(whole.start, whole.end, PIECE)
    ]
