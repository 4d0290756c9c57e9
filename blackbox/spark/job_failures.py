"""Failures of jobs on Spark: causes without Java stack traces, and errors of the ledger and the audit."""

from __future__ import annotations


class LedgerError(Exception):
    """The ledger cannot be used as it is; the text says what is wrong and what to do."""


class AuditError(Exception):
    """The audit cannot judge all requests; the text says what is missing and what to do."""


def in_one_line(failure: BaseException) -> str:
    """The type of the failure, then the line that names the cause."""
    return f"{type(failure).__name__}: {cause_in(str(failure))}"[:500]


def cause_in(text: str) -> str:
    """The last line with a blackbox error, else the last `Caused by` or Python error, else the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [
        line
        for line in lines
        if line.startswith("Caused by:") or line.partition(":")[0].endswith(("Error", "Exception"))
    ]
    # A task's error is one of many lines of Python and Java stack traces.
    doubts = [line for line in lines if line.startswith("blackbox.records.errors.")]
    # Java and Python both print the root cause last.
    chosen = next(iter([*doubts[-1:], *causes[-1:], *lines[:1]]), "")
    return chosen.removeprefix("Caused by: ")
