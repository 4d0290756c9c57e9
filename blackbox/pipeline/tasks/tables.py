"""The rows that tasks are given and return; one text says the columns, to Spark and to Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import pyarrow as pa

from blackbox import interpreter

_TYPES = {
    "string": pa.string(),
    "int": pa.int32(),
    "long": pa.int64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
}

tune_once = cache(interpreter.tune)


def arrow_schema(columns: str) -> pa.Schema:
    """The same as Spark's `topic string, offset long`."""
    pairs = (column.split() for column in columns.split(", "))
    return pa.schema([(name, _TYPES[kind]) for name, kind in pairs])


def batch(columns: Iterable[Any], schema: pa.Schema) -> pa.RecordBatch:
    """Rows from their columns."""
    arrays = [pa.array(held, field.type) for held, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def numbers(rows: Iterable[pa.RecordBatch]) -> Iterator[int]:
    """What a task is to do, as the numbers that it was given."""
    return (number for some in rows for number in some.column("id").to_pylist())
