"""Replacements by id: those that came too late, and those that were delivered beside what they replace."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql.functions import col, lit, struct
from pyspark.sql.functions import min as smallest

from blackbox.spark.journals import PLACE, SHARD

REPLACED = "struct<offset: long, outcome: string>"
"""The record of a replaced request that has an outcome."""


def too_late(by_id: DataFrame, first_outcomes: DataFrame, did_not_count: DataFrame) -> DataFrame:
    """The replacements that end nothing, because they came too late."""
    replacing = by_id.where(col("ended_as") == lit("request"))
    had_ended = replacing.join(first_outcomes, PLACE, "left_semi").select(
        *SHARD, col("ended_by").alias("offset")
    )
    # For a replacement that it found too late, the service notes this first, and writes `invalid`
    # with the dead letter.
    said_invalid = first_outcomes.where(col("outcome") == lit("invalid")).select(PLACE)
    own = replacing.select(*SHARD, col("ended_by").alias("offset"))
    own = own.join(said_invalid.union(did_not_count), PLACE, "left_semi")
    return had_ended.unionByName(own).distinct()


def delivered_as_well(by_id: DataFrame, asked: DataFrame, first_outcomes: DataFrame) -> DataFrame:
    """The records of delivered replacements whose replaced request has an outcome, too: see REPLACED."""
    replacing = by_id.where(col("ended_as") == lit("request")).select(
        *SHARD, col("offset").alias("named"), col("ended_by").alias("replacement")
    )
    carried = asked.where(col("origin").isNotNull())

    def outcomes_of(request: str) -> DataFrame:
        own = replacing.select(*SHARD, request, col(request).alias("offset"))
        # Promotion writes a request again: then the outcome is that of a carried record.
        later = carried.select(*SHARD, col("origin").alias(request), "offset")
        later = later.join(own.select(*SHARD, request), [*SHARD, request], "left_semi")
        return own.unionByName(later).distinct().join(first_outcomes, PLACE)

    replaced = outcomes_of("named").select(
        *SHARD, "named", struct("offset", "outcome").alias("replaced")
    )
    delivered = outcomes_of("replacement").where(col("outcome") == lit("delivered"))
    both = replacing.join(replaced, [*SHARD, "named"]).join(
        delivered.select(*PLACE, "replacement"), [*SHARD, "replacement"]
    )
    return both.groupBy(PLACE).agg(smallest("replaced").alias("replaced"))
