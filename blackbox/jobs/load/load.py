"""Load requests from files into a request topic: validate every row, then send each exactly once."""

from __future__ import annotations

import glob
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from blackbox.config.settings import Settings
from blackbox.jobs.load.pieces import KINDS, Piece, UnusableFile, split
from blackbox.jobs.load.tasks import MOST_SHOWN, CheckReport, CheckTask, PieceToSend, SendTask, Sent
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.piece_writer import (
    PieceProgress,
    PieceProgressReader,
    commit_again,
    piece_name,
)
from blackbox.spark.job_failures import in_one_line
from blackbox.spark.spark_session import numbered
from blackbox.spark.task_io import REPORT, reports

LANE_ROWS_PER_S = 20_000
# How long another run may make no progress: a transaction that it left open has mostly timed out by then,
# and the next writer of the piece fences it anyway.
OTHER_RUN_SILENT_S = 25.0
LOOK_S = 0.5
MOST_WATCHED = 64
TRIES = 3
# Kafka forgets the progress of a piece 7 days after its own commit (offsets.retention.minutes), and
# finished pieces commit nothing more. So all are committed again when a run begins to send, and daily.
COMMIT_AGAIN_S = 86_400.0

KIND_OF_SUFFIX = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}

__all__ = ["BadRow", "Load", "LoadFile", "NotLoaded", "UnusableFile", "find_files", "read_files"]


class NotLoaded(Exception):
    """Sending stopped; rows already sent stay, and the same load continues where it stopped."""


class LoadFile(NamedTuple):
    """A file of a load; equal content with equal options has an equal fingerprint."""

    path: str
    kind: str
    size: int
    fingerprint: str
    pieces: list[Piece]


class BadRow(NamedTuple):
    """Why a row is refused. `number` is a line number, or in Parquet a row number, from 1."""

    path: str
    kind: str
    number: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """The result of validation: the rows of each piece, how many rows are bad, and the first of those."""

    rows: Mapping[str, int]
    bad: int
    first: list[BadRow]


def find_files(named: Iterable[str], kind: str | None = None) -> list[tuple[str, str]]:
    """The files that paths, folders and globs name, each once, with their kind.

    In folders, names that start with `_` or `.` are skipped. Raises UnusableFile.
    """
    found: dict[str, str] = {}
    for name in named:
        if "://" in name:
            raise UnusableFile(
                f"{name}: wanted: a local path; copy the files to this machine first"
            )
        paths = (
            [Path(name)]
            if Path(name).exists()
            else map(Path, sorted(glob.glob(name, recursive=True)))
        )
        inside = [one for path in paths for one in _files_in(path)]
        if not inside:
            raise UnusableFile(f"{name}: no such file, or a folder without files")
        for path in inside:
            suffix = path.suffix.lower()
            if kind is None and suffix not in KIND_OF_SUFFIX:
                known = ", ".join(KIND_OF_SUFFIX)
                raise UnusableFile(
                    f"{path}: unknown format; wanted: a name that ends with one of {known}, or "
                    f"--format {'|'.join(KINDS)}"
                )
            # Resolved: a file that two names or globs reach is loaded once.
            found.setdefault(str(path.resolve()), kind or KIND_OF_SUFFIX[suffix])
    return list(found.items())


def _files_in(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path] if path.is_file() else []
    return sorted(
        one
        for one in path.rglob("*")
        if one.is_file() and not any(p.startswith(("_", ".")) for p in one.relative_to(path).parts)
    )


def read_files(
    found: Sequence[tuple[str, str]],
    options: Sequence[str | None],
    on_bytes: Callable[[int], object] = lambda count: None,
) -> list[LoadFile]:
    """Read all files once, and compute each file's fingerprint from its kind, content and `options`.

    Raises UnusableFile, also when two files have the same content: their rows would be sent only once.
    """
    files: dict[str, LoadFile] = {}
    for path, kind in found:
        digest, pieces = split(path, kind, on_bytes)
        # Neither name nor path: a moved file is the same load, and a changed one is another.
        identity = orjson.dumps([kind, digest, *options])
        fingerprint = hashlib.sha256(identity).hexdigest()[:20]
        file = LoadFile(path, kind, sum(p.end - p.start for p in pieces), fingerprint, pieces)
        if pieces and fingerprint in files:
            raise UnusableFile(
                f"{path} has the same content as {files[fingerprint].path}, which is loaded only "
                "once; leave one of them out (--again NAME loads it once more)"
            )
        files[fingerprint] = file
    return list(files.values())


