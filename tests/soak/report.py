"""The results of a soak: a verdict, a plot over time, and the page docs/soak.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from tests.soak.monitor import WARM_UP_S, Life, Sample

QUIET_S = 30.0
"""The time for which messages may be late after the repair of a fault: the group notices a dead
service after six seconds, and at half of the maximum rate, a backlog of six seconds takes six more."""

BEFORE_S = 1.0
"""Messages due this shortly before a fault may still have been in delivery."""

MOST_LATE_MS = 500
MOST_DRIFT = 0.05
BIN_S = 5
LATEST = 20
LATEST_ROWS = 10
COLOURS = {"service": "#0072b2", "other service": "#56b4e9", "Redis": "#d55e00", "Kafka": "#7a4fa3"}


class Fault(NamedTuple):
    """A fault, in seconds since the load started."""

    name: str
    from_s: float
    until_s: float


class Quantiles(NamedTuple):
    """Lateness, in ms."""

    p50: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class Soak:
    """`due_ms`, `delivered_ms` (epoch; 0 if never), `times` and `partitions` have an item for each request."""

    engine: str
    cores: int
    capacity: int
    per_s: int
    seconds: float
    began_ms: int
    faults: list[Fault]
    due_ms: NDArray[np.int64]
    delivered_ms: NDArray[np.int64]
    times: NDArray[np.uint8]
    partitions: NDArray[np.uint8]
    lives: list[Life]

    @property
    def late_ms(self) -> NDArray[np.int64]:
        """Lateness of the delivered requests."""
        return (self.delivered_ms - self.due_ms)[self.times > 0]

    def in_faults(self) -> NDArray[np.bool_]:
        """Which of the delivered requests were due just before, during, or soon after a fault."""
        due_s = self._due_s()
        found = np.zeros(len(due_s), np.bool_)
        for fault in self.faults:
            found |= (due_s >= fault.from_s - BEFORE_S) & (due_s < fault.until_s + QUIET_S)
        return found

    def complaints(self) -> list[str]:
        """Violations of the guarantees."""
        counts = zip(("lost", "delivered twice", "early"), self.broken(), strict=True)
        found = [f"{count:,} {what}" for what, count in counts if count]
        quiet = quantiles(self.late_ms[~self.in_faults()])
        if quiet.p99 > MOST_LATE_MS:
            found.append(f"outside of faults p99 is {quiet.p99:,.0f} ms late")
        for life in self.lives:
            for what, drift in drifts(life).items():
                is_fewer = what == "descriptors" and drift < 0  # idle connections are closed
                if abs(drift) > MOST_DRIFT and not is_fewer:
                    found.append(f"{life.role}: {what} changed by {drift:+.1%} after the warm-up")
        return found

    def table(self) -> Table:
        table = Table(title=self._title())
        for column in ("", "from", "to", "change after warm-up"):
            table.add_column(column, justify="left" if not column else "right")
        for row in self._rows():
            table.add_row(*row)
        table.add_section()
        table.add_row("lost, twice, early", *map(str, self.broken()))
        for name, late in self._lateness().items():
            table.add_row(f"late {name}: p50, p99, most", *(f"{ms:,.0f} ms" for ms in late))
        return table

    def write(self, folder: Path) -> None:
        """Write soak.svg, soak.json and soak.md; with the engine's name if it is not the default."""
        folder.mkdir(parents=True, exist_ok=True)
        name = "soak" if self.engine == "process" else f"soak-{self.engine}"
        (folder / f"{name}.json").write_text(json.dumps(self._figures(), indent=1) + "\n")
        draw(self, folder / f"{name}.svg")
        (folder / f"{name}.md").write_text(self._page(name))

    def _due_s(self) -> NDArray[np.float64]:
        return (self.due_ms[self.times > 0] - self.began_ms) / 1000

    def broken(self) -> tuple[int, int, int]:
        """The numbers of requests that were lost, delivered twice, or early."""
        lost, twice = (self.times == 0).sum(), (self.times > 1).sum()
        return int(lost), int(twice), int((self.late_ms < 0).sum())

    def _lateness(self) -> dict[str, Quantiles]:
        during = self.in_faults()
        return {
            "outside of faults": quantiles(self.late_ms[~during]),
            "in faults": quantiles(self.late_ms[during]),
        }

    def _title(self) -> str:
        return (
            f"{len(self.times):,} requests in {self.seconds / 60:.0f} minutes, {self.per_s:,} a second"
            f" (the machine can do {self.capacity:,}), {len(self.faults)} faults, engine {self.engine}"
        )

    def _rows(self) -> list[list[str]]:
        rows = []
        for life in self.lives:
            if not life.warm:
                continue
            for what, of in MEASURES.items():
                found = [of(one) for one in life.warm]
                drift = f"{life.drift(of):+.1%}"
                rows.append(
                    [f"{life.role}, {what}", f"{min(found):,.0f}", f"{max(found):,.0f}", drift]
                )
        return rows

    def _figures(self) -> dict[str, object]:
        lost, twice, early = self.broken()
        return {
            "engine": self.engine,
            "cores": self.cores,
            "capacity_per_s": self.capacity,
            "per_s": self.per_s,
            "seconds": self.seconds,
            "requests": len(self.times),
            "lost": lost,
            "twice": twice,
            "early": early,
            "late_ms": {name: late._asdict() for name, late in self._lateness().items()},
            "latest": self._latest(),
            "faults": [fault._asdict() for fault in self.faults],
            "processes": [
                {"role": life.role, "samples": [tuple(map(_rounded, one)) for one in life.samples]}
                for life in self.lives
            ],
        }

    def _latest(self) -> list[dict[str, float]]:
        """The latest requests: their due and delivery times, in seconds since the load started."""
        delivered = np.flatnonzero(self.times)
        latest = delivered[np.argsort(self.late_ms)[: -LATEST - 1 : -1]]
        return [
            {
                "request": int(one),
                "partition": int(self.partitions[one]),
                "due_s": _rounded((self.due_ms[one] - self.began_ms) / 1000),
                "delivered_s": _rounded((self.delivered_ms[one] - self.began_ms) / 1000),
            }
            for one in latest
        ]

    def latest_of_each(self) -> list[tuple[float, str, int, float]]:
        """The latest request of each partition in and after each fault, the ten latest of these.

        How late (s), the last fault that started before its delivery, the partition, and when it
        was due, in seconds since the fault started.
        """
        if not self.faults:
            return []
        began = np.array([fault.from_s for fault in self.faults])
        delivered = np.flatnonzero(self.times)
        delivered_s = (self.delivered_ms[delivered] - self.began_ms) / 1000
        of_fault = np.searchsorted(began, delivered_s, side="right") - 1
        found = []
        for number, fault in enumerate(self.faults):
            for partition in np.unique(self.partitions):
                is_here = (of_fault == number) & (self.partitions[delivered] == partition)
                if not is_here.any():
                    continue
                at = np.flatnonzero(is_here)[np.argmax(self.late_ms[is_here])]
                due_s = (self.due_ms[delivered[at]] - self.began_ms) / 1000 - fault.from_s
                late_s = float(self.late_ms[at]) / 1000
                found.append((late_s, fault.name, int(partition), float(due_s)))
        return sorted(found, reverse=True)[:LATEST_ROWS]

    def _page(self, name: str) -> str:
        rows = [f"| {' | '.join(row)} |" for row in self._rows()]
        late = [
            f"| {where} | {found.p50:,.0f} ms | {found.p99:,.0f} ms | {found.most:,.0f} ms |"
            for where, found in self._lateness().items()
        ]
        lost, twice, early = self.broken()
        return PAGE.format(
            name=name,
            about=self._title(),
            cores=self.cores,
            before=BEFORE_S,
            quiet=QUIET_S,
            warm_up=WARM_UP_S / 60,
            option="" if self.engine == "process" else f" --engine {self.engine}",
            lost=lost,
            twice=twice,
            early=early,
            late="\n".join(late),
            latest="\n".join(
                f"| {late_s:,.1f} s | {fault} | {partition} | {due_s:+,.1f} s |"
                for late_s, fault, partition, due_s in self.latest_of_each()
            ),
            rows="\n".join(rows),
            over="; ".join(self.complaints()) or "none",
        )


