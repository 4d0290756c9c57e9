"""`blackbox audit`: check that every request has exactly one state."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.text import Text

from blackbox.cli.batch import spark
from blackbox.cli.error_exit import FAILED, BadUsage, error_exit, no_topics_exit
from blackbox.cli.terminal import AsJson, as_json, load_silenced, print_whole, printable, table
from blackbox.config.settings import Settings

if TYPE_CHECKING:
    from blackbox.jobs.audit.audit import AuditVerdict

SHOWN = 50

ReadTargets = Annotated[
    bool,
    typer.Option("--targets", help="Also read the target topics; otherwise receipts are trusted."),
]
LateBound = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Report deliveries later than SECONDS, and requests overdue by more.",
    ),
]
LedgerPath = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Read records that Kafka has removed from this ledger; default: BLACKBOX_LEDGER.",
    ),
]
ParquetFolder = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Write the tables statuses (a row for each request) and exceptions to this folder; "
        "replaces those of an earlier audit.",
    ),
]
HtmlFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a report: one HTML file, which loads nothing else."),
]


def audit(
    targets: ReadTargets = False,
    late_bound: LateBound = None,
    ledger: LedgerPath = None,
    json: AsJson = False,
    parquet: ParquetFolder = None,
    html: HtmlFile = None,
) -> None:
    """Compare requests, receipts, Redis and targets, and list every exception; reads only.

    Runs beside the live service. Exits with 0 when every request is accounted for, else with 1.
    """
    settings = load_silenced()
    # Checked first: an audit of large journals takes minutes.
    if html is not None and not html.absolute().parent.is_dir():
        raise BadUsage(
            f"--html {html}: the folder {html.absolute().parent} does not exist; create it"
        )
    place = ledger or settings.ledger
    verdict = _audited(settings, place, parquet, html, targets=targets, late_s=late_bound)
    if json:
        typer.echo(as_json(_as_json(verdict), orjson.OPT_NON_STR_KEYS))
    else:
        print_verdict(verdict)
    if not verdict.is_clean:
        raise typer.Exit(FAILED)


def _audited(
    settings: Settings,
    ledger: str | None,
    parquet: str | None,
    html: Path | None,
    *,
    targets: bool,
    late_s: float | None,
) -> AuditVerdict:
    try:
        with spark(settings, "auditing") as session:
            from blackbox.jobs.audit.audit import audited
            from blackbox.jobs.ledger.ledger import Ledger, spark_errors_explained

            with spark_errors_explained():
                kept = Ledger.open(session, ledger) if ledger else None
                with audited(session, settings, kept=kept, targets=targets, late_s=late_s) as found:
                    verdict = found.verdict
                    if html is not None and verdict.shards:
                        from blackbox.jobs.audit.report import page

                        html.write_text(page(verdict), encoding="utf-8")
                    if parquet is not None and verdict.shards:
                        found.write(parquet)
    except OSError as error:
        raise error_exit(str(error)) from None
    if not verdict.shards:
        raise no_topics_exit(settings)
    return verdict


def _as_json(verdict: AuditVerdict) -> dict[str, Any]:
    found = asdict(verdict) | {"verdict": "clean" if verdict.is_clean else "exceptions"}
    late = verdict.lateness
    # Without the histogram, which only the report draws.
    found["lateness"] = late and {
        name: getattr(late, name) for name in ("p50_ms", "p99_ms", "longest_ms")
    }
    for name in ("callers", "targets"):
        found[name] = {key or "": counts for key, counts in found[name].items()}
    return found


def print_verdict(verdict: AuditVerdict) -> None:
    console = Console(soft_wrap=True)  # a line for each, whatever the width
    states = [f"{count:,} {state}" for state, count in verdict.states.items() if count]
    console.print(Text(f"{verdict.requests:,} requests: {', '.join(states) or 'none'}"))
    if verdict.cold:
        console.print(
            Text(f"{verdict.cold:,} of the pending ones are cold: in Kafka, not in Redis")
        )
    if verdict.unknown:
        console.print(
            Text(f"{verdict.unknown:,} not judged: no longer in the journals, or not readable yet")
        )
    if verdict.is_clean:
        judged = " that can be judged" if verdict.unknown else ""
        console.print(Text(f"clean: every request{judged} is accounted for", style="bold green"))
        return
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in verdict.by_kind.items())
    console.print(Text(f"{verdict.found:,} exceptions: {kinds}", style="bold red"))
    listed = table(("kind", "request", "caller", "detail"))
    for one in verdict.exceptions[:SHOWN]:
        place = f"{one.topic}/{one.partition}@{one.offset}"
        listed.add_row(one.kind, place, printable(one.caller or ""), printable(one.detail))
    print_whole(listed)
    if verdict.found > SHOWN:
        console.print(Text(f"and {verdict.found - SHOWN:,} more: --json, --html, --parquet"))
