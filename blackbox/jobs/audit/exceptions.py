"""The exceptions of an audit: what must not be, by kind, as conditions on the table of statuses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_

from pyspark.sql import Column, DataFrame
from pyspark.sql.functions import (
    array,
    array_compact,
    coalesce,
    col,
    concat,
    count,
    explode,
    lit,
    struct,
    timestamp_millis,
    when,
)
from pyspark.sql.functions import max as largest
from pyspark.sql.functions import min as smallest

from blackbox.jobs.audit.conditions import (
    any_of,
    due_since,
    is_compacted_away,
    is_known,
    is_true,
    lateness,
    may_have_hidden_receipt,
)
from blackbox.jobs.audit.positions import PositionFinding
from blackbox.jobs.audit.targets import TargetPartitions
from blackbox.spark.journals import PLACE

EXCEPTIONS = (
    "kind string, topic string, partition int, offset long, id string, caller string, detail string"
)

# A verdict is held in memory: other exceptions are only counted, and are in the tables.
MOST_NAMED = 10_000


def exceptions(
    statuses: DataFrame, now_ms: int, late_ms: int | None, there: TargetPartitions | None
) -> DataFrame:
    """One row per exception; more than `late_ms` late, at `now_ms` if still pending, is one (None: never).

    `there` are the targets that were read.
    """
    rules = _rules()
    if late_ms is not None:
        rules["late"] = _late(now_ms, late_ms)
    if there is not None:
        _add_target_rules(rules, there.unread)
    faults = array(
        *(
            when(broken, struct(lit(kind).alias("kind"), detail.alias("detail")))
            for kind, (broken, detail) in rules.items()
        )
    )
    rows = statuses.withColumn("fault", explode(array_compact(faults)))
    return rows.select("fault.kind", *PLACE, "id", "caller", "fault.detail")


def gone(outcomes: DataFrame) -> DataFrame:
    """One row per stretch of requests that, by a receipt, Kafka removed although they were needed."""
    # An owner that crashed, or rebuilds again, writes the same stretch again, perhaps longer.
    said = (
        outcomes.where(col("outcome") == lit("gone"))
        .groupBy(PLACE)
        .agg(largest("to_offset").alias("end"), smallest("receipt").alias("receipt"))
    )
    nothing = lit(None).cast("string")
    detail = _text(
        "the receipt at ", col("receipt"), " says that Kafka removed the requests ", col("offset"), " to ",
        col("end") - lit(1), " before they were read, or while some of them were pending: at most ",
        col("end") - col("offset"), " are lost",
    )  # fmt: skip
    return said.select(
        lit("gone").alias("kind"),
        *PLACE,
        nothing.alias("id"),
        nothing.alias("caller"),
        detail.alias("detail"),
    )


def named_and_counted(
    wrong: DataFrame, more: Sequence[PositionFinding]
) -> tuple[list[PositionFinding], dict[str, int]]:
    """The exceptions, all of `more` and at most `MOST_NAMED` others, and how many there are of each kind."""
    counted = wrong.groupBy("kind").agg(count(lit(1)).alias("found")).collect()
    by_kind = {row.kind: row.found for row in counted}
    for one in more:
        by_kind[one.kind] = by_kind.get(one.kind, 0) + 1
    found = [PositionFinding(*row) for row in wrong.limit(MOST_NAMED).collect()] if counted else []
    named = [*more, *sorted(found, key=lambda one: one[:4])]
    return named, dict(sorted(by_kind.items(), key=lambda item: (-item[1], item[0])))


def _pending_throughout() -> Column:
    # Applied before the positions were read first, and not ended when they were read again: changes
    # during the audit are not judged.
    return (
        col("kind").isin("request", "invalid")
        & (col("offset") < col("requests_low"))
        & (col("receipt").isNull() | (col("receipt") >= col("receipts_high")))
        & (col("ended_by").isNull() | (col("ended_by") >= col("requests_high")))
        & (col("state") != lit("unknown"))
    )


def _over_throughout() -> Column:
    # Over already when the positions were read first, so the index must not have it.
    had_outcome = col("receipt") < col("receipts_low")
    keeps_bit = is_true(col("keeps_cold_bit") & col("cold"))
    was_ended = ((col("ended_by") < col("requests_low")) & ~keeps_bit) | is_true(
        col("carried_by") < col("requests_low")
    )
    is_no_request = (
        (col("offset") < col("requests_low"))
        & (col("kind").isNull() | col("kind").isin("cancel", "void"))
        & ~is_compacted_away()
    )
    # Entries beyond the position are wrong, unless Redis was rolled back in between.
    not_read = (col("offset") >= col("requests_high")) & col("steady")
    return any_of(had_outcome, was_ended, is_no_request, not_read)


def _rules() -> dict[str, tuple[Column, Column]]:
    """Per kind of exception: the condition, and the detail text."""
    entry, payload, cold = is_true(col("entry")), is_true(col("payload")), is_true(col("cold"))
    gone = cold & (col("offset") < col("in_kafka_from"))
    return {
        "lost": (
            gone | (is_known() & _pending_throughout() & ~entry & ~cold),
            when(gone, lit("in the cold tier, but no longer in Kafka")).otherwise(
                _text(
                    "due ", timestamp_millis(col("due_ms")), " UTC: pending in the journals, "
                    "not in the index",
                )
            ),
        ),
        "orphan-entry": (is_known() & (entry | cold) & _over_throughout(), _why_orphan()),
        "no-payload": (is_known() & entry & ~payload, lit("it has an entry but no payload")),
        "orphan-payload": (~entry & payload, lit("it has a payload but no entry")),
        "duplicated": _duplicated(),
        "no-request": (
            is_known()
            & col("receipt").isNotNull()
            # Requests between the two ends were written during the audit, and not read.
            & ((col("offset") < col("end")) | (col("offset") >= col("end_later")))
            & (col("kind").isNull() | (col("kind") == lit("cancel")))
            & ~is_compacted_away(),
            _text("the receipt at ", col("receipt"), " says ", col("outcome"), _at("to_")),
        ),
        "early": (
            (col("outcome") == lit("delivered"))
            & (col("outcome_ms") < col("due_ms"))
            # A timestamp after the delivery is of a caller's clock that is ahead.
            & (col("timestamp_ms") <= col("outcome_ms")),
            _text("delivered ", col("due_ms") - col("outcome_ms"), " ms before it was due"),
        ),
    }  # fmt: skip


def _duplicated() -> tuple[Column, Column]:
    is_found = is_known() & any_of(
        col("outcomes") > lit(1), col("outcome_of").isNotNull(), col("replaced").isNotNull()
    )
    text = when(
        col("outcome_of").isNotNull(),
        _text(col("outcome"), ", and so was the request that it carries, at ", col("outcome_of")),
    ).when(
        col("outcomes") == lit(1),
        _text(
            col("outcome"), _at("to_"), ", although the request that it replaces, at ",
            col("replaced.offset"), ", was ", col("replaced.outcome"),
        ),
    )  # fmt: skip
    several = _text(
        col("outcomes"), " outcomes; first ", col("outcome"), _at("to_"),
        ", last ", col("again.outcome"), _at("again.to.to_"),
    )  # fmt: skip
    return is_found, text.otherwise(several)


def _late(now_ms: int, late_ms: int) -> tuple[Column, Column]:
    since = due_since()
    delivered = (col("outcome") == lit("delivered")) & (lateness() > late_ms)
    overdue = (col("state") == lit("pending")) & (lit(now_ms) - since > late_ms)
    by_ms = when(delivered, lateness()).otherwise(lit(now_ms) - since)
    what = when(delivered, lit("delivered ")).otherwise(lit("still pending "))
    return delivered | overdue, _text(what, by_ms, " ms after it was due")


def _add_target_rules(rules: dict[str, tuple[Column, Column]], unread: str | None) -> None:
    """Add the rules about what the target topics really hold; they extend some other rules."""
    several = col("copies") > lit(1)
    twice, said_twice = rules["duplicated"]
    copies = _text(
        "targets contain it ",
        col("copies"),
        " times: ",
        _place("one.at_"),
        " to ",
        _place("other.at_"),
    )
    rules["duplicated"] = (
        twice | (is_known() & several),
        when(several, copies).otherwise(said_twice),
    )
    early, said_early = rules["early"]
    early_in_target = col("early_ms") > lit(0)
    rules["early"] = (
        early | early_in_target,
        when(
            early_in_target, _text("in its target ", col("early_ms"), " ms before it was due")
        ).otherwise(said_early),
    )
    delivered = (col("outcome") == lit("delivered")) & (col("outcomes") == lit(1))
    same = reduce(
        and_, (col(f"one.at_{part}") == col(f"to_{part}") for part in ("topic", "partition", "offset"))
    )  # fmt: skip
    rules["not-there"] = _not_there(delivered & ~any_of(several, same), unread)
    # Its receipt may be among those that are no longer kept.
    has_receipt = (
        is_true(delivered & same)
        | (col("outcomes") > lit(1))
        | (
            col("receipts_complete_from_ms").isNotNull()
            & ((col("due_ms") < col("receipts_complete_from_ms")) | is_compacted_away())
        )
    )
    rules["unaccounted"] = (
        is_known() & (col("copies") == lit(1)) & ~is_true(has_receipt) & ~may_have_hidden_receipt(),
        _text(_place("one.at_"), " contains it, but no receipt says so"),
    )


def _not_there(elsewhere: Column, unread: str | None) -> tuple[Column, Column]:
    """`elsewhere`: a receipt says that it was delivered, and its message was not found at that place."""
    # Below these offsets, retention removed the message; beyond them, it may have come later.
    is_kept = (col("to_offset") >= col("kept_from")) & (col("to_offset") < col("kept_to"))
    may_be_compacted_away = col("may_lack") & col("copies").isNull()
    # Receipts that existed before the ends of the targets were read name messages below these ends.
    is_earlier = col("receipt") < col("receipts_to")
    is_beyond = is_earlier & (col("to_offset") >= col("written_to"))
    # Only targets that requests name are looked for; a receipt may name another topic.
    was_looked_for = (col("to_topic") == col("target")) & ~col("to_topic").eqNullSafe(lit(unread))
    is_gone = is_earlier & was_looked_for & col("kept_from").isNull()
    what = (
        when(is_gone, lit(", a topic or partition that does not exist any more"))
        .when(is_beyond, _text(", but this partition ends at ", col("written_to")))
        .otherwise(lit(", which has another message or none"))
    )
    is_missing = any_of(is_kept & ~is_true(may_be_compacted_away), is_beyond, is_gone)
    return elsewhere & is_missing, _text("its receipt says", _at("to_"), what)


def _why_orphan() -> Column:
    return (
        when(col("outcome").isNotNull(), _text("in the index, but ", col("outcome")))
        .when(col("kind").isNull(), lit("in the index, but there is no such request"))
        .when(col("kind") == lit("cancel"), lit("in the index, but its record is a cancel"))
        .when(col("state") == lit("unread"), lit("in the index, but beyond its position"))
        .when(
            col("carried_by").isNotNull(), _text("in the index, but carried by ", col("carried_by"))
        )
        .when(
            col("kind") == lit("void"),
            lit("in the index, but it carries a request that is not cold"),
        )
        .otherwise(_text("in the index, but ", col("state"), " by ", col("ended_by")))
    )


def _text(*parts: Column | str) -> Column:
    """The concatenated text; null parts are empty."""
    columns = [lit(part) if isinstance(part, str) else part.cast("string") for part in parts]
    return concat(*(coalesce(column, lit("")) for column in columns))


def _at(columns: str) -> Column:
    """` at orders/3@17`; null when there is no place."""
    return concat(lit(" at "), _place(columns))


def _place(columns: str) -> Column:
    """`orders/3@17`; the names of the columns begin with `columns`."""
    topic, partition, offset = (
        col(f"{columns}{part}").cast("string") for part in ("topic", "partition", "offset")
    )
    return concat(topic, lit("/"), partition, lit("@"), offset)
