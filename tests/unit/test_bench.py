"""The bench's own arithmetic: percentiles, what is lost, doubled or early, and its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.page import _spread
from bench.peers.contestant import NotMeasured
from bench.peers.install import go_program
from bench.peers.jobs.schedule import at
from bench.peers.results import (
    LINE,
    Executions,
    first_executions,
    percentile,
    read_lines,
    round_down,
    tally,
)
from bench.rates import ratio_rows, rows

DUE_MS = 1_767_225_600_000


def executions(*found: tuple[int, int]) -> Executions:
    """Executions of these numbers, so many ms after the due time."""
    return read_lines(b"".join(line(number, late_ms) for number, late_ms in found))


def line(number: int, late_ms: int) -> bytes:
    return f"{number:07d} {DUE_MS:013d} {DUE_MS + late_ms:013d}\n".encode()


def test_a_job_that_never_ran_is_lost_and_one_that_ran_twice_is_doubled() -> None:
    found = executions((0, 5), (2, 7), (2, 9), (3, -1))
    assert tally(found, 5) == (2, 1, 1)


def test_nothing_that_ran_is_all_lost() -> None:
    assert tally(executions(), 3) == (3, 0, 0)


def test_the_jobs_of_one_phase_are_told_apart_by_their_numbers() -> None:
    assert executions((9, 0), (10, 0), (12, 0), (13, 0)).of(10, 3).number.tolist() == [10, 12]


def test_of_a_job_that_ran_twice_the_first_execution_counts() -> None:
    first = first_executions(executions((1, 30), (0, 8), (1, 20)))
    assert (first.at_ms - first.due_ms).tolist() == [8, 20]


def test_a_line_that_is_not_complete_is_left_out() -> None:
    assert len(line(1, 0)) == LINE
    assert read_lines(line(1, 0) + line(2, 0)[:20]).number.tolist() == [1]


def test_a_message_begins_with_its_number_and_its_due_time() -> None:
    ((first, second),) = at(5, 2, DUE_MS)
    assert (len(first[0]), first[1]) == (200, DUE_MS)
    assert second[0].startswith(f"0000006 {DUE_MS}")


def test_a_missing_tool_is_a_reason_not_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotMeasured, match="`go` is not installed"):
        go_program(tmp_path / "peer", "asynq")


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: float) -> None:
    late = executions(*((number, 100 - number) for number in range(100)))
    assert percentile(late.at_ms - late.due_ms, share) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(0.3, 1), (1, 1), (9, 5), (4999, 2000), (100_000, 100_000)]
)
def test_counts_are_rounded_down_to_be_easy_to_read(value: float, expected: int) -> None:
    assert round_down(value) == expected


def test_a_cell_has_the_median_and_the_range() -> None:
    assert _spread([3000, None, 1000, 2000]) == "2,000 (1,000 to 3,000)"
    assert _spread([1.25], 1) == "1.2"
    assert _spread([None]) == "-"


def test_ratios_compare_the_rates_of_one_round() -> None:
    rates = {
        "raw": [(200.0, 100.0), (400.0, 200.0)],
        "blackbox": [(100.0, 80.0), (200.0, 160.0)],
        "blackbox, at least once": [(100.0, 100.0), (200.0, 200.0)],
        "naive": [(10.0, 4.0), (20.0, 8.0)],
    }
    assert rows(rates)[0] == ["raw", "300 (200 to 400)", "150 (100 to 200)"]
    assert ratio_rows(rates)[0] == ["blackbox : raw", "0.50", "0.80"]
