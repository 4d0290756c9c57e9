"""Convert rows of files to request records."""

from __future__ import annotations

import csv
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate, islice
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from blackbox.jobs.load.cells import instants, plain_rows, to_json
from blackbox.jobs.load.pieces import LONGEST_LINE, Piece, UnusableFile
from blackbox.records.request import Headers, Reason

CALLER = "caller"
RECORD_KEY = "record_key"
# They belong to the record, not to the fields of the request.
OWN_COLUMNS = (CALLER, RECORD_KEY)

READ_ROWS = 4000

UNREADABLE = "unreadable"

_BLANKS = b" \t\r\n"
# As in JSON. Other spellings stay text, which the parser refuses.
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBERS = ("countdown", "at", "expires_after")
_TRUTH = {"true": True, "false": False}


class RowRecord(NamedTuple):
    key: str | None
    value: bytes
    headers: Headers


class BadValue(NamedTuple):
    """Why a row cannot be written at all."""

    reason: str
    detail: str


def columns(piece: Piece) -> list[str]:
    """The column names; none for JSON Lines, where each row has its own. Raises UnusableFile."""
    try:
        if piece.kind == "parquet":
            with pq.ParquetFile(piece.path) as file:
                return list(file.schema_arrow.names)
        if piece.kind == "csv":
            with _open_csv(piece) as file:
                return next(_cells(file), (1, []))[1]
    except (OSError, pa.ArrowException, _NoCsvError) as error:
        raise UnusableFile(f"{piece.path}: {error}") from None
    return []


def records(
    piece: Piece, caller: str | None, skip: int = 0
) -> Iterator[tuple[int, RowRecord | BadValue]]:
    """The record of each row after the first `skip`, in order, with its line or row number.

    `caller` is the caller of rows that name none. Raises UnusableFile.
    """
    headers = _caller_headers(caller)
    try:
        if piece.kind == "jsonl":
            for number, line in islice(_lines(piece), skip, None):
                yield number, _of_line(line, headers)
            return
        read = _csv_rows(piece, skip) if piece.kind == "csv" else _parquet_rows(piece, skip)
        for number, cells in read:
            yield number, cells if isinstance(cells, BadValue) else _of_cells(cells, headers)
    # OverflowError: a time in a struct, list or map is after the year 9999, where Python's end.
    except (OSError, pa.ArrowException, OverflowError) as error:
        raise UnusableFile(f"{piece.path}: {error}") from None


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """The non-blank lines, stripped, with their numbers."""
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        left = piece.end - piece.start
        number = piece.line
        while left > 0 and (line := file.readline()):
            left -= len(line)
            if stripped := line.strip(_BLANKS):
                yield number, stripped
            number += 1


def _of_line(line: bytes, headers: Headers) -> RowRecord | BadValue:
    """The line unchanged, except that OWN_COLUMNS move to the record."""
    # Invalid lines are returned as they are: the service's own parser refuses them, with a reason.
    try:
        asked = orjson.loads(line)
    except orjson.JSONDecodeError:
        return RowRecord(None, line, headers)
    if type(asked) is not dict:
        return RowRecord(None, line, headers)
    if CALLER not in asked and RECORD_KEY not in asked:
        return RowRecord(_text(asked.get("id")), line, headers)
    fields = _exactly(line, asked)
    if fields is None:
        return RowRecord(None, line, headers)
    own = {name: asked[name] for name in OWN_COLUMNS if name in asked}
    return _written({name: held for name, held in fields.items() if name not in own}, own, headers)


