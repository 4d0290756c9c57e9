"""Counts of an audit: by state, caller, target and hour, over time, and of lateness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql.functions import (
    array,
    col,
    count,
    explode,
    floor,
    greatest,
    lit,
    log10,
    struct,
    when,
)
from pyspark.sql.functions import grouping as is_summed
from pyspark.sql.functions import max as largest
from pyspark.sql.functions import min as smallest

from blackbox.jobs.audit.conditions import (
    is_compacted_away,
    is_known,
    lateness,
    may_have_hidden_receipt,
)
from blackbox.jobs.audit.request_statuses import STATES
from blackbox.spark.journals import SHARD

BUCKETS = 60
STEPS_A_DECADE = 40


class Series(NamedTuple):
    """Counts in buckets of equal width: `counts[0]` from `start_ms` on."""

    start_ms: int
    width_ms: int
    counts: list[int]


class LatenessCounts(NamedTuple):
    """The lateness of deliveries. `counts` is by step: ms + 1 grows tenfold in `STEPS_A_DECADE` steps."""

    p50_ms: int
    p99_ms: int
    longest_ms: int
    counts: Mapping[int, int]


def by_shard(judged: DataFrame) -> list[dict[str, Any]]:
    """Per shard: first and last times, and counts other than of states."""

    def counted(condition: Any) -> Any:
        return count(when(condition, lit(1)))

    def within(receipt: str) -> Any:
        return (col(receipt) >= col("receipts_from")) & (col(receipt) < col("receipts_to"))

    is_pending = col("state") == lit("pending")
    unread = (col("offset") >= col("requests_from")) & (col("offset") < col("requests_to"))
    unapplied = within("receipt") | within("again.receipt")
    is_cut = ~is_known() | is_compacted_away() | (col("state") == lit("unknown"))
    is_not_judged = is_cut | may_have_hidden_receipt()
    rows = judged.groupBy(SHARD).agg(
        smallest("timestamp_ms").alias("first_ms"),
        largest(greatest("timestamp_ms", "outcome_ms")).alias("last_ms"),
        smallest(when(is_pending, col("due_ms"))).alias("due_first_ms"),
        largest(when(is_pending, col("due_ms"))).alias("due_last_ms"),
        largest(when(col("outcome") == lit("delivered"), lateness())).alias("longest_ms"),
        counted(col("kind") == lit("cancel")).alias("cancels"),
        counted(is_pending & col("cold")).alias("cold"),
        counted(is_not_judged).alias("unknown"),
        counted(col("kind").isNotNull() & unread).alias("unread"),
        counted(unapplied).alias("unapplied"),
    )  # fmt: skip
    return [row.asDict() for row in rows.collect()]


def totals(rows: DataFrame) -> dict[str, Any]:
    """How many requests are in each state: in total, by caller, by target, and by due hour."""
    hour = (floor(col("due_ms") / lit(3_600_000)) * 3_600_000).alias("hour")
    parts = ("caller", "target", "hour")
    # One pass for all tables of the verdict.
    grouped = rows.select("state", "caller", "target", hour).groupingSets(
        [["state"], *(["state", part] for part in parts)], "state", *parts
    )
    # `grouping` tells the requests without a caller from the sum over all callers.
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


def series(rows: DataFrame, counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lateness by step, pending requests by due time, and requests and deliveries by time."""
    first, last = _extremes(counts, "first_ms", "last_ms")
    due_first, due_last = _extremes(counts, "due_first_ms", "due_last_ms")
    width = even_width_ms(last - first, BUCKETS)
    due_width = even_width_ms(due_last - due_first, BUCKETS)
    is_delivered = col("outcome") == lit("delivered")
    points = {
        # + 1, as most deliveries are 0 to a few ms late, and 0 has no logarithm.
        "late": when(is_delivered, floor(log10(lateness() + 1) * STEPS_A_DECADE)),
        "asked": floor((col("timestamp_ms") - first) / width),
        "delivered": when(is_delivered, floor((col("outcome_ms") - first) / width)),
        "due": when(col("state") == lit("pending"), floor((col("due_ms") - due_first) / due_width)),
    }
    # One pass for all plots: each request becomes up to four points.
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


def _lateness(counts: Mapping[int, int], longest_ms: int) -> LatenessCounts | None:
    if not counts:
        return None

    def at_share(share: float) -> int:
        wanted = share * sum(counts.values())
        reached = 0
        for step in sorted(counts):
            reached += counts[step]
            if reached >= wanted:
                break
        # The middle of the step, on the logarithmic scale.
        return min(longest_ms, round(10 ** ((step + 0.5) / STEPS_A_DECADE) - 1))

    return LatenessCounts(at_share(0.5), at_share(0.99), longest_ms, dict(sorted(counts.items())))
