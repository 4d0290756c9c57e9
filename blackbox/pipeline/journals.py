"""Both journals as tables, for the batch jobs: what was asked, and what became of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import broadcast, col, lit
from pyspark.sql.functions import max as largest

from blackbox.journal.access import KafkaAccess
from blackbox.journal.ranges import Ends, Range
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.pipeline.session import numbered
from blackbox.pipeline.tasks.journals import (
    OUTCOMES,
    RECORDS,
    REQUESTS,
    OutcomeRows,
    RequestRows,
)
from blackbox.request import Shard
from blackbox.settings import Settings

if TYPE_CHECKING:
    from blackbox.pipeline.ledger.ledger import Ledger

PIECE = 250_000
"""Offsets that one task reads: small enough for progress, large enough to be worth a task."""

SHARD = ["topic", "partition"]
PLACE = [*SHARD, "offset"]


class Span(NamedTuple):
    """The offsets `start` to `end` - 1."""

    start: int
    end: int


class Reach(NamedTuple):
    """From where to where the two journals of each shard can be read at one moment."""

    requests: Mapping[Shard, Span]
    receipts: Mapping[Shard, Span]


class Journals:
    """Both journals up to one moment: from the ledger what it has, the rest from Kafka.

    `reach` says what they hold together. `gaps` are offsets within it, by journal topic and
    partition, that neither has: nothing is known about them. Raises LedgerError for a ledger that is
    not of these journals.
    """

    def __init__(
        self,
        session: SparkSession,
        settings: Settings,
        access: KafkaAccess,
        kept: Ledger | None = None,
    ) -> None:
        self._session = session
        self._settings = settings
        self._access = access
        self._kept = kept
        in_kafka = reach(settings, access)
        if kept is not None:
            kept.check(in_kafka, list(settings.topics), access)
        held = kept.reach if kept is not None else Reach({}, {})
        self._requests, self._receipts = (
            {shard: _beyond(kafka[shard], held_.get(shard)) for shard in kafka}
            for kafka, held_ in zip(in_kafka, held, strict=True)
        )
        self.reach = Reach(
            *(
                {shard: _joined(kafka[shard], held_.get(shard)) for shard in kafka}
                for kafka, held_ in zip(in_kafka, held, strict=True)
            )
        )
        self.gaps = defaultdict[Shard, list[Span]](list)
        for at, gaps in (kept.gaps if kept is not None else {}).items():
            self.gaps[at] += gaps
        for name, kafka, held_ in (
            (str, in_kafka.requests, held.requests),
            (receipts_topic, in_kafka.receipts, held.receipts),
        ):
            for shard in kafka.keys() & held_.keys():
                if held_[shard].end < kafka[shard].start:
                    at = Shard(name(shard.topic), shard.partition)
                    self.gaps[at].append(Span(held_[shard].end, kafka[shard].start))

    def requests(self, *, whole: bool = False) -> DataFrame:
        """One row for each record of the request topics; see `read_requests`."""
        fresh = read_requests(
            self._session, self._settings, self._access, self._requests, whole=whole
        )
        if self._kept is None:
            return fresh
        return self._kept.requests().select(fresh.columns).unionByName(fresh)

    def outcomes(self) -> DataFrame:
        """One row for each outcome that receipts tell; `settled` leaves the void ones out."""
        fresh = read_outcomes(self._session, self._access, self._receipts)
        return fresh if self._kept is None else self._kept.outcomes().unionByName(fresh)


def reach(settings: Settings, access: KafkaAccess) -> Reach:
    """How far the journals go now, receipts first: a request is older than its receipt.

    A shard whose receipts do not exist yet has none. Raises JournalLost when Kafka does not answer.
    """
    topics = list(settings.topics)
    counts = Topics(access.admin()).partitions([*topics, *map(receipts_topic, topics)], to="Read")
    shards = [Shard(topic, p) for topic in topics for p in range(counts.get(topic, 0))]
    journals = {shard: (receipts_topic(shard.topic), shard.partition) for shard in shards}
    with closing(Ends(access)) as ends:
        there = [at for at in journals.values() if at[1] < counts.get(at[0], 0)]
        first, last = ends.first(there), ends.last(there)
        receipts = {s: Span(first.get(at, 0), last.get(at, 0)) for s, at in journals.items()}
        first, last = ends.first(shards), ends.last(shards)
        requests = {s: Span(first[s], last[s]) for s in shards}
    return Reach(requests, receipts)


def read_requests(
    session: SparkSession,
    settings: Settings,
    access: KafkaAccess,
    spans: Mapping[Shard, Span],
    *,
    whole: bool = False,
) -> DataFrame:
    """One row for each record of these spans of the request topics: what it asks for.

    `whole` adds the record itself: key, value and headers.
    """
    ranges = [Range(s.topic, s.partition, *span) for s, span in spans.items()]
    task = RequestRows(settings, access, tuple(pieces(ranges)), whole)
    return numbered(session, len(task.ranges)).mapInArrow(task, RECORDS if whole else REQUESTS)


def read_outcomes(
    session: SparkSession, access: KafkaAccess, spans: Mapping[Shard, Span]
) -> DataFrame:
    """One row for each request that the receipts of these spans name; void ones are rows as well."""
    ranges = [Range(receipts_topic(s.topic), s.partition, *span) for s, span in spans.items()]
    task = OutcomeRows(access, tuple(pieces(ranges)))
    return numbered(session, len(task.ranges)).mapInArrow(task, OUTCOMES)


def settled(outcomes: DataFrame) -> DataFrame:
    """Outcomes that came true: without those that a later receipt declared void."""
    void = (
        outcomes.where(col("outcome") == lit("void"))
        .groupBy(PLACE)
        .agg(largest("receipt").alias("void_at"))
    )
    told = outcomes.where(~col("outcome").isin("void", "gone"))
    return (
        told.join(broadcast(void), PLACE, "left")
        .where(col("void_at").isNull() | (col("receipt") > col("void_at")))
        .drop("void_at")
    )


def pieces(ranges: Iterable[Range]) -> list[Range]:
    """The same ranges, cut into pieces; without empty ones."""
    return [
        whole._replace(start=start, end=min(start + PIECE, whole.end))
        for whole in ranges
        for start in range(whole.start, whole.end, PIECE)
    ]


def _beyond(kafka: Span, held: Span | None) -> Span:
    return kafka if held is None else Span(max(kafka.start, held.end), kafka.end)


def _joined(kafka: Span, held: Span | None) -> Span:
    return kafka if held is None else Span(min(kafka.start, held.start), kafka.end)