PAGE = """# Half an hour under load, with a fault every minute

This page shows the result of a run of `make soak`:
{about}.
Kafka, Redis, two services, the load and its reader shared {cores} cores. Requests have 200 bytes and countdowns of
2 to 6 s. What the machine can do was measured just before, with requests that are due at once. Kafka's timeouts are
the defaults: the group notices a dead service after 6 s.

![lateness, memory and file descriptors over time]({name}.svg)

**Lost {lost}, delivered twice {twice}, early {early}.**

| due | late, p50 | p99 | longest |
| --- | ---: | ---: | ---: |
{late}

"In faults" is from {before:.0f} s before a fault until {quiet:.0f} s after it was repaired.

The ten latest of the latest requests of each partition after each fault:

| lateness | last fault before the delivery | partition | due, from the start of the fault |
| ---: | --- | ---: | ---: |
{latest}

The least and the most that each process used after a warm-up of {warm_up:.0f} minutes, and the change of the median
from the first round of all faults to the last. Memory is the proportional set size in MB. Processes that did not live
long enough are left out. Kafka keeps records for three minutes here, because its index files count as memory, too,
looks for what it can delete every five seconds, and takes its whole heap at its start.

| | from | to | change |
| --- | ---: | ---: | ---: |
{rows}

Limits exceeded (p99 outside of faults 500 ms, change 5 %): {over}.

`python -m tests.soak{option} --write docs` repeats the run. Figures: [{name}.json]({name}.json).
"""

