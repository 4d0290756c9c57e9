"""How jobs on Spark fail: what it says, without its pages of Java, and what a ledger lacks."""

from __future__ import annotations


class LedgerError(Exception):
    """The ledger cannot be used as it is; the text says what is wrong and what to do."""


def in_one_line(failure: BaseException) -> str:
    """The line that names the cause: the last `Caused by`, doubt or Python error, else the first line."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    causes = [
        line
        for line in lines
        if line.startswith(("Caused by:", "blackbox.doubt."))
        or line.partition(":")[0].endswith(("Error", "Exception"))
    ]
    chosen = causes[-1] if causes else lines[0] if lines else ""
    return f"{type(failure).__name__}: {chosen.removeprefix('Caused by: ')}"[:500]
