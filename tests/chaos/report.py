"""What came of many schedules, by fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from rich.table import Table

from tests.chaos.play import Played

COLUMNS = (
    "fault", "schedules", "requests", "lost", "duplicated", "early", "again*",
    "late p50", "late p99", "latest", "failed",
)  # fmt: skip


PAGE = """# Chaos: what faults did

`make chaos` plays {schedules:,} schedules of faults with {requests:,} requests. It took {minutes:.0f} minutes on two cores.

Seed {seed}.

{table}
"""


@dataclass(slots=True)
class Row:
    """The schedules of one fault, or all."""

    fault: str
    played: list[Played] = field(default_factory=list)

    def cells(self) -> list[str]:
        once = [p for p in self.played if p.delivery == "exactly-once"]
        late_ms = sorted(chain.from_iterable(p.books.late_ms for p in self.played))
        failed = [str(p.schedule.number) for p in self.played if p.complaints]
        return [
            self.fault,
            f"{len(self.played):,}",
            f"{sum(p.books.requests for p in self.played):,}",
            f"{sum(len(p.books.lost) for p in self.played)}",
            f"{sum(p.books.again.total() for p in once)}",
            f"{sum(len(p.books.early) for p in self.played)}",
            f"{sum(p.books.again.total() for p in self.played if p not in once)}",
            *(_seconds(late_ms, share) for share in (0.5, 0.99, 1.0)),
            ", ".join(failed) or "-",
        ]


def rows(played: Sequence[Played]) -> list[Row]:
    """A row for each fault, in the order of its name's first letter in the catalogue; then all."""
    found: dict[str, Row] = {}
    for one in played:
        found.setdefault(one.schedule.fault, Row(one.schedule.fault)).played.append(one)
    return [*found.values(), Row("all", list(played))]


def _seconds(ordered_ms: Sequence[int], share: float) -> str:
    if not ordered_ms:
        return "-"
    at = min(len(ordered_ms) - 1, int(len(ordered_ms) * share))
    return f"{ordered_ms[at] / 1000:.2f} s"


def for_terminal(played: Sequence[Played]) -> Table:
    table = Table()
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    for row in rows(played):
        table.add_row(*row.cells())
    return table


def as_page(played: Sequence[Played], seed: int, took_s: float) -> str:
    """The page docs/chaos.md."""
    requests = sum(p.books.requests for p in played)
    return PAGE.format(
        schedules=len(played), requests=requests, seed=seed, minutes=took_s / 60,
        table=as_markdown(played),
    )  # fmt: skip


def as_markdown(played: Sequence[Played]) -> str:
    lines = [COLUMNS, ["---", *["---:"] * (len(COLUMNS) - 2), "---"]]
    lines += [row.cells() for row in rows(played)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
