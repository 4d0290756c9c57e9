"""The report of the bench: JSON, a page in Markdown, plots, and tables for the terminal."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from bench import plots
from bench.ground import MESSAGE_BYTES
from bench.peers.rounds import Entry
from bench.rates import BATCH, COLUMNS, NAIVE_SHARE, Rates, ratio_rows, rows
from bench.report import markdown

NONE = "-"


class Report:
    """The measurements until now. `rates` and `entries` grow with each round."""

    def __init__(
        self, machine: dict[str, str], requests: int, rates: Rates, entries: list[Entry]
    ) -> None:
        self._machine, self._requests = machine, requests
        self._rates, self._entries = rates, entries

    @property
    def _measured(self) -> list[Entry]:
        return [entry for entry in self._entries if entry.rounds]

    def tables(self) -> list[Table]:
        """The tables of the page, for a terminal."""
        found = []
        for title, head, body in self._sections():
            table = Table(title=title)
            for at, column in enumerate(head):
                table.add_column(column, justify="right" if at else "left")
            for row in body:
                table.add_row(*row)
            found.append(table)
        return found

    def save(self, folder: Path) -> None:
        """Only the figures."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(json.dumps(self._figures(), indent=1) + "\n")

    def write(self, folder: Path) -> None:
        self.save(folder)
        plots.draw(self._measured, folder)
        (folder / "bench.md").write_text(self._page())

    def _figures(self) -> dict[str, object]:
        return {
            "machine": self._machine,
            "requests": self._requests,
            "verbs": self._rates,
            "services": [
                {
                    "name": entry.one.name,
                    "version": entry.version,
                    "settings": [setting._asdict() for setting in entry.one.settings],
                    "not_measured": entry.reason,
                    "rounds": [asdict(found) for found in entry.rounds],
                }
                for entry in self._entries
            ],
        }

    def _sections(self) -> list[tuple[str, list[str], list[list[str]]]]:
        found: list[tuple[str, list[str], list[list[str]]]] = []
        if self._rates:
            found.append(("Verbs", ["", *COLUMNS], rows(self._rates) + ratio_rows(self._rates)))
        if self._measured:
            found += [
                ("Rates", RATES_HEAD, [_rates(entry) for entry in self._measured]),
                ("Lateness", LATE_HEAD, [_late(entry) for entry in self._measured]),
                ("Cost of a message", COST_HEAD, [_cost(entry) for entry in self._measured]),
                ("After kill -9", KILL_HEAD, [_kill(entry) for entry in self._measured]),
                ("Without a kill", CALM_HEAD, [_calm(entry) for entry in self._measured]),
            ]
        failed = [[entry.one.name, entry.reason] for entry in self._entries if entry.reason]
        if failed:
            found.append(("Not measured, or not in all rounds", ["", "reason"], failed))
        return found

    def _page(self) -> str:
        verb_rounds = max((len(found) for found in self._rates.values()), default=0)
        peer_rounds = max((len(entry.rounds) for entry in self._entries), default=0)
        parts = [
            PAGE.format(
                machine="\n".join(f"- {what}: {value}" for what, value in self._machine.items()),
                verb_rounds=verb_rounds,
                peer_rounds=peer_rounds,
                bytes=MESSAGE_BYTES,
            )
        ]
        about = {
            "Verbs": VERBS.format(requests=self._requests, batch=BATCH, share=NAIVE_SHARE),
            "Rates": RATES,
            "Lateness": LATE,
            "Cost of a message": COST,
            "After kill -9": KILL,
            "Without a kill": CALM,
        }
        for title, head, body in self._sections():
            text = f"\n\n{about[title].strip()}" if title in about else ""
            parts.append(f"## {title}{text}\n\n{_table(title, head, body)}")
        parts.append(f"## Settings\n\n{SETTINGS.strip()}")
        parts += [_settings(entry) for entry in self._entries]
        parts.append(MEASURED)
        return "\n\n".join(part.strip() for part in parts) + "\n"


