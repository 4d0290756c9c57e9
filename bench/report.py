"""Progress of benchmarks that take minutes, and tables for documentation pages."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence

EVERY_S = 5.0


class Progress:
    """Progress as lines, which are readable in a file and in a terminal."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._began = self._said = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if done < self._total and now - self._said < EVERY_S:
            return
        self._said = now
        rate = done / max(1e-9, now - self._began)
        say(f"{self._what}: {done:,} of {self._total:,} ({rate:,.0f} /s)")


def say(what: str) -> None:
    """Print one line with the time to stderr at once."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with text in the first column and figures in the others."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])
