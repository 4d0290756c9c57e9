"""Input and output of tasks: they get numbers that stand for their work, and return rows or reports."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import pyarrow as pa

from blackbox.support import interpreter

# An object, pickled as Spark pickles tasks and rows.
REPORT = "report binary"

_TYPES = {
    "string": pa.string(),
    "int": pa.int32(),
    "long": pa.int64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "array<struct<key:string,value:binary>>": pa.list_(
        pa.struct([("key", pa.string()), ("value", pa.binary())])
    ),
}

# Once in each Python worker, which runs many tasks.
tune_once = cache(interpreter.tune)


def numbers(batches: Iterable[pa.RecordBatch]) -> Iterator[int]:
    """Begin a task, and return the numbers that it was given."""
    tune_once()
    return (number for some in batches for number in some.column("id").to_pylist())


def as_batches(
    found: Iterable[Sequence[tuple[Any, ...]]], columns: str
) -> Iterator[pa.RecordBatch]:
    """Rows of these columns, which are written as for Spark: `topic string, offset long`."""
    pairs = [column.split() for column in columns.split(", ")]
    schema = pa.schema([(name, _TYPES[kind]) for name, kind in pairs])
    for rows in found:
        if rows:
            held = zip(zip(*rows, strict=True), schema, strict=True)
            arrays = [pa.array(column, field.type) for column, field in held]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def as_reports(found: Iterable[object]) -> Iterator[pa.RecordBatch]:
    """Rows for the driver, which reads them with `reports`."""
    return as_batches(([(pickle.dumps(one),)] for one in found), REPORT)


def reports(rows: Iterable[Any]) -> list[Any]:
    return [pickle.loads(row.report) for row in rows]
