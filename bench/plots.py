"""The plots of the bench: rates, lateness, and processor time of services and peers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.peers.rounds import Entry

BLUE, ORANGE, PURPLE, GREEN = "#0072b2", "#d55e00", "#7a4fa3", "#009e73"
PARTS = {"workers": BLUE, "client": GREEN, "Redis": ORANGE, "Kafka": PURPLE}
ROW_INCHES = 0.55


def draw(entries: Sequence[Entry], folder: Path) -> None:
    """bench-rates.svg, bench-lateness.svg and bench-cost.svg."""
    if not entries:
        return
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "blackbox"
    _rates(entries, folder / "bench-rates.svg")
    _lateness(entries, folder / "bench-lateness.svg")
    _cost(entries, folder / "bench-cost.svg")


def _figure(entries: Sequence[Entry], columns: int) -> tuple[Any, list[Any]]:
    from matplotlib import pyplot

    height = 1.2 + ROW_INCHES * len(entries)
    drawn, axes = pyplot.subplots(1, columns, figsize=(9, height), sharey=True, squeeze=False)
    found = list(axes[0])
    found[0].set_yticks(range(len(entries)), [entry.one.name for entry in entries])
    found[0].invert_yaxis()
    for one in found:
        one.grid(axis="x", alpha=0.3)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    return drawn, found


def _save(drawn: Any, path: Path) -> None:
    from matplotlib import pyplot

    drawn.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(drawn)


def _dots(
    axes: Any, rows: Sequence[Sequence[float]], offset: float, colour: str, label: str
) -> None:
    """Medians as dots, with the range of the rounds."""
    for at, values in enumerate(rows):
        if not values:
            continue
        # A logarithmic axis has no zero. What is early is drawn at 1 ms, with its own label.
        least, middle, most = (max(1.0, of(values)) for of in (min, statistics.median, max))
        error = [[middle - least], [most - middle]]
        axes.errorbar(middle, at + offset, xerr=error, fmt="o", color=colour, capsize=2)
        axes.annotate(
            f"{statistics.median(values):,.0f}", (most, at + offset), (7, 0), textcoords="offset points",
            va="center", fontsize=7,
        )  # fmt: skip
    axes.errorbar([], [], fmt="o", color=colour, label=label)


def _logarithmic(axes: Any, label: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(xscale="log", xlabel=label)
    axes.xaxis.set_major_locator(LogLocator(10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    least, most = axes.get_xlim()
    # Whole decades, so that there are at least two labels; and a dot at 1 is not cut.
    left = 10 ** math.floor(math.log10(least)) if least > 1 else 0.7
    axes.set_xlim(left, 10 ** math.ceil(math.log10(most * 1.5)))


def _rates(entries: Sequence[Entry], path: Path) -> None:
    drawn, axes = _figure(entries, 2)
    for one, title, colour in zip(axes, ("schedule", "drain"), (GREEN, BLUE), strict=True):
        rows = [[v for found in entry.rounds if (v := getattr(found, title))] for entry in entries]
        _dots(one, rows, 0, colour, title)
        _logarithmic(one, f"{title}, jobs a second")
    _save(drawn, path)


def _lateness(entries: Sequence[Entry], path: Path) -> None:
    drawn, axes = _figure(entries, 2)
    for one, per_s in zip(axes, (100, 1000), strict=True):
        for what, colour, offset in (("p50", GREEN, -0.18), ("p99", BLUE, 0.18)):
            rows = [
                [getattr(late, what) for found in entry.rounds for late in found.late if late.asked_per_s == per_s]
                for entry in entries
            ]  # fmt: skip
            _dots(one, rows, offset, colour, what)
        _logarithmic(one, f"late at {per_s:,} a second, ms")
    drawn.legend(
        *axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, ncols=2, loc="upper center"
    )
    _save(drawn, path)


def _cost(entries: Sequence[Entry], path: Path) -> None:
    drawn, (axes,) = _figure(entries, 1)
    for at, entry in enumerate(entries):
        used = [found.cpu_us for found in entry.rounds if found.cpu_us]
        if not used:
            continue
        left = 0.0
        for part, colour in PARTS.items():
            width = statistics.median(one.get(part, 0.0) for one in used)
            axes.barh(at, width, 0.6, left=left, color=colour)
            left += width
        axes.annotate(f"{left:,.0f}", (left, at), (4, 0), textcoords="offset points", va="center", fontsize=7)  # fmt: skip
    for part, colour in PARTS.items():
        axes.barh(0, 0, color=colour, label=part)
    drawn.legend(frameon=False, fontsize=8, ncols=4, loc="upper center")
    axes.set(xlabel="processor time of a job, µs (medians)")
    axes.margins(x=0.08)
    _save(drawn, path)
