"""The files of a ledger's tables: how they are read and measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.functions import (
    bit_xor,
    col,
    count,
    date_from_unix_date,
    floor,
    greatest,
    least,
    lit,
    struct,
    xxhash64,
)
from pyspark.sql.functions import max as largest
from pyspark.sql.functions import min as smallest

from blackbox.jobs.ledger.files import Files
from blackbox.jobs.ledger.manifest import Last
from blackbox.records.request import Shard
from blackbox.spark.journal_tasks import OUTCOMES, RECORDS

SCHEMAS = {"requests": RECORDS, "outcomes": OUTCOMES}
POSITION = {"requests": ("offset", "timestamp_ms"), "outcomes": ("receipt", "at_ms")}
"""The columns with a row's offset in its journal, and with the time it was written."""

# Brackets in a path are not a pattern. The first option alone would read some files several times.
LITERAL_PATHS = {"__globPaths__": "false", "recursiveFileLookup": "true"}

DAY_MS = 86_400_000
# 9999-12-31, the latest day: a record's own timestamp may be anything.
LAST_DAY = 2_932_896


class Measured(NamedTuple):
    """The contents of a file: rows, the XOR of their hashes in hex, and the first and last row by shard."""

    rows: int
    checksum: str
    first: dict[Shard, int]
    last: dict[Shard, Last]


def rows(session: SparkSession, files: Files, table: str, paths: Sequence[str]) -> DataFrame:
    if not paths:
        return session.createDataFrame([], SCHEMAS[table])
    reader = session.read.schema(SCHEMAS[table]).options(**LITERAL_PATHS)
    return reader.parquet(*map(files.uri, paths))


def measure(
    session: SparkSession, files: Files, table: str, paths: Sequence[str]
) -> dict[str, Measured]:
    """Read files completely, and measure the contents of each."""
    if not paths:
        return {}
    frame = rows(session, files, table, paths)
    at, when = POSITION[table]
    by_shard = (
        frame.select("*", col("_metadata.file_path").alias("path"))
        .groupBy("path", "topic", "partition")
        .agg(
            count(lit(1)).alias("rows"),
            # XOR, so that neither the order of rows nor their division into files matters.
            bit_xor(xxhash64(*map(col, frame.columns))).alias("checksum"),
            smallest(at).alias("first"),
            largest(struct(at, when)).alias("last"),
        )
    )
    found: dict[str, Measured] = {}
    for one in by_shard.collect():
        path = "/".join(one["path"].rsplit("/", 4)[1:])
        before = found.get(path, Measured(0, "0", {}, {}))
        shard = Shard(one["topic"], one["partition"])
        found[path] = Measured(
            before.rows + one["rows"],
            f"{int(before.checksum, 16) ^ one['checksum'] & (1 << 64) - 1:016x}",
            before.first | {shard: one["first"]},
            before.last | {shard: Last(*one["last"])},
        )
    return found


def day_of(ms: str) -> Column:
    days = floor(col(ms) / lit(DAY_MS))
    return date_from_unix_date(least(greatest(days, lit(0)), lit(LAST_DAY)).cast("int"))
