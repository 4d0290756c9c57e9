"""How a restore runs its tasks on Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from blackbox.pipeline.failures import in_one_line
from blackbox.pipeline.tasks.ended import MARKS, Bitmaps, Nothing


class RestoreFailed(Exception):
    """A restore ended before its end. The indexes it did not finish are empty for every service."""


class Tasks:
    """Runs tasks that are told the numbers of their pieces. Raises RestoreFailed."""

    def __init__(self, session: SparkSession) -> None:
        # Tasks do the work, and the JVM sees few rows: to compile code for them takes longer.
        self._session = session.newSession()
        self._session.conf.set("spark.sql.codegen.wholeStage", "false")
        self._session.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")

    def warm_up(self) -> None:
        """Start a Python worker for each slot: the first tasks of a session take seconds."""
        slots = self._session.sparkContext.defaultParallelism
        collected(self.rows(Nothing(), MARKS, slots))

    def rows(self, task: Any, schema: str, count: int) -> DataFrame:
        """What `count` tasks tell, one piece each."""
        return self._session.range(0, count, 1, max(1, count)).mapInArrow(task, schema)

    def run(self, task: Any, schema: str, count: int) -> list[Any]:
        """The same, here."""
        return collected(self.rows(task, schema, count)) if count else []

    @contextmanager
    def shipped(self, bitmaps: Bitmaps) -> Iterator[Any]:
        """The bitmaps where the tasks run."""
        shipped = self._session.sparkContext.broadcast(bitmaps)
        try:
            yield shipped
        finally:
            shipped.destroy()


def collected(rows: DataFrame) -> list[Any]:
    """All rows. Raises RestoreFailed with the cause in one line."""
    try:
        return rows.collect()
    except (PySparkException, Py4JError) as failure:
        raise RestoreFailed(in_one_line(failure)) from failure