@dataclass(eq=False, repr=False)
class Load:
    """One load: files, their pieces, and how much of each piece is in the request topic."""

    settings: Settings
    access: KafkaAccess
    topic: str
    caller: str | None
    files: Sequence[LoadFile]

    def __post_init__(self) -> None:
        self._of: dict[str, tuple[LoadFile, Piece]] = {
            piece_name(self.access, file.fingerprint, number): (file, piece)
            for file in self.files
            for number, piece in enumerate(file.pieces)
        }
        self._progress = PieceProgressReader(self.access, self.topic)
        self.pieces_in: dict[str, PieceProgress] = self._progress.of(self._of)
        self._watched = dict(self.pieces_in)  # by `count_rows_in`, in another thread

    @property
    def rows_in(self) -> int:
        return sum(mark.rows for mark in self.pieces_in.values())

    @property
    def is_finished(self) -> bool:
        return not self._unfinished(self.pieces_in)

    def _unfinished(self, marks: Mapping[str, PieceProgress]) -> list[str]:
        done = {name for name, mark in marks.items() if mark.rows == mark.total}
        return [name for name in self._of if name not in done]

    def validate(self, session: SparkSession, most_bytes: int, *, whole: bool = False) -> LoadCheck:
        """Validate every row, or those of unfinished pieces. Raises UnusableFile, NotLoaded if Spark fails."""
        names = list(self._of) if whole else self._unfinished(self.pieces_in)
        pieces = tuple(self._of[name][1] for name in names)
        task = CheckTask(self.settings, self.topic, self.caller, most_bytes, pieces)
        rows = {name: mark.total for name, mark in self.pieces_in.items()}
        first: list[BadRow] = []
        bad = 0
        with_wrong_columns: set[str] = set()
        checked: list[CheckReport] = _reports(
            numbered(session, len(pieces)).mapInArrow(task, REPORT)
        )
        for name, found in zip(names, checked, strict=True):
            if found.problem is not None:
                raise UnusableFile(found.problem)
            rows[name] = found.rows
            file = self._of[name][0]
            if found.has_wrong_columns:
                # Counted once for each file, by whichever of its pieces is the first that is left.
                if file.path in with_wrong_columns:
                    continue
                with_wrong_columns.add(file.path)
            bad += found.bad
            if len(first) < MOST_SHOWN:
                first += [BadRow(file.path, file.kind, *one) for one in found.first]
        return LoadCheck(rows, bad, first[:MOST_SHOWN])

    def send(self, session: SparkSession, rows: Mapping[str, int], rate: int | None = None) -> None:
        """Send the rows that are not in the topic yet, at `rate` rows per second in total.

        If another run of the same load takes over pieces, wait while it makes progress. Raises
        UnusableFile and NotLoaded.
        """
        tries = 0
        until_s = 0.0
        while left := self._left(rows):
            if time.time() >= until_s:
                commit_again(self.access, self.topic, self.pieces_in)
                until_s = time.time() + COMMIT_AGAIN_S
            before = self.rows_in
            reports = self._send(session, left, rows, rate, until_s)
            problems = [report for report in reports if report.problem is not None]
            is_shared = any(problem.is_fenced for problem in problems)
            # Another run has transactions open most of the time: do not wait for their end.
            self._look(wait_for_commits=not is_shared)
            for problem in problems:
                if problem.is_final:
                    raise UnusableFile(problem.problem)
            if is_shared:
                self._wait_for_the_other(rows)
            # Only tries without any progress count: a large load may meet many short outages.
            tries = 0 if self.rows_in > before else tries + 1
            if tries == TRIES:
                raise NotLoaded(problems[0].problem if problems else "no more rows could be sent")

    def count_rows_in(self) -> int:
        """How many rows are in the topic, about. Safe to call from another thread than the one that sends."""
        # The first ones only: pieces are sent in this order, and each costs a client.
        self._watched |= self._progress.of(self._unfinished(self._watched)[:MOST_WATCHED])
        return sum(mark.rows for mark in self._watched.values())

    def _look(self, *, wait_for_commits: bool = False) -> None:
        left = self._unfinished(self.pieces_in)
        self.pieces_in |= self._progress.of(left, wait_for_commits=wait_for_commits)

    def _left(self, rows: Mapping[str, int]) -> list[str]:
        return [
            n for n in self._of if rows[n] > (self.pieces_in[n].rows if n in self.pieces_in else 0)
        ]

    def _send(
        self,
        session: SparkSession,
        names: list[str],
        rows: Mapping[str, int],
        rate: int | None,
        until_s: float,
    ) -> list[Sent]:
        parts = [PieceToSend(name, self._of[name][1], rows[name]) for name in names]
        count = len(parts)
        if rate is not None:
            slots = session.sparkContext.defaultParallelism
            # Few lanes: a lane without pieces would leave its share of the rate unused.
            count = max(1, min(count, slots, ceil(rate / LANE_ROWS_PER_S)))
        lanes = tuple(tuple(parts[lane::count]) for lane in range(count))
        lane_rate = None if rate is None else rate / count
        task = SendTask(self.access, self.topic, self.caller, lanes, lane_rate, until_s)
        return _reports(numbered(session, count).mapInArrow(task, REPORT))

    def _wait_for_the_other(self, rows: Mapping[str, int]) -> None:
        """Wait for another run that has some pieces, until all rows are in or none came for 25 s."""
        deadline = time.monotonic() + OTHER_RUN_SILENT_S
        while self._left(rows) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            before = self.rows_in
            self._look()
            if self.rows_in != before:
                deadline = time.monotonic() + OTHER_RUN_SILENT_S


def _reports(frame: DataFrame) -> list[Any]:
    """The reports of the tasks, in the order of their numbers. Raises NotLoaded when Spark fails."""
    try:
        return reports(frame.collect())
    except (PySparkException, Py4JError) as failure:
        raise NotLoaded(in_one_line(failure)) from None
