"""What a load says of columns that it cannot load, also when an earlier run has sent a part of the file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blackbox.config.settings import load as read_settings
from blackbox.jobs.load import load as loads
from blackbox.jobs.load import pieces
from blackbox.jobs.load.load import Load, read_files
from blackbox.jobs.load.tasks import CheckReport, CheckTask
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.piece_writer import PieceProgress

PIECES, PIECE_ROWS = 3, 4


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of each piece, in their order, an earlier run has sent; tasks run in this process."""
    rows_in = [0] * PIECES

    class Reader:
        def __init__(self, access: KafkaAccess, topic: str) -> None: ...

        def of(self, names: Iterable[str]) -> dict[str, PieceProgress]:
            marks = [PieceProgress(rows, PIECE_ROWS) for rows in rows_in]
            return {name: mark for name, mark in zip(names, marks, strict=False) if mark.rows}

    def run(task: CheckTask, _: str) -> list[CheckReport]:
        return [task.check(piece) for piece in task.pieces]

    monkeypatch.setattr(pieces, "PIECE_ROWS", PIECE_ROWS)
    monkeypatch.setattr(loads, "PieceProgressReader", Reader)
    monkeypatch.setattr(loads, "numbered", lambda *_: SimpleNamespace(mapInArrow=run))
    monkeypatch.setattr(loads, "_reports", lambda found: found)
    return rows_in


def load_of(*paths: Path) -> Load:
    settings = read_settings(kafka_bootstrap_servers="127.0.0.1:1", request_topics="TB:countdown")
    access = KafkaAccess("127.0.0.1:1", "blackbox")
    files = read_files([(str(path), "parquet") for path in paths], ())
    return Load(settings, access, "TB", None, files)


def parquet(path: Path, **columns: Any) -> Path:
    rows = PIECES * PIECE_ROWS
    held = {name: [value] * rows for name, value in columns.items()}
    pq.write_table(pa.table({"topic": ["orders"] * rows, **held}), path)
    return path


@pytest.mark.parametrize(
    "rows_in", [[0, 0, 0], [4, 0, 0], [4, 2, 0], [4, 4, 1]], ids=lambda rows: f"{rows} sent"
)
def test_a_column_that_cannot_be_loaded_is_reported_once_by_the_pieces_that_are_left(
    progress: list[int], tmp_path: Path, rows_in: list[int]
) -> None:
    progress[:] = rows_in
    path = parquet(tmp_path / "a.parquet", message="m", countdown=5, nonsense=1)

    found = load_of(path).validate(None, 1_000_000)  # type: ignore[arg-type]

    assert found.bad == 1
    [bad] = found.first
    assert (bad.path, bad.number, bad.reason) == (str(path), 1, "unknown-field")
    assert "nonsense" in bad.detail


def test_wrong_columns_are_reported_for_each_file(progress: list[int], tmp_path: Path) -> None:
    paths = [
        parquet(tmp_path / f"{name}.parquet", message="m", countdown=5, **{name: 1, "other": 2})
        for name in "ab"
    ]

    found = load_of(*paths).validate(None, 1_000_000)  # type: ignore[arg-type]

    assert found.bad == 4
    assert [bad.path for bad in found.first] == [str(path) for path in paths for _ in range(2)]


def test_bad_rows_of_several_pieces_of_a_file_are_all_counted(
    progress: list[int], tmp_path: Path
) -> None:
    progress[0] = PIECE_ROWS
    path = parquet(tmp_path / "a.parquet", message="m", countdown="soon")

    found = load_of(path).validate(None, 1_000_000)  # type: ignore[arg-type]

    assert found.bad == 2 * PIECE_ROWS
    assert [bad.number for bad in found.first] == list(range(5, 13))
