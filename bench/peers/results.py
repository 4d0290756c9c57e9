"""The results of a contestant: executions, what is missing or repeated among them, and the figures of a round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LINE = 36
"""Bytes of one execution in a file: `number due at`, with seven, thirteen and thirteen digits."""


class Executions(NamedTuple):
    """One item for each execution; times in ms since 1970."""

    number: NDArray[np.int64]
    due_ms: NDArray[np.int64]
    at_ms: NDArray[np.int64]

    def of(self, first: int, count: int) -> Executions:
        """Those of the jobs of one phase."""
        here = (self.number >= first) & (self.number < first + count)
        return Executions(self.number[here], self.due_ms[here], self.at_ms[here])

    @property
    def distinct(self) -> int:
        return len(np.unique(self.number))


class Tally(NamedTuple):
    """Jobs that were never executed, executions beyond the first of a job, executions before the due time."""

    lost: int
    doubled: int
    early: int


@dataclass(frozen=True, slots=True)
class Late:
    """Lateness in ms of `count` jobs. `asked_per_s` and `got_per_s` are the rates of the schedule."""

    count: int
    p50: float
    p99: float
    most: float
    asked_per_s: int
    got_per_s: float


@dataclass(frozen=True, slots=True)
class Kill:
    """A drain of `count` jobs in which all workers were killed and started again at once."""

    count: int
    executed_before: int
    lost: int
    doubled: int
    early: int
    recovered_s: float


@dataclass(slots=True)
class Round:
    """The figures of one contestant in one round. Rates are per second; what was not measured is None."""

    count: int
    schedule: float | None = None
    drain: float | None = None
    first_ms: float | None = None
    redis_bytes: float | None = None
    kafka_bytes: float | None = None
    cpu_us: dict[str, float] = field(default_factory=dict)
    late: list[Late] = field(default_factory=list)
    kill: Kill | None = None
    early: int = 0
    earliest_ms: int = 0
    lost: int = 0
    doubled: int = 0
    notes: list[str] = field(default_factory=list)


def read_lines(content: bytes) -> Executions:
    """The executions in a file. A last line that is not complete is left out."""
    lines = np.frombuffer(content[: len(content) // LINE * LINE], np.uint8).reshape(-1, LINE)
    digits = lines.astype(np.int64) - ord("0")
    return Executions(*(_numbers(digits[:, at : at + size]) for at, size in COLUMNS))


COLUMNS = ((0, 7), (8, 13), (22, 13))


def _numbers(digits: NDArray[np.int64]) -> NDArray[np.int64]:
    powers = 10 ** np.arange(digits.shape[1] - 1, -1, -1, dtype=np.int64)
    return np.asarray(digits @ powers, np.int64)


def tally(found: Executions, count: int) -> Tally:
    distinct = found.distinct
    early = int((found.at_ms < found.due_ms).sum())
    return Tally(count - distinct, len(found.number) - distinct, early)


def percentile(values: NDArray[np.int64], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = np.sort(values)
    return float(ordered[max(0, int(np.ceil(share * len(ordered))) - 1)])


def first_executions(found: Executions) -> Executions:
    """The first execution of each job."""
    order = np.lexsort((found.at_ms, found.number))
    _, firsts = np.unique(found.number[order], return_index=True)
    chosen = order[firsts]
    return Executions(found.number[chosen], found.due_ms[chosen], found.at_ms[chosen])


def round_down(value: float) -> int:
    """To 1, 2 or 5 times a power of ten, so that counts in the report are easy to read."""
    if value < 1:
        return 1
    power = 10 ** int(np.log10(value))
    return int(next(step * power for step in (5, 2, 1) if step * power <= value))
