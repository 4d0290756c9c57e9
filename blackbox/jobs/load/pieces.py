"""Split the files of a load into pieces; equal content always gives equal pieces."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

KINDS = ("parquet", "csv", "jsonl")

# Progress is stored by the number of a piece: if pieces are cut in another way, LAYOUT in
# `piece_writer` must change.
PIECE_ROWS = 250_000
PIECE_BYTES = 32 << 20
LONGEST_LINE = 64 << 20
READ_BYTES = 1 << 20


class UnusableFile(Exception):
    """A file cannot be loaded as it is; the text names it and says why."""


class Piece(NamedTuple):
    """A part of a file that one task reads: rows of Parquet, whole lines of JSON, or a whole CSV.

    `start` and `end` are rows (Parquet) or bytes; `line` is the number of the first line.
    """

    path: str
    kind: str
    size: int
    mtime_ns: int
    start: int
    end: int
    line: int = 1


class SplitFile(NamedTuple):
    """The digest of a file's content, and its pieces in order; an empty file has none."""

    digest: str
    pieces: list[Piece]


def split(
    path: str, kind: str, on_bytes: Callable[[int], object] = lambda count: None
) -> SplitFile:
    """Read a file and split it into pieces, the same ones for equal content. Raises UnusableFile."""
    try:
        found = os.stat(path)
        whole = Piece(path, kind, found.st_size, found.st_mtime_ns, 0, found.st_size)
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            # A CSV stays whole: open quotes cannot be detected from the middle of a file.
            places = [whole]
            if kind == "jsonl":
                places = list(_cut_lines(whole, _seen(file, digest, on_bytes)))
            else:
                for _ in _seen(file, digest, on_bytes):
                    pass
        if kind == "parquet":
            places = _cut_rows(whole)
        # Digest, pieces and times must all be of one content.
        check_unchanged(whole)
    except (OSError, pa.ArrowException) as error:
        raise UnusableFile(f"{path}: {error}") from None
    return SplitFile(digest.hexdigest(), places if found.st_size else [])


def check_unchanged(piece: Piece) -> None:
    """Raise UnusableFile when the file has changed since it was split."""
    found = os.stat(piece.path)
    if (found.st_size, found.st_mtime_ns) != (piece.size, piece.mtime_ns):
        raise UnusableFile(
            f"{piece.path} was changed during the load; the rows that were already sent stay sent"
        )


def _seen(file: Any, digest: Any, on_bytes: Callable[[int], object]) -> Iterator[bytes]:
    while chunk := file.read(READ_BYTES):
        digest.update(chunk)
        yield chunk
        on_bytes(len(chunk))


def _cut_lines(whole: Piece, chunks: Iterator[bytes]) -> Iterator[Piece]:
    """Pieces of whole lines, each of at least 32 MiB except the last."""
    start, start_line, line_start, line, seen = 0, 1, 0, 1, 0
    for chunk in chunks:
        last = chunk.rfind(b"\n")
        if last >= 0:
            line_start = seen + last + 1
            line += chunk.count(b"\n")
            if line_start - start >= PIECE_BYTES:
                yield whole._replace(start=start, end=line_start, line=start_line)
                start, start_line = line_start, line
        seen += len(chunk)
        # Refused here: a task would read the whole line into memory.
        if seen - line_start > LONGEST_LINE:
            raise UnusableFile(
                f"{whole.path}: line {line} is longer than {LONGEST_LINE >> 20} MiB; JSON Lines "
                "has one JSON object per line, without an array around them"
            )
    if seen > start:
        yield whole._replace(start=start, end=seen, line=start_line)


def _cut_rows(whole: Piece) -> list[Piece]:
    with pq.ParquetFile(whole.path) as file:
        rows = file.metadata.num_rows
    return [
        whole._replace(start=start, end=min(start + PIECE_ROWS, rows))
        for start in range(0, rows, PIECE_ROWS)
    ]
