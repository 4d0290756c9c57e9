"""Rows of files as records: exact, numbered, and the same from any starting point."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blackbox.cli.terminal import printable
from blackbox.formats import Options, make_format
from blackbox.jobs.load import pieces, rows
from blackbox.jobs.load.pieces import KINDS, UnusableFile, split
from blackbox.jobs.load.rows import BadValue, RowRecord, records
from blackbox.records.request import Invalid, Reason, Record

DUE = datetime(2027, 1, 1, tzinfo=UTC)
DUE_MS = 1798761600000
UUIDS = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([UUID(int=5).bytes], pa.binary(16)))


def read(
    path: Path, kind: str, caller: str | None = None
) -> list[tuple[int, RowRecord | BadValue]]:
    return [row for piece in split(str(path), kind).pieces for row in records(piece, caller)]


def only(path: Path, kind: str, caller: str | None = None) -> RowRecord:
    [(_, row)] = read(path, kind, caller)
    assert isinstance(row, RowRecord), row
    return row


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return tmp_path / "a.jsonl"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "a.csv"


def parquet(folder: Path, columns: dict[str, Any], **options: Any) -> Path:
    path = folder / "a.parquet"
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_a_line_of_json_is_the_record_unchanged(lines: Path) -> None:
    line = b'{ "topic":"o", "message": {"n": 12.10, "big": 123456789012345678901234567890} }'
    lines.write_bytes(b"  " + line + b" \r\n")

    assert only(lines, "jsonl") == RowRecord(None, line, [])


def test_caller_and_record_key_leave_the_line_and_numbers_stay_exact(lines: Path) -> None:
    lines.write_bytes(
        b'{"topic": "o", "message": {"n": 12.10, "e": 1E-400}, "caller": "shop", "record_key": "k"}'
    )

    assert only(lines, "jsonl", "other") == RowRecord(
        "k", b'{"topic":"o","message":{"n":12.10,"e":1E-400}}', [("CALLER_SERVICE", b"shop")]
    )


def test_the_record_key_is_the_id(lines: Path) -> None:
    lines.write_bytes(b'{"topic": "o", "message": 1, "id": "r-1", "record_key": "k"}')

    assert only(lines, "jsonl", "shop") == RowRecord(
        "r-1", b'{"topic":"o","message":1,"id":"r-1"}', [("CALLER_SERVICE", b"shop")]
    )


@pytest.mark.parametrize(
    "line",
    [
        b'{"topic": "o", "topic": "p", "caller": "x"}',
        b'{"caller": "x", "n": NaN}',
        b'["topic"]',
        b"\xff",
        b'{"caller": "x", "a": ' + b"[" * 300 + b"]" * 300 + b"}",
    ],
)
def test_a_line_that_cannot_be_split_is_passed_to_the_format_unchanged(
    line: bytes, lines: Path
) -> None:
    lines.write_bytes(line)

    assert only(lines, "jsonl").value == line


def test_a_caller_and_a_record_key_are_text(lines: Path) -> None:
    lines.write_bytes(b'{"caller": 7}\n{"record_key": {"a": 1}}\n')

    assert [row[0] for _, row in read(lines, "jsonl")] == ["bad-headers", "bad-key"]


def test_the_pieces_of_a_file_of_lines_contain_every_line_with_its_number(
    lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [b'{"n": %d}' % n + b" " * (n % 7) if n % 5 else b"" for n in range(1, 200)]
    lines.write_bytes(b"\n".join(held))
    whole = read(lines, "jsonl")
    assert [number for number, _ in whole] == [n for n in range(1, 200) if n % 5]
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)
    monkeypatch.setattr(pieces, "READ_BYTES", 16)

    found = split(str(lines), "jsonl").pieces

    assert len(found) > 10
    assert [piece.start for piece in found[1:]] == [piece.end for piece in found[:-1]]
    assert read(lines, "jsonl") == whole


def test_the_pieces_of_a_parquet_file_contain_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path, {"message": [str(n) for n in range(100)]}, row_group_size=13)
    whole = read(path, "parquet")
    assert [number for number, _ in whole] == list(range(1, 101))
    monkeypatch.setattr(pieces, "PIECE_ROWS", 17)
    monkeypatch.setattr(rows, "READ_ROWS", 5)

    assert len(split(str(path), "parquet").pieces) == 6
    assert read(path, "parquet") == whole


@pytest.mark.parametrize("skip", [0, 1, 12, 13, 14, 29, 30, 31])
@pytest.mark.parametrize("kind", KINDS)
def test_a_read_can_start_after_any_row(kind: str, skip: int, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet(tmp_path, {"message": [str(n) for n in range(30)]}, row_group_size=13)
    elif kind == "csv":
        path.write_text("message\n" + "\n".join(f'"{n}\n"' for n in range(30)))
    else:
        path.write_text("\n\n".join(f'{{"message": {n}}}' for n in range(30)))
    [piece] = split(str(path), kind).pieces

    assert list(records(piece, None, skip)) == list(records(piece, None))[skip:]


def write_csv(path: Path, *written: Sequence[str]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(written)
    return path


def test_csv_cells_are_written_as_their_fields_require(table: Path) -> None:
    names = ["topic", "message", "countdown", "at", "id", "headers", "cancel", "expires_after"]
    write_csv(
        table,
        names,
        ["o", "17", "1.50", "", "7", '{"a": "b"}', "", "1e2"],
        ["", "", "soon", "2027-01-01T00:00:00Z", "", '{"a": "b"}, "topic": "p"', "true", "007"],
    )

    assert [row[1] for _, row in read(table, "csv")] == [
        b'{"topic":"o","message":"17","countdown":1.50,"id":"7","headers":{"a": "b"},'
        b'"expires_after":1e2}',
        b'{"countdown":"soon","at":"2027-01-01T00:00:00Z",'
        b'"headers":"{\\"a\\": \\"b\\"}, \\"topic\\": \\"p\\"","cancel":true,"expires_after":"007"}',
    ]


def test_a_row_of_csv_is_named_by_its_first_line(table: Path) -> None:
    table.write_bytes(
        b'\xef\xbb\xbftopic,message\r\no,"a\nb\n"\r\n\r\no\r\no,\xff\r\no,last\r\no,"open\n'
    )

    found = read(table, "csv")

    assert [number for number, _ in found] == [2, 6, 7, 8, 9]
    assert found[1][1] == BadValue("unreadable", "1 cells, but 2 columns")
    assert isinstance(found[2][1], BadValue)
    assert found[2][1].detail.startswith("column 'message' cannot be written as JSON")
    assert found[3][1] == RowRecord(None, b'{"topic":"o","message":"last"}', [])
    assert isinstance(found[4][1], BadValue)
    assert found[4][1].detail.startswith("not valid CSV from here on")


@pytest.mark.parametrize(
    ("column", "json_text"),
    [
        (pa.array([17]), "17"),
        (pa.array([1.5]), "1.5"),
        (pa.array([float("nan")]), "NaN"),
        (pa.array([float("-inf")]), "-Infinity"),
        (pa.array([Decimal("12.10")]), "12.10"),
        (pa.array([True]), "true"),
        (pa.array([""]), '""'),
        (pa.array(["x"]).dictionary_encode(), '"x"'),
        (pa.array([b"hi"]), '"aGk=","encoding":"base64"'),
        (pa.array([{"a": [1.0, None, float("inf")], "b": None}]), '{"a":[1.0,null,Infinity],"b":null}'),
        (pa.array([[("a", "b"), ("a", "c")]], pa.map_(pa.string(), pa.string())), '{"a":"b","a":"c"}'),
        (pa.array([[("é".encode(), 1)]], pa.map_(pa.binary(), pa.int64())), '{"é":1}'),
        (pa.array([[(-7, "v")]], pa.map_(pa.int32(), pa.string())), '{"-7":"v"}'),
        (pa.MapArray.from_arrays(pa.array([0, 1], pa.int32()), UUIDS, pa.array(["v"])), f'{{"{UUID(int=5)}":"v"}}'),
        (pa.array([{"a": [(b"k", "v")]}], pa.struct({"a": pa.map_(pa.binary(), pa.string())})), '{"a":{"k":"v"}}'),
    ],
)  # fmt: skip
def test_a_cell_of_parquet_is_json_without_a_change(
    column: pa.Array, json_text: str, tmp_path: Path
) -> None:
    path = parquet(tmp_path, {"message": column, "key": pa.array([None], pa.string())})

    assert only(path, "parquet").value.decode() == f'{{"message":{json_text}}}'


@pytest.mark.parametrize(
    ("column", "options", "at"),
    [
        (pa.array([DUE]), {}, DUE_MS),
        (pa.array([DUE_MS * 10**6 + 1], pa.timestamp("ns", "Europe/Paris")), {}, DUE_MS + 1),
        (pa.array([DUE_MS], pa.timestamp("ms", "UTC")), {}, DUE_MS),
        (pa.array([DUE_MS], pa.timestamp("ms")), {}, "2027-01-01 00:00:00.000"),
        (pa.array([DUE_MS], pa.timestamp("ms")), {"use_deprecated_int96_timestamps": True}, DUE_MS),
    ],
)
def test_an_instant_of_parquet_is_the_next_whole_millisecond(
    column: pa.Array, options: dict[str, Any], at: object, tmp_path: Path
) -> None:
    path = parquet(tmp_path, {"at": column}, **options)

    assert json.loads(only(path, "parquet").value) == {"at": at}


def test_an_instant_of_int96_after_2262_is_refused_as_too_far(tmp_path: Path) -> None:
    last_day = datetime(9999, 12, 31, 23, 59, 59, 999999)
    path = parquet(
        tmp_path,
        {"topic": ["orders"], "message": ["m"], "at": pa.array([last_day], pa.timestamp("us"))},
        use_deprecated_int96_timestamps=True,
    )

    row = only(path, "parquet")

    assert json.loads(row.value)["at"] == 253402300800000
    parse = make_format("countdown", Options(10**7, lambda _: False)).parse
    refused = parse(Record(0, DUE_MS, None, row.value, []), DUE_MS)
    assert isinstance(refused, Invalid)
    assert refused.reason is Reason.TOO_FAR


@pytest.mark.parametrize("is_int96", [True, False])
def test_a_time_after_the_year_9999_inside_a_struct_makes_the_file_unusable(
    is_int96: bool, tmp_path: Path
) -> None:
    times = pa.array([DUE_MS * 10**3 * 200], pa.timestamp("us"))
    column = pa.StructArray.from_arrays([times], ["when"])
    path = parquet(tmp_path, {"message": column}, use_deprecated_int96_timestamps=is_int96)

    with pytest.raises(UnusableFile, match=f"{path}: date value out of range"):
        read(path, "parquet")


def test_a_null_in_a_struct_of_headers_is_not_a_header(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"headers": pa.array([{"a": "x", "b": None}])})

    assert json.loads(only(path, "parquet").value) == {"headers": {"a": "x"}}


MAPS_WITHOUT_JSON = [
    ([(b"\xff", "v")], pa.map_(pa.binary(), pa.string())),
    ([("k", b"v")], pa.map_(pa.string(), pa.binary())),
    # A dict would have only the last of them, which is valid.
    ([("k", b"v"), ("k", None)], pa.map_(pa.string(), pa.binary())),
    ([("k", [("k", b"v")])], pa.map_(pa.string(), pa.map_(pa.string(), pa.binary()))),
    ([("k", datetime(2027, 1, 1))], pa.map_(pa.string(), pa.timestamp("us"))),
    ([("k", DUE)], pa.map_(pa.string(), pa.timestamp("us", "UTC"))),
]


@pytest.mark.parametrize("column", ["message", "headers"])
@pytest.mark.parametrize(("cell", "kind"), MAPS_WITHOUT_JSON)
def test_a_map_with_bytes_or_times_is_a_bad_row_as_a_struct_is(
    column: str, cell: list[Any], kind: pa.DataType, tmp_path: Path
) -> None:
    path = parquet(tmp_path, {column: pa.array([[], cell, []], kind)})

    [(_, before), (number, row), (_, after)] = read(path, "parquet")

    assert number == 2
    assert isinstance(row, BadValue)
    assert row.detail.startswith(f"column {column!r} cannot be written as JSON")
    assert before == after == RowRecord(None, f'{{"{column}":{{}}}}'.encode(), [])


@pytest.mark.parametrize("column", ["message", "headers"])
@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (True, pa.bool_()),
        (1.5, pa.float64()),
        (Decimal("12.10"), pa.decimal128(4, 2)),
        (DUE, pa.timestamp("us", "UTC")),
        (datetime(2027, 1, 1), pa.timestamp("us")),
        (DUE.date(), pa.date32()),
        ({"a": "b"}, pa.struct({"a": pa.string()})),
    ],
)
@pytest.mark.parametrize("is_inner", [False, True])
def test_a_map_with_keys_that_json_cannot_have_is_a_bad_row(
    column: str, key: Any, kind: pa.DataType, is_inner: bool, tmp_path: Path
) -> None:
    cell: list[Any] = [(key, "v")]
    kind = pa.map_(kind, pa.string())
    if is_inner:
        cell, kind = [("k", cell)], pa.map_(pa.string(), kind)
    path = parquet(tmp_path, {column: pa.array([[], cell, []], kind)})

    [(_, before), (number, row), (_, after)] = read(path, "parquet")

    assert number == 2
    assert isinstance(row, BadValue)
    assert row.detail.startswith(f"column {column!r} cannot be written as JSON")
    assert before == after == RowRecord(None, f'{{"{column}":{{}}}}'.encode(), [])


def test_bytes_in_a_text_column_are_a_bad_row(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"key": pa.array([b"k"])})

    [(number, row)] = read(path, "parquet")

    assert number == 1
    assert isinstance(row, BadValue)
    assert row.detail.startswith("column 'key' cannot be written as JSON")


def test_the_digest_of_a_file_depends_on_its_content_only(tmp_path: Path) -> None:
    first, copy, other = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    first.write_bytes(b"{}\n")
    copy.write_bytes(b"{}\n")
    other.write_bytes(b"{} \n")
    os.utime(other, ns=(first.stat().st_atime_ns, first.stat().st_mtime_ns))

    digests = [split(str(path), "jsonl").digest for path in (first, copy, other)]

    assert digests[0] == digests[1] != digests[2]


def test_an_empty_file_has_no_pieces_and_is_not_valid_parquet(tmp_path: Path) -> None:
    empty = tmp_path / "a"
    empty.write_bytes(b"")

    assert split(str(empty), "jsonl").pieces == split(str(empty), "csv").pieces == []
    with pytest.raises(UnusableFile, match=str(empty)):
        split(str(empty), "parquet")


def test_an_endless_line_is_refused_before_it_is_read(
    lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LONGEST_LINE", 1 << 20)
    lines.write_bytes(b"{}\n[" + b"1," * (1 << 20))

    with pytest.raises(UnusableFile, match="line 2 is longer than 1 MiB"):
        split(str(lines), "jsonl")


def test_printed_text_contains_no_terminal_commands() -> None:
    told = printable("a\x1b[31m\r\nb\u202e\udcff" + "x" * 1000)

    assert told.startswith(r"a\x1b[31m\r\nb\u202e\udcff" + "x")
    assert len(told) < 450
