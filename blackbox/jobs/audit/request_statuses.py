"""The status of each request: steps of the audit as table transformations."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql.functions import (
    broadcast,
    coalesce,
    col,
    concat,
    count,
    hex,
    lead,
    least,
    lit,
    lower,
    lpad,
    shiftright,
    struct,
    when,
)
from pyspark.sql.functions import max as largest
from pyspark.sql.functions import min as smallest

from blackbox.jobs.audit.conditions import any_of, is_true, may_have_hidden_receipt
from blackbox.jobs.audit.replacements import REPLACED, delivered_as_well, too_late
from blackbox.records.clock import CLOCKS_APART_MS
from blackbox.spark.journals import PLACE, SHARD, ignored, without_void

REQUEST_COLUMNS = [
    *PLACE, "timestamp_ms", "kind", "target", "due_ms", "caller", "caller_id", "carries", "origin",
]  # fmt: skip

SPANS = "to_topic string, to_partition int, kept_from long, kept_to long, written_to long, may_lack boolean"
"""The offsets that target topics hold: `kept_from` to `kept_to` - 1; compaction `may_lack` some of them.

Up to `written_to` - 1 there may be records that cannot be read yet, because a transaction is open.
"""

STATUS_COLUMNS = [
    "id", *PLACE, "state", "caller", "caller_id", "target", "timestamp_ms", "due_ms", "outcome_ms",
    "to_topic", "to_partition", "to_offset", "ended_by",
]  # fmt: skip


STATES = (
    "pending", "delivered", "dead", "cancelled", "replaced", "expired", "invalid", "unread",
    "unknown",
)  # fmt: skip


def request_statuses(
    asked: DataFrame,
    outcomes: DataFrame,
    held: DataFrame,
    marks: DataFrame,
    found: DataFrame | None = None,
    spans: DataFrame | None = None,
) -> DataFrame:
    """One row for each offset that a journal, the index or a target names, with everything known of it.

    `asked` has the columns REQUEST_COLUMNS, `held` those of HELD. `found` and `spans` are given together.
    """
    # Cancels and replacements by id: `carries` is the request that they name; they have no origin.
    by_id = asked.where(col("carries").isNotNull() & col("origin").isNull()).select(
        *SHARD, col("carries").alias("offset"), col("offset").alias("ended_by"),
        col("kind").alias("ended_as"),
    )  # fmt: skip
    asked = asked.withColumn("carries", when(col("origin").isNotNull(), col("carries")))
    first_outcomes = _first_outcomes(outcomes)
    if spans is not None:
        first_outcomes = first_outcomes.join(broadcast(spans), ["to_topic", "to_partition"], "left")
    index = _index(held)
    did_not_count = held.where(col("ignored")).select(PLACE).union(ignored(outcomes).select(PLACE))
    is_any_by_id = not by_id.isEmpty()
    ended = _ended(asked, by_id if is_any_by_id else None, first_outcomes, did_not_count)
    rows = asked.join(ended.hint("merge"), PLACE, "left")
    rows = rows.join(first_outcomes, PLACE, "full").join(index, PLACE, "full")
    rows = _with_carried(rows, asked, first_outcomes, index, ended)
    if is_any_by_id:
        rows = rows.join(delivered_as_well(by_id, asked, first_outcomes), PLACE, "left")
    else:
        rows = rows.withColumn("replaced", lit(None).cast(REPLACED))
    if found is None:
        rows = rows.withColumn("copies", lit(None).cast("long"))
    else:
        rows = rows.join(_copies(found), PLACE, "full")
    rows = rows.join(broadcast(marks), SHARD, "inner")
    return _with_state(rows.withColumn("id", _id()))


def requests(statuses: DataFrame) -> DataFrame:
    """The statuses of requests only, without cancels and offsets that hold no request."""
    return statuses.where(col("kind").isin("request", "invalid"))


def _with_carried(
    rows: DataFrame,
    asked: DataFrame,
    first_outcomes: DataFrame,
    index: DataFrame,
    ended: DataFrame,
) -> DataFrame:
    """Add the statuses of cold requests: `carried_by` is the record that carries a request on."""
    carrying = asked.where(col("carries").isNotNull()).select(*PLACE, "carries")
    # Without a cold tier, all of these joins are saved.
    if carrying.isEmpty():
        nothing = lit(None).cast("long")
        return rows.withColumn("carried_by", nothing).withColumn("outcome_of", nothing)
    before = [*SHARD, "carries"]

    def of_previous(table: DataFrame, column: str, name: str) -> DataFrame:
        return table.select(*SHARD, col("offset").alias("carries"), col(column).alias(name))

    judged = (
        carrying.withColumn("first", smallest("offset").over(Window.partitionBy(before)))
        .join(of_previous(first_outcomes, "receipt", "ended_at"), before, "left")
        .join(of_previous(index.where(col("entry")), "entry", "stayed"), before, "left")
        .join(first_outcomes.select(*PLACE, col("receipt").alias("own")), PLACE, "left")
        .join(of_previous(ended, "ended_by", "over_at"), before, "left")
    )
    stayed = coalesce(col("stayed"), lit(False)) | col("ended_at").isNotNull()
    was_over = coalesce(col("over_at") < col("offset"), lit(False))
    # It counts unless the request was carried or ended before, or is in the index itself.
    counts = (col("offset") == col("first")) & ~stayed & ~was_over
    judged = judged.select(
        *PLACE,
        (counts | col("own").isNotNull()).alias("counts"),
        # Both records have an outcome, so the request has two.
        when(col("own").isNotNull() & col("ended_at").isNotNull(), col("carries")).alias(
            "outcome_of"
        ),
        when(counts, col("carries")).alias("takes"),
    )
    carried = judged.where(col("takes").isNotNull()).select(
        *SHARD, col("takes").alias("offset"), col("offset").alias("carried_by")
    )
    kind = when(col("counts"), col("kind")).when(col("counts").isNull(), col("kind"))
    return (
        rows.join(judged.drop("takes"), PLACE, "left")
        .join(carried, PLACE, "left")
        .withColumn("kind", kind.otherwise(lit("void")))
        .drop("counts")
    )


def _ended(
    asked: DataFrame,
    by_id: DataFrame | None,
    first_outcomes: DataFrame,
    did_not_count: DataFrame,
) -> DataFrame:
    """The record that ends each request: the next one with its caller id, or one that names its id."""
    if by_id is not None:
        # Few rows, which are used several times: without this, each use would calculate them again.
        late = too_late(by_id, first_outcomes, did_not_count).localCheckpoint()
        asked = asked.join(late, PLACE, "left_anti")
        by_id = by_id.join(
            late.withColumnRenamed("offset", "ended_by"), [*SHARD, "ended_by"], "left_anti"
        )
    later = Window.partitionBy(*SHARD, "caller_id").orderBy("offset")
    # What the service refused as invalid ended nothing, even if it is valid by the settings of this audit.
    refused = first_outcomes.where(col("outcome") == lit("invalid")).select(PLACE)
    named = asked.where(col("caller_id").isNotNull()).join(refused, PLACE, "left_anti")
    following = named.select(
        *PLACE,
        lead("offset").over(later).alias("ended_by"),
        lead("kind").over(later).alias("ended_as"),
        lead("carries").over(later).alias("ended_carries"),
    )
    # A carried record has the caller id of the request that it carries, and does not end it.
    is_ended = col("ended_by").isNotNull() & ~col("ended_carries").eqNullSafe(col("offset"))
    ended = following.where(is_ended).drop("ended_carries").withColumn("keeps_cold_bit", lit(False))
    if by_id is None:
        return ended
    by_id = by_id.where(col("ended_by") > col("offset"))
    requests_only = asked.where(col("kind") == lit("request")).select(*PLACE, "origin")
    named = by_id.join(requests_only.drop("origin"), PLACE).withColumn("keeps_cold_bit", lit(False))
    # A carried request keeps its first id. Ended by that id, a cold one keeps its bit in the index
    # until it is written again.
    moved = (
        requests_only.where(col("origin").isNotNull())
        .withColumnsRenamed({"offset": "now", "origin": "offset"})
        .join(by_id, PLACE)
        .where(col("ended_by") > col("now"))
        .select(
            *SHARD,
            col("now").alias("offset"),
            "ended_by",
            "ended_as",
            lit(True).alias("keeps_cold_bit"),
        )
    )
    first = struct("ended_by", "ended_as", "keeps_cold_bit")
    every = ended.unionByName(named).unionByName(moved)
    both = every.groupBy(PLACE).agg(smallest(first).alias("first"))
    return both.select(*PLACE, "first.ended_by", "first.ended_as", "first.keeps_cold_bit")


def _first_outcomes(outcomes: DataFrame) -> DataFrame:
    place = struct("to_topic", "to_partition", "to_offset")
    first = struct("receipt", "outcome", "at_ms", place.alias("to"))
    last = struct("receipt", "outcome", place.alias("to"))
    grouped = (
        without_void(outcomes)
        .groupBy(PLACE)
        .agg(
            count(lit(1)).alias("outcomes"),
            smallest(first).alias("first"),
            largest(last).alias("again"),
        )
    )
    return grouped.select(
        *PLACE,
        "outcomes",
        "first.receipt",
        "first.outcome",
        col("first.at_ms").alias("outcome_ms"),
        "first.to.*",
        "again",
    )


def _index(held: DataFrame) -> DataFrame:
    return (
        held.where(~col("ignored"))
        .groupBy(PLACE)
        .agg(
            largest("entry").alias("entry"),
            largest("payload").alias("payload"),
            largest("cold").alias("cold"),
        )
    )


def _copies(found: DataFrame) -> DataFrame:
    place = struct("at_topic", "at_partition", "at_offset")
    return found.groupBy(PLACE).agg(
        count(lit(1)).alias("copies"),
        smallest(place).alias("one"),
        largest(place).alias("other"),
        largest("early_ms").alias("early_ms"),
    )


def _with_state(rows: DataFrame) -> DataFrame:
    is_ended = col("ended_by") < col("requests_high")
    # A request that was refused ended long before it is due: all receipts since it was written count.
    complete_from_ms = col("receipts_complete_from_ms") + lit(CLOCKS_APART_MS)
    is_accounted_for = is_true(col("offset") >= col("accounted_from"))
    asked_ms = least(col("timestamp_ms"), col("due_ms"))
    receipts_incomplete = (asked_ms < complete_from_ms) & ~is_accounted_for
    records_incomplete = col("caller_id").isNotNull() & (col("offset") < col("whole_from"))
    # Its receipt, or the record that ended it, may be gone: only the index shows what is pending.
    in_doubt = ~any_of(col("entry"), col("cold")) & any_of(receipts_incomplete, records_incomplete)
    # A receipt decides first: a cancel that came too late does not change a delivery.
    state = (
        when(col("outcome").isNotNull(), col("outcome"))
        .when(may_have_hidden_receipt(), lit("unknown"))
        .when(is_ended & (col("ended_as") == lit("cancel")), lit("cancelled"))
        .when(is_ended, lit("replaced"))
        .when(col("offset") >= col("requests_high"), lit("unread"))
        .when(in_doubt, lit("unknown"))
        .otherwise(lit("pending"))
    )
    is_carried = is_true(col("carried_by") < col("requests_high"))
    is_to_be = col("carries").isNotNull() & (col("offset") >= col("requests_high"))
    kind = when(is_carried | is_to_be, lit("carried")).otherwise(col("kind"))
    is_request = col("kind").isin("request", "invalid")
    return rows.withColumn("kind", kind).withColumn("state", when(is_request, state))


def _id() -> Column:
    """The request id of the row's place, as `blackbox.records.request.request_id` computes it."""
    asked_at = coalesce(col("origin"), col("offset"))
    high = shiftright(asked_at, 48).bitwiseOR(lit(0x8000))
    low = asked_at.bitwiseAND(lit(0xFFFF_FFFF_FFFF))
    digits = (lower(lpad(hex(part), size, "0")) for part, size in ((high, 4), (low, 12)))
    return concat(col("id_prefix"), next(digits), lit("-"), next(digits))
