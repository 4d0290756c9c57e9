"""Spark tasks of a load: validate the rows of pieces, and send them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from blackbox.config.settings import Settings
from blackbox.config.wiring import formats
from blackbox.jobs.load.pieces import Piece, UnusableFile, check_unchanged
from blackbox.jobs.load.rows import OWN_COLUMNS, BadValue, RowRecord, columns, records
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.piece_writer import PieceWriter, record_bytes
from blackbox.records.errors import Fenced, RecoveryRequired
from blackbox.records.request import Invalid, Reason, Record
from blackbox.spark.task_io import as_reports, numbers
from blackbox.support import logs

MOST_SHOWN = 20
TRANSACTION_ROWS = 20_000
TRANSACTION_BYTES = 32 << 20
# A load with a low rate commits this often, and waits between transactions: an open one hides the
# records of all callers behind it.
TRANSACTION_S = 1.0


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of validating a piece: its rows, how many are bad, and the first of those.

    A bad row is its number, a reason word and a detail. `problem` says why the piece could not be read.
    `has_wrong_columns`: the bad ones are columns of the file, which each of its pieces reports.
    """

    rows: int = 0
    bad: int = 0
    first: list[tuple[int, str, str]] = field(default_factory=list)
    problem: str | None = None
    has_wrong_columns: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of sending a piece: what stopped it, if anything; `is_final`: a retry would fail too."""

    problem: str | None = None
    is_fenced: bool = False
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class CheckTask:
    """Validates, as the service would, all rows of the pieces whose numbers it receives."""

    settings: Settings
    topic: str
    caller: str | None
    most_bytes: int
    pieces: tuple[Piece, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        logs.disable()
        return as_reports(self.check(self.pieces[number]) for number in numbers(batches))

    def check(self, piece: Piece) -> CheckReport:
        try:
            check_unchanged(piece)
            parse = formats(self.settings)[self.topic].parse
            wrong = list(_wrong_columns(columns(piece), parse))
            if wrong:
                return CheckReport(0, len(wrong), wrong[:MOST_SHOWN], has_wrong_columns=True)
            return self._check_rows(piece, parse)
        except (UnusableFile, OSError) as error:
            return CheckReport(problem=str(error))

    def _check_rows(self, piece: Piece, parse: Any) -> CheckReport:
        rows = bad = 0
        first: list[tuple[int, str, str]] = []
        now_ms = time.time_ns() // 1_000_000
        for number, row in records(piece, self.caller):
            rows += 1
            fault = row if isinstance(row, BadValue) else self._fault(row, parse, now_ms)
            if fault is not None:
                bad += 1
                if len(first) < MOST_SHOWN:
                    first.append((number, str(fault.reason), fault.detail))
        return CheckReport(rows, bad, first)

    def _fault(self, row: RowRecord, parse: Any, now_ms: int) -> BadValue | Invalid | None:
        _, value, headers = row
        asked = parse(Record(0, now_ms, None, value, headers), now_ms)
        if isinstance(asked, Invalid):
            return asked
        size = record_bytes(*row)
        if size > self.most_bytes:
            detail = (
                f"the record has {size} bytes, but {self.topic} accepts at most {self.most_bytes} "
                "(max.message.bytes of the topic, message.max.bytes of the client)"
            )
            return BadValue(Reason.TOO_LARGE, detail)
        return None


class PieceToSend(NamedTuple):
    """A piece to be sent, the name under which its progress is stored, and its `total` of rows."""

    name: str
    piece: Piece
    total: int


@dataclass(frozen=True, slots=True)
class SendTask:
    """Sends its lanes, the pieces of a lane one after the other, until the time `until_s`, in seconds since 1970.

    `rate` is rows per second of one lane.
    """

    access: KafkaAccess
    topic: str
    caller: str | None
    lanes: tuple[tuple[PieceToSend, ...], ...]
    rate: float | None
    until_s: float

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        logs.disable()
        send_rate = SendRate(self.rate)
        return as_reports(
            self.send(part, send_rate) for lane in numbers(batches) for part in self.lanes[lane]
        )

    def send(self, part: PieceToSend, send_rate: SendRate) -> Sent:
        if time.time() >= self.until_s:
            return Sent()
        writer = PieceWriter(self.access, self.topic, part.name, part.total)
        try:
            self._send_rows(part.piece, part.total, writer, send_rate)
        except RecoveryRequired as reason:
            return Sent(str(reason), is_fenced=isinstance(reason, Fenced))
        except (UnusableFile, OSError) as error:
            return Sent(str(error), is_final=True)
        finally:
            writer.close()
        return Sent()

    def _send_rows(
        self, piece: Piece, total: int, writer: PieceWriter, send_rate: SendRate
    ) -> None:
        # Fences an earlier task and ends its open transaction before it reads the progress.
        rows_in = writer.open()
        for rows in _transactions(records(piece, self.caller, skip=rows_in), send_rate.rows):
            # Rows of another content than the validated one must not be sent.
            check_unchanged(piece)
            if time.time() >= self.until_s:
                return
            send_rate.wait_for(len(rows))
            rows_in += len(rows)
            writer.send(rows, rows_in)
        if rows_in != total:
            raise UnusableFile(
                f"{piece.path}: {total} rows were validated, but {rows_in} were sent"
            )


class SendRate:
    """Limits sending to `rate` rows per second; no limit if None."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._next_s = time.monotonic()
        self.rows = TRANSACTION_ROWS
        """The most rows to send in one transaction."""
        if rate is not None:
            self.rows = min(TRANSACTION_ROWS, max(1, int(rate * TRANSACTION_S)))

    def wait_for(self, rows: int) -> None:
        """Wait until the next `rows` may be sent."""
        if self._rate is None:
            return
        now_s = time.monotonic()
        time.sleep(max(0.0, self._next_s - now_s))
        # From now at the earliest: idle time is not made up for by a burst.
        self._next_s = max(self._next_s, now_s) + rows / self._rate


def _transactions(
    rows: Iterator[tuple[int, RowRecord | BadValue]], most_rows: int
) -> Iterator[list[RowRecord]]:
    gathered: list[RowRecord] = []
    size = 0
    for number, row in rows:
        if isinstance(row, BadValue):
            raise UnusableFile(f"line or row {number} was valid and is now invalid: {row.detail}")
        gathered.append(row)
        size += len(row.value)
        if len(gathered) >= most_rows or size >= TRANSACTION_BYTES:
            yield gathered
            gathered, size = [], 0
    if gathered:
        yield gathered


def _wrong_columns(names: list[str], parse: Any) -> Iterator[tuple[int, str, str]]:
    """The columns that cannot be loaded."""
    for place, name in enumerate(names):
        if name in names[:place]:
            yield 1, str(Reason.DUPLICATE_KEY), f"the column {name[:80]!r} occurs twice"
        elif name not in OWN_COLUMNS:
            # A request with this field alone: the parser says whether it knows the name.
            try:
                asked = parse(Record(0, 0, None, orjson.dumps({name: None}), []), 0)
            except orjson.JSONEncodeError:
                yield 1, str(Reason.NOT_JSON), f"the name {name[:80]!r} is not UTF-8"
                continue
            if isinstance(asked, Invalid) and asked.reason is Reason.UNKNOWN_FIELD:
                yield 1, str(asked.reason), asked.detail
