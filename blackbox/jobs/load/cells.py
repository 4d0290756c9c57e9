"""Convert Parquet cells to JSON values without loss."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from decimal import Decimal
from math import isfinite
from typing import Any
from uuid import UUID

import orjson
import pyarrow as pa


def to_json(value: Any) -> bytes:
    """The value as JSON. Raises orjson.JSONEncodeError, also for dates and times, which JSON does not have."""
    return orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATETIME)


def instants(file: Any) -> set[str]:
    """Columns of the old timestamp type INT96, which Spark writes: UTC, although the type does not say so."""
    found = (file.schema.column(n) for n in range(len(file.schema)))
    return {column.path for column in found if column.physical_type == "INT96"}


def plain_rows(batch: pa.RecordBatch, instants: set[str]) -> Iterator[dict[str, Any]]:
    names = batch.schema.names
    held = [
        _plain_column(name, column, name in instants)
        for name, column in zip(names, batch.columns, strict=True)
    ]
    for row in zip(*held, strict=True):
        cells = {name: cell for name, cell in zip(names, row, strict=True) if cell is not None}
        message = cells.get("message")
        # JSON holds no bytes.
        if type(message) is bytes:
            cells["message"] = b64encode(message).decode()
            cells.setdefault("encoding", "base64")
        yield cells


def _plain_column(name: str, column: pa.Array, is_instant: bool) -> list[Any]:
    kind = column.type
    if pa.types.is_timestamp(kind):
        # Without a time zone it is not an instant: as text, the parser refuses it.
        if kind.tz is None and not is_instant:
            return list(column.cast(pa.string()).to_pylist())
        to_a_ms = {"s": 1, "ms": 1, "us": 1_000, "ns": 1_000_000}[kind.unit]
        times = 1000 if kind.unit == "s" else 1
        instants = column.cast(pa.int64()).to_pylist()
        # Rounded up: a request must not be due before the time in the file.
        return [None if at is None else -(-at * times // to_a_ms) for at in instants]
    cells: list[Any] = column.to_pylist()
    meant = _meaning(kind)
    if meant is not None:
        cells = [None if cell is None else meant(cell) for cell in cells]
    # Every row of a struct has every field: null means that this request has no such header.
    if name == "headers" and pa.types.is_struct(kind):
        return [cell and {k: v for k, v in cell.items() if v is not None} for cell in cells]
    return cells


def _meaning(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """The function that converts a cell of this type to JSON without loss; None if none is needed."""
    if pa.types.is_floating(kind):
        return _number
    if pa.types.is_decimal(kind):
        return _digits
    if pa.types.is_map(kind):
        of = _meaning(kind.item_type) or _same
        return lambda cell: _object_of_pairs([(k, None if v is None else of(v)) for k, v in cell])
    if pa.types.is_struct(kind):
        parts = {part.name: _meaning(part.type) or _same for part in kind}
        return lambda cell: {k: None if v is None else parts[k](v) for k, v in cell.items()}
    if any(is_list(kind) for is_list in _LISTS):
        each = _meaning(kind.value_type) or _same
        return lambda cell: [None if v is None else each(v) for v in cell]
    return None


_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def _same(cell: Any) -> Any:
    return cell


def _number(cell: float) -> Any:
    # orjson writes NaN and infinities as null, which may be valid: the parser must refuse them.
    return cell if isfinite(cell) else orjson.Fragment(json.dumps(cell))


def _digits(cell: Decimal) -> Any:
    # A float would lose digits.
    return orjson.Fragment(format(cell, "f"))


def _object_of_pairs(pairs: list[tuple[Any, Any]]) -> Any:
    named = [(_name(key), cell) for key, cell in pairs]
    try:
        # A dict of all would drop repeated names, which the parser must detect.
        members = [to_json({name: cell})[1:-1] for name, cell in named]
    except orjson.JSONEncodeError:
        # Unconverted: the row is then refused, with its number, when it is written.
        return [{name: cell} for name, cell in named]
    return orjson.Fragment(b"{" + b",".join(members) + b"}")


def _name(key: Any) -> str | None:
    """The key as a name; None, which JSON rejects as a name, unless it is text, bytes, an integer or a UUID."""
    # Some writers store text as bytes. Those that are not UTF-8 become lone surrogates, which JSON rejects.
    if isinstance(key, bytes):
        return key.decode(errors="surrogateescape")
    return str(key) if type(key) in (str, int, UUID) else None
