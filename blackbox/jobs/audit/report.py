"""The audit report as one HTML file: opens from disk, loads no other files, runs no scripts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from blackbox.jobs.audit import plots
from blackbox.jobs.audit.audit import AuditVerdict
from blackbox.jobs.audit.request_statuses import STATES

NAMED = 200
LISTED = 20
TEMPLATE = Path(__file__).with_name("report.html")


def page(verdict: AuditVerdict) -> str:
    """The HTML of a verdict; everything that callers wrote is escaped."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "count": "{:,}".format, "counted": _counted, "moment": moment, "took": plots.duration,
    }  # fmt: skip
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        verdict=verdict,
        plots=_plots(verdict),
        states={s: n for s, n in verdict.states.items() if n or s in ("pending", "delivered")},
        named=verdict.exceptions[:NAMED],
        rest=verdict.found - min(NAMED, len(verdict.exceptions)),
        tables={
            "caller": _rows(verdict.callers, "(no caller)"),
            "target": _rows(verdict.targets, "(no target)"),
            "hour due": _rows(
                {moment(ms)[:16]: verdict.hours[ms] for ms in sorted(verdict.hours, reverse=True)}
            ),
        },
    )


def moment(ms: int) -> str:
    """Epoch ms as `2026-11-21 12:00:00 UTC`; the number itself when it is outside datetime's range."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms after 1970"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _plots(verdict: AuditVerdict) -> list[tuple[str, str, Markup]]:
    """Title, description and SVG of each plot."""
    drawn: list[tuple[str, str, str]] = []
    if verdict.lateness is not None:
        about = "deliveries by the time from due time to dispatch"
        drawn.append(("Lateness", about, plots.lateness(verdict.lateness)))
    if verdict.asked is not None:
        about = "requests written and messages delivered per second, UTC"
        drawn.append(("Throughput", about, plots.throughput(verdict.asked, verdict.delivered)))
    if verdict.due is not None:
        about = (
            f"pending requests by due time, each bar {plots.duration(verdict.due.width_ms)}, UTC"
        )
        drawn.append(("Coming due", about, plots.pending(verdict.due)))
    if verdict.callers:
        about = "states of their requests; dead includes expired and invalid ones"
        drawn.append(("Callers", about, plots.callers(verdict.callers)))
    # Not escaped again: matplotlib has escaped the text of callers in the SVG.
    return [(title, about, Markup(svg)) for title, about, svg in drawn]


def _rows(
    found: Mapping[Any, Mapping[str, int]], nothing: str = ""
) -> tuple[list[str], list[tuple[str, list[int]]], int]:
    """The states that occur, the first rows, and how many more rows there are."""
    states = [state for state in STATES if any(state in counts for counts in found.values())]
    rows = [
        (nothing if name is None else str(name), [counts.get(state, 0) for state in states])
        for name, counts in list(found.items())[:LISTED]
    ]
    return states, rows, len(found) - len(rows)
