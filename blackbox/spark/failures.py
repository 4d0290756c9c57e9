"""How jobs on Spark fail: what it says, without its pages of Java, and what a ledger lacks."""

from __future__ import annotations


class LedgerError(Exception):
    """The ledger cannot be used as it is; the text says what is wrong and what to do."""


def in_one_line(failure: BaseException) -> str:
    """The line that names the cause, after the kind of failure."""
    return f"{type(failure).__name__}: {cause_in(str(failure))}"[:500]


def cause_in(text: str) -> str:
    """A doubt, the last `Caused by` or Python error, else the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [
        line
        for line in lines
        if line.startswith("Caused by:") or line.partition(":")[0].endswith(("Error", "Exception"))
    ]
    doubts = [line for line in lines if line.startswith("blackbox.records.errors.")]
    chosen = next(iter([*doubts[-1:], *causes[-1:], *lines[:1]]), "")
    return chosen.removeprefix("Caused by: ")
