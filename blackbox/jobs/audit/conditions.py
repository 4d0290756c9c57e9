"""Conditions on a row of the table of statuses that several parts of the audit use."""

from __future__ import annotations

from functools import reduce
from operator import or_

from pyspark.sql import Column
from pyspark.sql.functions import coalesce, col, exists, greatest, lit, when


def is_known() -> Column:
    """Whether the journals still keep this offset of the request topic."""

    def holds(gap: Column) -> Column:
        return (col("offset") >= gap["start"]) & (col("offset") < gap["end"])

    return (col("offset") >= col("first")) & ~exists("gaps", holds)


def is_compacted_away() -> Column:
    """Whether the request topic is one that Kafka compacts, and has no record at this offset."""
    return is_true(col("compacted") & col("kind").isNull() & (col("offset") < col("end")))


def may_have_hidden_receipt() -> Column:
    """Whether a target has its message, and the receipt of that is perhaps not readable yet."""
    return is_true(col("receipts_hidden") & col("copies").isNotNull() & col("outcome").isNull())


def lateness() -> Column:
    """How long after its due time, or after it was requested if that is later, it was delivered, in ms."""
    return greatest(col("outcome_ms") - due_since(), lit(0))


def due_since() -> Column:
    """The time from which a request is late: its due time, or when it was written if that is later."""
    # A carried record was written by promotion: only the due time says whether it is late.
    asked_ms = when(col("carries").isNull(), col("timestamp_ms")).otherwise(lit(0))
    return greatest(col("due_ms"), asked_ms)


def is_true(condition: Column) -> Column:
    """The condition, with null as false."""
    return coalesce(condition, lit(False))


def any_of(*conditions: Column) -> Column:
    return reduce(or_, map(is_true, conditions))