def _exactly(line: bytes, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The parsed line with numbers spelled as in the line; None for a repeated name or invalid JSON."""
    try:
        read = orjson.dumps(asked)
        # Written back unchanged, so no number lost a digit. The slower parser is for the others.
        if read == line or read.translate(None, _BLANKS) == line.translate(None, _BLANKS):
            return asked
        number = orjson.Fragment
        found: dict[str, Any] = json.loads(
            line, object_pairs_hook=_once, parse_int=number, parse_float=number
        )
        orjson.dumps(found)
    except (ValueError, TypeError, RecursionError):
        return None
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _of_cells(cells: dict[str, Any], headers: Headers) -> RowRecord | BadValue:
    own = {name: cells.pop(name) for name in OWN_COLUMNS if name in cells}
    return _written(cells, own, headers)


def _written(fields: dict[str, Any], own: dict[str, Any], headers: Headers) -> RowRecord | BadValue:
    try:
        value = to_json(fields)
        caller, record_key = own.get(CALLER), own.get(RECORD_KEY)
        if caller is not None and type(caller) is not str:
            return BadValue(Reason.BAD_HEADERS, f"caller is {_show(caller)}; give a string")
        if record_key is not None and type(record_key) is not str:
            return BadValue(Reason.BAD_KEY, f"record_key is {_show(record_key)}; give a string")
        # The id as key: a later cancel by this id then goes to the same partition.
        key = _text(fields.get("id")) or record_key or None
        if key:
            key.encode()  # raises for lone surrogates
        return RowRecord(key, value, _caller_headers(caller) if caller else headers)
    except (orjson.JSONEncodeError, UnicodeEncodeError) as error:
        names = [name for name, held in (fields | own).items() if not _is_writable(held)]
        of = f"column {names[0]!r}" if names else "the row"
        return BadValue(Reason.NOT_JSON, f"{of} cannot be written as JSON: {error}")


def _is_writable(held: Any) -> bool:
    try:
        to_json(held)
    except orjson.JSONEncodeError:
        return False
    return True


def _text(held: Any) -> str | None:
    return held if type(held) is str else None


def _show(held: Any) -> str:
    return "an object or array" if isinstance(held, dict | list) else repr(held)[:80]


@lru_cache(maxsize=4096)
def _caller_headers(caller: str | None) -> Headers:
    return [("CALLER_SERVICE", caller.encode())] if caller else []


class _NoCsvError(Exception):
    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"line {line}: {why}")
        self.line, self.why = line, why


def _open_csv(piece: Piece) -> Any:
    # Bytes that are not UTF-8 become lone surrogates. JSON rejects them, so the row is named.
    return open(piece.path, encoding="utf-8-sig", errors="surrogateescape", newline="")


def _cells(file: Any) -> Iterator[tuple[int, list[str]]]:
    """The non-blank rows of a CSV, each with the number of its first line."""
    # The default of 128 KiB is less than a message may have.
    csv.field_size_limit(LONGEST_LINE)
    reader = csv.reader(file, strict=True)
    line = 1
    try:
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise _NoCsvError(line, f"not valid CSV from here on: {error}") from None


def _csv_rows(piece: Piece, skip: int) -> Iterator[tuple[int, dict[str, Any] | BadValue]]:
    with _open_csv(piece) as file:
        rows = _cells(file)
        try:
            _, names = next(rows, (1, []))
            read = [_READ_TEXT.get(name, str) for name in names]
            for number, row in islice(rows, skip, None):
                if len(row) != len(names):
                    yield (
                        number,
                        BadValue(UNREADABLE, f"{len(row)} cells, but {len(names)} columns"),
                    )
                    continue
                # An empty cell means that the field is omitted.
                cells = zip(names, read, row, strict=True)
                yield number, {name: meant(text) for name, meant, text in cells if text}
        except _NoCsvError as error:
            yield error.line, BadValue(UNREADABLE, error.why)


def _number_of_text(text: str) -> Any:
    return orjson.Fragment(text) if _NUMBER.fullmatch(text) else text


def _object_of_text(text: str) -> Any:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return orjson.Fragment(text)


def _truth_of_text(text: str) -> Any:
    return _TRUTH.get(text, text)


_READ_TEXT: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(_NUMBERS, _number_of_text),
    "headers": _object_of_text,
    "cancel": _truth_of_text,
}


def _parquet_rows(piece: Piece, skip: int) -> Iterator[tuple[int, dict[str, Any]]]:
    first = piece.start + skip
    # As nanoseconds, INT96 wraps after 2262: a later instant would be in the past, and due at once.
    with pq.ParquetFile(piece.path, coerce_int96_timestamp_unit="us") as file:
        meta = file.metadata
        ends = list(accumulate(meta.row_group(n).num_rows for n in range(meta.num_row_groups)))
        from_group = bisect_right(ends, first)
        groups = [n for n in range(from_group, len(ends)) if n == 0 or ends[n - 1] < piece.end]
        at = ends[from_group - 1] if from_group else 0
        utc = instants(file)
        for batch in file.iter_batches(READ_ROWS, row_groups=groups) if groups else ():
            low, high = max(0, first - at), min(batch.num_rows, piece.end - at)
            if low < high:
                wanted = batch.slice(low, high - low)
                yield from enumerate(plain_rows(wanted, utc), at + low + 1)
            at += batch.num_rows
