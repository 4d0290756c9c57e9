"""The positions of the shards, compared with what the journals hold."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, lit, struct
from pyspark.sql.functions import min as smallest

from blackbox.core.plan import Positions
from blackbox.records.request import Shard, id_prefix
from blackbox.spark.journals import SHARD, TABLES, JournalKey, JournalTables, Reach, Span, of_table

SeenPositions = Mapping[Shard, Positions | None]

MARKS = (
    "topic string, partition int, id_prefix string, in_kafka_from long, first long, end long, "
    "end_later long, gaps array<struct<start: long, end: long>>, whole_from long, "
    "requests_low long, requests_high long, receipts_low long, receipts_high long, "
    "steady boolean, compacted boolean, receipts_complete_from_ms long, accounted_from long, "
    "receipts_hidden boolean, "
    "requests_from long, receipts_from long, requests_to long, receipts_to long"
)
"""Per shard:

`in_kafka_from` -- the first offset that Kafka kept before the index was read
`first` to `end` - 1 -- the offsets of requests that are kept, except `gaps`; none from `whole_from` on
`end_later` -- the end of the requests when the receipts were about to be read
`…_low`, `…_high` -- the bounds of the positions while the index was read
`steady` -- whether there were positions, and they did not go back
`compacted` -- whether Kafka may remove records in between, as in a topic of schedules
`receipts_complete_from_ms` -- since when all receipts are kept, and all outcomes in them; null: from
the first one on
`accounted_from` -- no receipt that is gone names a request from this one on; null: not known
`receipts_hidden` -- whether an open transaction hides receipts of messages that can be read in targets
`requests_from` to `requests_to` - 1, and so for receipts -- what the journals held at the start, not applied
"""


class PositionFinding(NamedTuple):
    """An exception. `offset` is that of a request, or a position of the shard."""

    kind: str
    topic: str
    partition: int
    offset: int
    id: str | None
    caller: str | None
    detail: str


def positions_ahead(positions: SeenPositions, there: Reach) -> Iterator[PositionFinding]:
    for shard, seen in positions.items():
        ends = (there[JournalKey(table, shard)].end for table in TABLES)
        for position, end, journal in zip(seen or (), ends, Positions._fields, strict=False):
            if position > end:
                detail = f"the position {journal} is {position}, but the journal ends at {end}"
                yield PositionFinding("positions-ahead", *shard, position, None, None, detail)


def positions_behind(
    counts: Iterable[Mapping[str, Any]], before: SeenPositions, last: SeenPositions
) -> Iterator[PositionFinding]:
    for one in counts:
        shard = Shard(one["topic"], one["partition"])
        for journal, waiting, what in (
            ("requests", one["unread"], "records"),
            ("receipts", one["unapplied"], "outcomes"),
        ):
            position = getattr(before[shard], journal, None)
            # Records were there at the start, and the position is the same at the end.
            if waiting and position == getattr(last[shard], journal, None):
                at = (
                    "the shard has no position"
                    if position is None
                    else f"the position {journal} stays {position}"
                )
                detail = f"{at}, although {waiting:,} {what} wait"
                yield PositionFinding("positions-behind", *shard, position or 0, None, None, detail)


def marks(
    session: SparkSession,
    first: Reach,
    journals: JournalTables,
    later: JournalTables,
    outcomes: DataFrame,
    before: SeenPositions,
    after: SeenPositions,
    hiding: Collection[Shard],
) -> DataFrame:
    cuts, losses = _cuts(later), _losses(outcomes)
    complete_from = _complete_from(cuts, losses, outcomes)
    accounted_from = _accounted_from(cuts, losses, outcomes)
    rows = []
    for shard in before:
        requests, receipts = (JournalKey(table, shard) for table in TABLES)
        waiting_from = before[shard] or (first[requests].start, first[receipts].start)
        span = journals.reach[requests]
        gaps = journals.gaps.get(requests, [])
        start = Positions(span.start, later.reach[receipts].start)
        pair = [before[shard] or start, after[shard] or start]
        # Minimum and maximum, not first and last: Redis may be rolled back between the two reads.
        low, high = Positions(*map(min, *pair)), Positions(*map(max, *pair))
        rows.append(
            (
                *shard, id_prefix(shard), first[requests].start, *span, later.reach[requests].end, gaps,
                _whole_from(span, gaps),
                low.requests, high.requests, low.receipts, high.receipts,
                before[shard] is not None and pair[0] == low,
                shard.topic in journals.settings.schedule_topics, complete_from.get(shard),
                accounted_from.get(shard), shard in hiding,
                *waiting_from, first[requests].end, first[receipts].end,
            )
        )  # fmt: skip
    return session.createDataFrame(rows, MARKS)


def _cuts(later: JournalTables) -> dict[Shard, int]:
    """The receipt offset from which all are kept, for shards that no longer keep the first ones."""
    cuts = {
        shard: _whole_from(span, later.gaps.get(JournalKey("outcomes", shard), []))
        for shard, span in of_table(later.reach, "outcomes").items()
    }
    return {shard: cut for shard, cut in cuts.items() if cut > 0}


def _whole_from(span: Span, gaps: Sequence[Span]) -> int:
    return max([span.start, *(gap.end for gap in gaps)])


class _Loss(NamedTuple):
    """Outcomes of requests that were due before `before_ms` are in no receipt; `receipt` says so first."""

    before_ms: int
    receipt: int


def _losses(outcomes: DataFrame) -> dict[Shard, _Loss]:
    """The latest loss that barriers name, by shard: the receipts topic was deleted and created again."""
    # Owners repeat it in their barriers until there is a mark. The first of these barriers counts:
    # outcomes after it are in receipts.
    first = smallest(struct((-col("to_offset")).alias("ms"), "receipt")).alias("first")
    found = outcomes.where(col("outcome") == lit("unknown")).groupBy(SHARD).agg(first).collect()
    return {
        Shard(row.topic, row.partition): _Loss(-row.first.ms, row.first.receipt) for row in found
    }


def _complete_from(
    cuts: Mapping[Shard, int], losses: Mapping[Shard, _Loss], outcomes: DataFrame
) -> dict[Shard, int]:
    """Since when all receipts are kept, epoch ms, by shard."""
    since = {shard: loss.before_ms for shard, loss in losses.items()}
    for shard, first_ms in _first_kept(cuts, outcomes).items():
        since[shard] = max(first_ms, since.get(shard, 0))
    return since


def _first_kept(cuts: Mapping[Shard, int], outcomes: DataFrame) -> dict[Shard, int]:
    """The time of the first receipt that is kept, by shard, for those that lack earlier ones."""
    if not cuts:
        return {}
    first = smallest("at_ms").alias("first")
    found = {
        Shard(row.topic, row.partition): row.first
        for row in outcomes.where(_from(cuts, "receipt")).groupBy(SHARD).agg(first).collect()
    }
    # Without any receipt that is kept, nothing is known of outcomes until now.
    now_ms = time.time_ns() // 1_000_000
    return {shard: found.get(shard, now_ms) for shard in cuts}


def _accounted_from(
    cuts: Mapping[Shard, int], losses: Mapping[Shard, _Loss], outcomes: DataFrame
) -> dict[Shard, int]:
    """The first request that no removed receipt names, by shard, as far as a low-water mark shows it."""
    # A mark that reaches beyond the barrier was found after the loss.
    behind = {shard: loss.receipt + 1 for shard, loss in losses.items()}
    cuts = {shard: max(cuts.get(shard, 0), behind.get(shard, 0)) for shard in {*cuts, *behind}}
    if not cuts:
        return {}
    # No receipt below the offset `receipts` of a mark names a request at or above the mark.
    kept = (col("outcome") == lit("mark")) & _from(cuts, "receipt") & _from(cuts, "to_offset")
    # The earliest one that is kept: the last one may be above a request that Redis has lost.
    earliest = smallest(struct("receipt", "offset")).alias("earliest")
    found = outcomes.where(kept).groupBy(SHARD).agg(earliest).collect()
    return {Shard(row.topic, row.partition): row.earliest.offset for row in found}


def _from(cuts: Mapping[Shard, int], name: str) -> Any:
    """Whether the receipt offset in this column is at or above the cut of its shard."""
    is_any = lit(False)
    for shard, cut in cuts.items():
        here = (col("topic") == lit(shard.topic)) & (col("partition") == lit(shard.partition))
        is_any = is_any | (here & (col(name) >= lit(cut)))
    return is_any
