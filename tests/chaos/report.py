"""The results of many schedules, by fault: a table, and the page docs/chaos.md."""

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

PAGE = """# Chaos: what was broken, and what came of it

`make chaos` breaks services, networks, Redis, Kafka and clocks on real servers, by schedules that a seed decides, and accounts
for every request as for a queue: what the request topic acknowledged comes out exactly once and never early, or it was
cancelled, replaced, or is a dead letter. A schedule is 30 to 60 requests due within about two seconds (some of them
invalid, cancelled, replaced, large, or in the cold tier), one to three shards, one fault or several.

Owners write low-water marks and trim both journals every second of it, in all schedules; half of them have a cold tier, whose
requests are written anew after a second or two. The books know requests as Kafka acknowledged them, and read the target topics
and the dead-letter topic back as any read_committed consumer would (`tests/chaos/books.py`); they know nothing else. A schedule fails if a request is lost, comes twice, comes early, comes long
after its cancel, comes where nobody asked for it; if anything is still pending a minute after the fault was mended; if a
service ends by itself; or if the fault did not happen: a service that is to end after a step is seen to end there, a reply
that is to be lost is seen on its way.

    make chaos                                               # all of it, and this page
    python -m tests.chaos --seed {seed} --schedule 17        # one schedule again
    python -m tests.chaos --fault Redis --share 0.1          # a tenth of some

The seed decides the requests, the set-up and the moments; the machine decides the rest, so that a replay is the same
schedule, not the same microsecond. A part of it runs in the gate (`tests/chaos/test_chaos.py`).

## Last run

Seed {seed}, {schedules:,} schedules, {requests:,} requests, {failed} failed. {lanes} at once took {minutes:.0f} minutes on {cores} cores.
{once:,} schedules delivered exactly once, {least:,} at least once. Transactions found torn and declared void: {torn}.
Messages whose transaction was committed, and which could not be read at the first look (its markers were not yet on a broker
that had been away): {shown_later}.

`lost`, `twice`, `early`: requests that broke the promise; `twice` of exactly-once. `again`: deliveries that at-least-once
repeated, which it may, a batch for each end of an owner. `late`: of the messages delivered, after their due time: half of
them by p50, the slowest at `latest`; that is how long the shard was without an owner or a server, on a machine that was
busy with the other schedules at the same time. A service that is killed leaves its shards to the next one after the
session timeout, which is 1.5 s here. `failed`: numbers of schedules.

{table}

I1 to R5 are the steps of [How it works](how-it-works.md). A broker is harmed for up to eight schedules at once.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """Schedules that were played, and how long that took."""

    seed: int
    lanes: int
    cores: int
    took_s: float
    played: Sequence[Played]

    def rows(self) -> list[list[str]]:
        """A row for each fault, in the order of the catalogue, and one for all."""
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
