"""How Spark runs an audit, depending on how many rows there are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from pyspark.sql import SparkSession

ROWS_A_TASK = 200_000
FEW_ROWS = 50_000


def tune(session: SparkSession, rows: int, ending: ExitStack) -> None:
    """Choose the settings for so many rows; `ending` restores them."""
    parts = max(session.sparkContext.defaultParallelism, rows // ROWS_A_TASK)
    chosen = {
        "spark.sql.shuffle.partitions": str(parts),
        # Requests and outcomes may be millions of rows: only joins with a hint are broadcast.
        "spark.sql.autoBroadcastJoinThreshold": "-1",
    }
    _set(session, chosen, ending)


def tune_for_few(session: SparkSession, rows: int, ending: ExitStack) -> None:
    """If there are few rows, do not plan again after each stage, nor compile: that would take longer than the work."""
    if rows < FEW_ROWS:
        chosen = {
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.adaptive.enabled": "false",
            "spark.sql.codegen.wholeStage": "false",
        }
        _set(session, chosen, ending)


def _set(session: SparkSession, chosen: Mapping[str, str], ending: ExitStack) -> None:
    for name, value in chosen.items():
        ending.callback(session.conf.set, name, str(session.conf.get(name)))
        session.conf.set(name, value)
