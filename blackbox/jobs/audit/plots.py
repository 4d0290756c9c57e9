"""Plots of an audit as inline SVG, with text as text and with the page's colours."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from blackbox.jobs.audit.counts import STEPS_A_DECADE, LatenessCounts, Series, even_width_ms

WIDTH_IN, HEIGHT_IN = 4.4, 2.5
BARS_A_DECADE = 8
CALLERS = 10
NAME_LENGTH = 22

_STYLE: Any = {
    "svg.fonttype": "none",
    # A `$` in a caller's name does not begin a formula.
    "text.parse_math": False,
    "font.size": 9.2,
    "axes.titlesize": 9.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
}
# Placeholders for the page's CSS colours, which differ between light and dark mode.
_COLOURS = {
    "ink": "#010203", "line": "#010204", "delivered": "#010205", "pending": "#010206",
    "dead": "#010207", "asked": "#010208",
}  # fmt: skip

_INK, _LINE = _COLOURS["ink"], _COLOURS["line"]
_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"), (1, "ms"))
_TICKS_MS = (1, 10, 100, 1000, 10_000, 60_000, 600_000, 3_600_000, 36_000_000, 864_000_000)
ENDED_BADLY = ("dead", "expired", "invalid")


@mpl.rc_context(_STYLE)
def lateness(late: LatenessCounts) -> str:
    """A histogram of lateness on a logarithmic axis, with p50 and p99."""
    figure = _figure()
    axes = figure.subplots()
    merged = STEPS_A_DECADE // BARS_A_DECADE
    bars: dict[int, int] = {}
    for step, count in late.counts.items():
        bars[step // merged] = bars.get(step // merged, 0) + count
    left = [10 ** (at / BARS_A_DECADE) for at in bars]
    widths = [10 ** ((at + 1) / BARS_A_DECADE) - 10 ** (at / BARS_A_DECADE) for at in bars]
    axes.bar(left, list(bars.values()), widths, align="edge", color=_COLOURS["delivered"])
    axes.set_xscale("log")
    first, last = min(bars), max(bars) + 1
    axes.set_xlim(10 ** (first / BARS_A_DECADE), 10 ** (max(last, first + 8) / BARS_A_DECADE))
    top = max(bars.values()) * 1.32
    axes.set_ylim(0, top)
    low, high = axes.get_xlim()
    for name, ms, height, wanted in (
        ("p50", late.p50_ms, 0.99, "right"),
        ("p99", late.p99_ms, 0.88, "left"),
    ):
        axes.axvline(ms + 1, color=_INK, linewidth=0.8, linestyle=(0, (3, 2)))
        along = math.log((ms + 1) / low) / math.log(high / low)
        side = "left" if along < 0.2 else "right" if along > 0.8 else wanted
        axes.annotate(
            f"{name} {duration(ms)}", (ms + 1, top * height), (3 if side == "left" else -3, 0),
            textcoords="offset points", ha=side, va="top", color=_INK,
        )  # fmt: skip
    marks = [ms for ms in _TICKS_MS if low <= ms + 1 <= high]
    axes.set_xticks([ms + 1 for ms in marks], [duration(ms) for ms in marks])
    axes.minorticks_off()
    _count_axis(axes)
    return _svg(figure, "Lateness: number of deliveries by lateness")


@mpl.rc_context(_STYLE)
def pending(due: Series) -> str:
    figure = _figure()
    axes = figure.subplots()
    axes.bar(
        [(at + 0.5) * due.width_ms for at in range(len(due.counts))], due.counts,
        due.width_ms * 0.92, color=_COLOURS["pending"],
    )  # fmt: skip
    _time_axis(axes, due)
    _count_axis(axes)
    return _svg(figure, "Pending requests by due time")


@mpl.rc_context(_STYLE)
def throughput(asked: Series, delivered: Series | None) -> str:
    """Requests and deliveries per second over time, in separate plots."""
    # One scale would hide the deliveries: often a burst of requests has a long tail of them.
    shown = {
        name: series
        for name, series in (("asked", asked), ("delivered", delivered))
        if series is not None
    }
    figure = _figure()
    longest = max(len(series.counts) for series in shown.values())
    several = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    for axes, (name, series) in zip(several, shown.items(), strict=True):
        a_second = [count * 1000 / series.width_ms for count in series.counts]
        edges = [at * series.width_ms for at in range(len(a_second) + 1)]
        axes.stairs(a_second, edges, color=_COLOURS[name], fill=True, alpha=0.25)
        axes.stairs(a_second, edges, color=_COLOURS[name], linewidth=1.2, baseline=None)
        axes.set_ylim(0, max(a_second) * 1.1)
        axes.set_title(name, loc="left", color=_COLOURS[name], pad=3)
        _count_axis(axes, 2, whole=False)
    _time_axis(several[-1], asked._replace(counts=[0] * longest))
    return _svg(figure, "Requested and delivered per second, over time")


@mpl.rc_context(_STYLE)
def callers(states: Mapping[str | None, Mapping[str, int]]) -> str:
    """The states of the requests of the busiest callers."""
    shown = list(states.items())[:CALLERS]
    figure = _figure(0.9 + 0.26 * max(4, len(shown)))
    axes = figure.subplots()
    rows = range(len(shown))
    reached = [0] * len(shown)
    for name, parts in (("delivered", ("delivered",)), ("pending", ("pending", "unread")), ("dead", ENDED_BADLY)):  # fmt: skip
        counts = [sum(found.get(part, 0) for part in parts) for _, found in shown]
        axes.barh(rows, counts, 0.7, left=reached, color=_COLOURS[name], label=name)
        reached = [before + count for before, count in zip(reached, counts, strict=True)]
    axes.set_yticks(rows, [_short(name) for name, _ in shown])
    axes.set_ylim(max(len(shown), 4) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderpad=0, handlelength=1.2,
        borderaxespad=0.4, columnspacing=1.2, labelcolor=_INK,
    )  # fmt: skip
    return _svg(figure, "Fates of each caller's requests")


def duration(ms: float) -> str:
    """A duration as text: `12 ms`, `1.5 s`, `2 h`."""
    size, unit = next((s, u) for s, u in _UNITS if ms >= s or s == 1)
    return f"{ms / size:.3g} {unit}"


def number(value: float) -> str:
    """A number as text: `950`, `12k`, `1.5M`."""
    for size, unit in ((1_000_000, "M"), (1000, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _figure(height_in: float = HEIGHT_IN) -> Figure:
    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def _count_axis(axes: Any, steps: int = 4, *, whole: bool = True) -> None:
    axes.yaxis.set_major_locator(mpl.ticker.MaxNLocator(steps, integer=whole))
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.grid(axis="y", color=_LINE, linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)


def _svg(figure: Figure, about: str) -> str:
    for axes in figure.axes:
        for spine in axes.spines.values():
            spine.set_color(_LINE)
        axes.tick_params(color=_LINE, labelcolor=_INK)
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # Equal data give equal bytes: no date, no random ids.
    with mpl.rc_context({"svg.hashsalt": about}), warnings.catch_warnings():
        # matplotlib's font lacks letters of some callers' names; the browser renders the text.
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    # Several plots on one page would repeat ids; without a size, a plot fills its column.
    drawn = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", drawn)
    drawn = re.sub(r' (width|height)="[\d.]+pt"', "", drawn, count=2)
    for name, stands_for in _COLOURS.items():
        drawn = drawn.replace(stands_for, f"var(--{name})")
    return drawn.replace("<svg", f'<svg role="img" aria-label="{about}"', 1)


def _time_axis(axes: Any, series: Series) -> None:
    """Ticks at round instants, UTC, about five along the axis."""
    length_ms = len(series.counts) * series.width_ms
    step_ms = even_width_ms(length_ms, 5)
    first_ms = -(-series.start_ms // step_ms) * step_ms
    marks = list(range(first_ms, series.start_ms + length_ms, step_ms))
    axes.set_xlim(0, length_ms)
    axes.set_xticks([ms - series.start_ms for ms in marks], [_instant(ms, step_ms) for ms in marks])


def _instant(ms: int, step_ms: int) -> str:
    at = datetime.fromtimestamp(ms / 1000, UTC)
    if ms % 86_400_000 == 0:
        return at.strftime("%d %b")
    if step_ms % 1000:
        return at.strftime("%H:%M:%S.%f")[:-5]
    return at.strftime("%H:%M:%S" if step_ms % 60_000 else "%H:%M")


def _short(name: str | None) -> str:
    if name is None:
        return "(no caller)"
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in name)
    return text if len(text) <= NAME_LENGTH else text[: NAME_LENGTH - 1] + "…"
