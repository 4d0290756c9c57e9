"""`blackbox restore`: fill a lost Redis again, with many tasks at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from blackbox import logs
from blackbox.cli.batch import spark
from blackbox.cli.failures import FAILED, REFUSED, ended
from blackbox.connect import kafka
from blackbox.doubt import Fenced, IndexFull, LabelsMoved
from blackbox.settings import Settings, load

if TYPE_CHECKING:
    from blackbox.pipeline.restore.restore import Report, Restored

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be restored, change nothing.")
]
Replace = Annotated[
    bool, typer.Option("--replace", help="Throw away indexes that are not empty, and restore them.")
]
Where = Annotated[
    str | None,
    typer.Option("--ledger", help="For what Kafka has no more; default: BLACKBOX_LEDGER."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def restore(
    dry_run: DryRun = False, replace: Replace = False, ledger: Where = None, json: AsJson = False
) -> None:
    """Fill a lost Redis from the journals, on Spark, while the service is stopped."""
    settings = load()
    logs.silent()
    report = _restored(settings, ledger or settings.ledger, dry_run, replace)
    if json:
        typer.echo(orjson.dumps(_as_json(report, dry_run)))
    else:
        _print(report, dry_run)
    problems = [one.problem for one in report.shards if one.problem is not None]
    if problems:
        raise ended("\n".join(problems), FAILED)


def _restored(settings: Settings, ledger: str | None, dry_run: bool, replace: bool) -> Report:
    access = kafka(settings, logs.QUIET)
    with spark(settings, "restore") as session:
        from blackbox.pipeline.ledger.ledger import Ledger, LedgerError
        from blackbox.pipeline.restore.restore import Restore, RestoreFailed, RestoreRefused

        try:
            kept = Ledger.open(session, ledger) if ledger else None
            restore = Restore(session, settings, access, kept)
            return restore.dry_run() if dry_run else restore.run(replace=replace)
        except RestoreRefused as reason:
            raise ended(str(reason), REFUSED) from None
        except (RestoreFailed, LedgerError, LabelsMoved, Fenced, IndexFull) as reason:
            raise ended(str(reason), FAILED) from None


def _as_json(report: Report, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "took_s": round(report.took_s, 3),
        "scanned": report.scanned,
        "pending": report.pending,
        "scanned_per_s": round(report.scanned / report.took_s),
        "pending_per_s": round(report.pending / report.took_s),
        "shards": [
            {
                "shard": str(one.shard),
                "scanned": one.scanned,
                "pending": one.pending,
                "seconds": round(one.seconds, 3),
                "checked": one.checked,
                "problem": one.problem,
            }
            for one in report.shards
        ],
        "notes": list(report.notes),
    }


def _print(report: Report, dry_run: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_footer=True, pad_edge=False)
    for name, footer in (
        ("shard", "total"),
        ("scanned", f"{report.scanned:,}"),
        ("pending", f"{report.pending:,}"),
        ("seconds", f"{sum(one.seconds for one in report.shards):.1f}"),
        ("checked", ""),
    ):
        table.add_column(name, footer, justify="left" if name == "shard" else "right")
    for one in report.shards:
        table.add_row(
            str(one.shard), f"{one.scanned:,}", f"{one.pending:,}", f"{one.seconds:.1f}",
            _checked(one, dry_run), style="bold red" if one.problem else "",
        )  # fmt: skip
    console = Console()
    console.print(table)
    scanned_per_s, pending_per_s = (n / report.took_s for n in (report.scanned, report.pending))
    did = "dry run, nothing changed" if dry_run else "restored"
    typer.echo(
        f"{did}: {report.took_s:.1f} s, {scanned_per_s:,.0f} requests scanned and "
        f"{pending_per_s:,.0f} pending a second"
    )
    for note in report.notes:
        typer.echo(f"note: {note}")


def _checked(one: Restored, dry_run: bool) -> str:
    return "-" if dry_run else "yes" if one.checked else "no"
