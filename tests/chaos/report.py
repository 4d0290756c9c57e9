"""The results of a run by fault: a table, and the page docs/chaos.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from rich.table import Table

from tests.chaos.faults import FAULTS
from tests.chaos.play import Played

COLUMNS = (
    "fault", "schedules", "requests", "lost", "twice", "early", "again",
    "late p50", "late p99", "latest", "failed",
)  # fmt: skip

PAGE = """# Chaos: faults on real servers

This page shows the results of `make chaos`, which injects faults into services, networks, Redis, Kafka and clocks on real
servers. It plays *schedules*. A schedule has 30 to 60 requests that are due within about two seconds, one to three shards,
and one or more faults. Some of the requests are invalid, cancelled, replaced, large, or in the cold tier.

Each acknowledged request must be delivered exactly once and never early, unless it was cancelled or replaced, or became a
dead letter. The accounting (`tests/chaos/books.py`) uses only the requests as Kafka acknowledged them, and the target topics
and the dead-letter topic as a read_committed consumer reads them. In all schedules, owners write low-water marks and trim
both journals every second. Half of the schedules have a cold tier, whose requests are written again after one or two
seconds. A schedule fails in these cases:

- A request is lost, or is delivered twice, early, to a wrong topic, or more than 3 s after its cancel. (If Kafka was away,
  as much longer: a cancel that was written just before could not be read, while the message was already in flight.)
- A request is still pending a minute after the fault was repaired.
- A service ends by itself.
- The fault did not happen. For example, the service did not end after the planned step, or the planned reply was not lost.

Commands:

    make chaos                                             # all schedules; writes this page
    python -m tests.chaos --seed {seed} --schedule 17    # one schedule again
    python -m tests.chaos --fault Redis --share 0.1        # a tenth of the schedules of faults of Redis

The seed decides the requests, the setup and the times. The machine decides the rest: a replay repeats the schedule, but not
its exact timing. `make test` plays a part of the schedules (`tests/chaos/test_chaos.py`).

## Last run

Seed {seed}, {schedules:,} schedules, {requests:,} requests, {failed} failed. The run took {minutes:.0f} minutes on {cores} cores, with {lanes} schedules at once.
{once:,} schedules delivered exactly once, {least:,} at least once. Transactions found torn and declared void: {torn}.
Messages of committed transactions that could not be read at the first attempt: {shown_later}. Their transaction markers were
not yet on a broker that had been unavailable.

- `lost`, `twice` and `early` count requests that violated a guarantee. `twice` counts schedules with exactly-once only.
- `again` counts the repeated deliveries of at-least-once. A batch may be repeated each time an owner ends.
- `late` is the time from the due time to the delivery: `p50` for half of the messages, `latest` for the slowest one. It
  shows how long the shard had no owner or no server, on a machine that runs the other schedules at the same time. The
  shards of a killed service get a new owner after the session timeout, which is 1.5 s here.
- `failed` lists the numbers of the failed schedules.

[How it works](how-it-works.md) explains the steps I1 to R5. A fault of a broker affects up to eight schedules at once.

{table}
"""


@dataclass(frozen=True, slots=True)
class Run:
    """The schedules of a run, and its duration."""

    seed: int
    lanes: int
    cores: int
    took_s: float
    played: Sequence[Played]

    def rows(self) -> list[list[str]]:
        """A row for each fault, in the order of `FAULTS`, and a row for all."""
        of = {fault: [p for p in self.played if p.schedule.fault == fault] for fault in FAULTS}
        return [_row(fault, some) for fault, some in of.items() if some] + [
            _row("all", self.played)
        ]

    def table(self) -> Table:
        table = Table()
        for column in COLUMNS:
            table.add_column(column, no_wrap=True)
        for row in self.rows():
            table.add_row(*row)
        return table

    def page(self) -> str:
        ruler = ["---", *["---:"] * (len(COLUMNS) - 2), "---"]
        lines = ["| " + " | ".join(line) + " |" for line in (COLUMNS, ruler, *self.rows())]
        once = sum(p.delivery == "exactly-once" for p in self.played)
        return PAGE.format(
            seed=self.seed,
            schedules=len(self.played),
            requests=sum(p.books.requests for p in self.played),
            failed=sum(bool(p.complaints) for p in self.played) or "none",
            lanes=self.lanes,
            minutes=self.took_s / 60,
            cores=self.cores,
            once=once,
            least=len(self.played) - once,
            torn=sum(p.torn for p in self.played),
            shown_later=sum(p.books.shown_later for p in self.played),
            table="\n".join(lines),
        )


def _row(name: str, played: Sequence[Played]) -> list[str]:
    once = [p.books for p in played if p.delivery == "exactly-once"]
    least = [p.books for p in played if p.delivery == "at-least-once"]
    late_ms = sorted(chain.from_iterable(p.books.late_ms for p in played))
    failed = sorted(p.schedule.number for p in played if p.complaints)
    return [
        name,
        f"{len(played):,}",
        f"{sum(p.books.requests for p in played):,}",
        f"{sum(len(p.books.lost) for p in played):,}",
        f"{sum(books.again.total() for books in once):,}",
        f"{sum(len(p.books.early) for p in played):,}",
        f"{sum(books.again.total() for books in least):,}",
        *(_at(late_ms, share) for share in (0.5, 0.99, 1.0)),
        ", ".join(map(str, failed)) or "-",
    ]


def _at(ordered_ms: Sequence[int], share: float) -> str:
    if not ordered_ms:
        return "-"
    at = min(len(ordered_ms) - 1, int(len(ordered_ms) * share))
    return f"{ordered_ms[at] / 1000:.2f} s"