def _table(title: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    table = markdown(head, [[cell.replace("|", "\\|") for cell in row] for row in body])
    # Their second column is text: a version, or a reason.
    is_text = title == "Rates" or title.startswith("Not measured")
    return table.replace("| --- | ---: |", "| --- | --- |", 1) if is_text else table


def _settings(entry: Entry) -> str:
    title = f"### {entry.one.name}" + (f" ({entry.version})" if entry.version else "")
    lines = [f"- {setting.value}: {setting.reason}." for setting in entry.one.settings]
    return "\n".join([title, "", f"A job ends in {entry.one.target}.", "", *lines])


def _spread(values: Iterable[float | None], digits: int = 0) -> str:
    """The median, and the range if it has one."""
    found = [value for value in values if value is not None]
    if not found:
        return NONE
    middle, least, most = statistics.median(found), min(found), max(found)
    shown = [f"{value:,.{digits}f}" for value in (middle, least, most)]
    return shown[0] if shown[1] == shown[2] else f"{shown[0]} ({shown[1]} to {shown[2]})"


RATES_HEAD = ["", "version", "jobs", "schedule /s", "drain /s", "first after ms"]
LATE_HEAD = ["", "p50 at 100 /s, ms", "p99", "p50 at 1,000 /s, ms", "p99"]
COST_HEAD = ["", "bytes in Redis", "in Kafka", "µs workers", "client", "Redis", "Kafka", "all"]
KILL_HEAD = ["", "jobs", "executed before", "lost", "doubled", "early", "last after s", "waited s"]
CALM_HEAD = ["", "jobs", "lost", "doubled", "early", "earliest, ms"]


def _rates(entry: Entry) -> list[str]:
    found = entry.rounds
    return [
        entry.one.name,
        entry.version,
        f"{entry.count:,}",
        _spread(one.schedule for one in found),
        _spread(one.drain for one in found),
        _spread(one.first_ms for one in found),
    ]


def _late(entry: Entry) -> list[str]:
    row = [entry.one.name]
    for per_s in (100, 1000):
        late = [one for found in entry.rounds for one in found.late if one.asked_per_s == per_s]
        got = min((one.got_per_s for one in late), default=0.0)
        # A client that cannot keep up does not put the load on the workers.
        slow = f" at {got:,.0f} /s" if late and got < 0.9 * per_s else ""
        row += [_spread(one.p50 for one in late) + slow, _spread(one.p99 for one in late)]
    return row


def _cost(entry: Entry) -> list[str]:
    rounds = entry.rounds
    used = [found.cpu_us for found in rounds if found.cpu_us]
    names = ("workers", "client", "Redis", "Kafka")
    return [
        entry.one.name,
        _spread(found.redis_bytes for found in rounds),
        _spread(found.kafka_bytes for found in rounds),
        *(_spread(one.get(name) for one in used) for name in names),
        _spread(sum(one.values()) for one in used),
    ]


def _kill(entry: Entry) -> list[str]:
    kills = [found.kill for found in entry.rounds if found.kill is not None]
    if not kills:
        return [entry.one.name, *[NONE] * (len(KILL_HEAD) - 1)]
    sums = (
        sum(getattr(one, what) for one in kills)
        for what in ("count", "executed_before", "lost", "doubled", "early")
    )
    last = _spread((one.recovered_s for one in kills), 1)
    return [
        entry.one.name,
        *(f"{total:,}" for total in sums),
        last,
        f"{entry.one.recovery_s:,.0f}",
    ]


def _calm(entry: Entry) -> list[str]:
    jobs = sum(
        found.count * (found.drain is not None) + sum(late.count for late in found.late)
        for found in entry.rounds
    )
    sums = (sum(getattr(found, what) for found in entry.rounds) for what in ("lost", "doubled", "early"))  # fmt: skip
    earliest = max((found.earliest_ms for found in entry.rounds), default=0)
    return [entry.one.name, f"{jobs:,}", *(f"{total:,}" for total in sums), f"{earliest:,}"]


PAGE = """
# Throughput beside peers

The same delayed work in blackbox, without its logic, in a simple loop, and in other systems. Each of these has the best
settings that its documentation names ([below](#settings)). All run on one machine, on one Redis and one Kafka, one after
the other in alternating rounds: {verb_rounds} of the verbs, {peer_rounds} of services and other systems. A message has {bytes} bytes. Figures
are medians of the rounds, with the lowest and the highest. Absolute rates say little about your machine; ratios say more.

{machine}
"""

VERBS = """
One shard, one thread, {requests:,} requests, {batch:,} a commit. *Raw* does the same Kafka and Redis work with all bytes
prepared in advance and no logic. *Naive* is a simple loop that delivers at least once; it gets one in {share} of the
requests.
"""

RATES = """
`schedule`: one client stores jobs that are due in two hours. `drain`: all jobs are due at one instant; the rate is their
number, divided by the time from that instant to the last execution. The job records its number and the time, with one
system call, because a buffer would be lost with a killed worker. In Kafka, a message counts as executed at the broker's
timestamp in the target topic. blackbox does more in that time than a job queue does: it reads a request from Kafka, and
writes a message and a receipt to it. A slow system gets fewer jobs.

![jobs scheduled and drained a second](bench-rates.svg)
"""

LATE = """
Jobs with delays of 2 to 6 s, scheduled at an even rate; the first seconds do not count. Systems that know only whole
seconds get such due times.

![lateness](bench-lateness.svg)
"""

COST = """
The growth of Redis' memory and of Kafka's files for a pending job. Processor time of a job from its scheduling to its
execution, in the drain: of the workers, the client that schedules, Redis and Kafka. The memory of workers does not
count: those of kafka-message-scheduler, Celery and dramatiq also hold pending jobs.

![processor time of a job](bench-cost.svg)
"""

KILL = """
In the middle of a drain all workers are killed with `kill -9`, and started again at once. Then the bench waits for the
time in which a system with these settings gives work of killed workers back (`waited`), and until nothing was executed
for 10 s. `lost` jobs have not been executed then; `doubled` counts executions beyond the first of a job. Sums of all
rounds. `last after`: from the kill to the first execution of the last job.
"""

CALM = """
The same in the drains and lateness runs in which nothing was killed. `early` counts executions before the due time.
"""

MEASURED = "Measured with `make bench` (`python -m bench`; figures: [bench.json](bench.json))."
SETTINGS = "What was set for each system, and what its figures depend on."