MEASURES: dict[str, Callable[[Sample], float]] = {
    "memory": lambda one: one.memory_mb,
    "descriptors": lambda one: one.descriptors,
}


def drifts(life: Life) -> dict[str, float]:
    """The relative change of each measure after the warm-up; none for a short life."""
    return {what: life.drift(of) for what, of in MEASURES.items()} if life.warm else {}


def quantiles(late_ms: NDArray[np.int64]) -> Quantiles:
    if not len(late_ms):
        return Quantiles(0, 0, 0)
    half, most = np.percentile(late_ms, (50, 99))
    return Quantiles(float(half), float(most), float(late_ms.max()))


def _rounded(value: float) -> float:
    return round(value, 1)


def draw(soak: Soak, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    matplotlib.rcParams["svg.hashsalt"] = "blackbox"
    drawn, (late, memory, descriptors) = pyplot.subplots(
        3, 1, figsize=(9, 8), sharex=True, height_ratios=(3, 2, 2)
    )
    bins = (soak._due_s() // BIN_S).astype(int)
    found = {int(one): soak.late_ms[bins == one] for one in np.unique(bins)}
    minutes = [one * BIN_S / 60 for one in found]
    for share, label, colour in ((50, "p50", "#009e73"), (99, "p99", "#0072b2")):
        height = [max(1.0, float(np.percentile(of, share))) for of in found.values()]
        late.plot(minutes, height, color=colour, label=label, linewidth=1)
    late.set(yscale="log", ylabel="late, ms")
    late.legend(frameon=False, fontsize=8, loc="upper right")
    for axes, of, label in (
        (memory, MEASURES["memory"], "memory, MB"),
        (descriptors, MEASURES["descriptors"], "file descriptors"),
    ):
        for life in soak.lives:
            at = [one.at_s / 60 for one in life.samples]
            axes.plot(at, [of(one) for one in life.samples], color=COLOURS[life.role], linewidth=1)
        axes.set(ylabel=label, yscale="log")
    for role, colour in COLOURS.items():
        memory.plot([], [], color=colour, label=role)
    memory.legend(frameon=False, fontsize=8, ncols=4, loc="upper center")
    kinds = {fault.name: f"C{number}" for number, fault in reversed([*enumerate(soak.faults)])}
    for axes in (late, memory, descriptors):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        for fault in soak.faults:
            last_s = max(fault.until_s, fault.from_s + BIN_S)
            colour = kinds[fault.name]
            axes.axvspan(fault.from_s / 60, last_s / 60, color=colour, alpha=0.35, lw=0)
    shades = [Patch(color=colour, alpha=0.35) for colour in kinds.values()]
    drawn.legend(
        shades[::-1], list(kinds)[::-1], frameon=False, fontsize=8, ncols=3, loc="upper center"
    )
    descriptors.set(xlabel="minutes")
    drawn.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(drawn)
