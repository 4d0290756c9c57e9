"""`blackbox ledger`: keep the journals as Parquet tables, further back than Kafka does."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blackbox.cli.batch import spark
from blackbox.cli.error_exit import FAILED, BadUsage
from blackbox.cli.terminal import AsJson, as_json, load_silenced, print_line, print_whole, table
from blackbox.config.settings import Settings
from blackbox.config.wiring import kafka
from blackbox.support import logs

if TYPE_CHECKING:
    from blackbox.jobs.ledger.extend import Done


def ledger(
    path: Annotated[
        str | None,
        typer.Option(help="The ledger: a folder, or a Hadoop path; default: BLACKBOX_LEDGER."),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Only compare every row with the manifest; change nothing."),
    ] = False,
    accept_gap: Annotated[
        bool,
        typer.Option(
            "--accept-gap",
            help="Continue after offsets that Kafka removed before they were read; record the gap.",
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """Add new records of the journals to Parquet tables, for the audit.

    Exits with 1 when --verify finds a difference, or Kafka removed records before they were read.
    """
    settings = load_silenced()
    place = path or settings.ledger
    if not place:
        raise BadUsage(
            "no ledger is given; set BLACKBOX_LEDGER or --path to a folder, or a Hadoop path such "
            "as s3a://bucket/ledger"
        )
    if verify and accept_gap:
        raise BadUsage("--verify and --accept-gap are both given; give one of them")
    if verify:
        _verify(settings, place, json)
    else:
        _extend(settings, place, accept_gap, json)


def _extend(settings: Settings, place: str, accept_gap: bool, json: bool) -> None:
    access = kafka(settings, logs.NO_CLIENT_LOG)
    # The imports below need pyspark, of which `spark` reports with one line that it is missing.
    with spark(settings, "reading the journals") as session:
        from blackbox.jobs.ledger.extend import extend

        done = extend(session, settings, access, place, accept_gap=accept_gap)
    if json:
        typer.echo(as_json(_as_json(done)))
    else:
        _print_tables(done)


def _verify(settings: Settings, place: str, json: bool) -> None:
    with spark(settings, "reading the ledger") as session:
        from blackbox.jobs.ledger.ledger import Ledger

        verdict = Ledger.verify(session, place)
    if json:
        typer.echo(as_json(asdict(verdict)))
    else:
        for problem in verdict.problems:
            print_line(problem)
        if not verdict.problems:
            typer.echo(
                f"Verified: {verdict.rows:,} rows in {verdict.files:,} files, all as written."
            )
        if verdict.leftovers:
            typer.echo(
                f"{verdict.leftovers} files are in no manifest, left by a run that was killed: "
                "readers ignore them, and a later run removes them."
            )
    if verdict.problems:
        raise typer.Exit(FAILED)


def _as_json(done: Done) -> dict[str, Any]:
    return {
        "path": done.path,
        "manifest": done.manifest.number,
        "steps": done.steps,
        "seconds": round(done.seconds, 3),
        "tables": {table: asdict(one) for table, one in done.tables.items()},
        "journals": [
            {
                "table": table,
                "shard": str(shard),
                "start": covered.start,
                "end": covered.end,
                "gaps": [list(gap) for gap in covered.gaps],
            }
            for (table, shard), covered in sorted(
                done.manifest.journals.items(), key=lambda j: j[0]
            )
        ],
    }


def _print_tables(done: Done) -> None:
    from blackbox.spark.journals import JournalKey

    tables = table(["table"], ["rows added", "rows", "days", "files", "bytes", "compacted"])
    for name, one in done.tables.items():
        compacted = f"{one.compacted:,} into {one.compacted_into:,}" if one.compacted else "-"
        numbers = (one.rows_added, one.rows, one.days, one.files, one.bytes)
        tables.add_row(name, *(f"{number:,}" for number in numbers), compacted)
    shards = table(["shard"], ["requests", "receipts", "gaps"])
    journals = done.manifest.journals
    # A shard has two journals; its requests are in one table, its receipts in the other.
    for shard in sorted({journal.shard for journal in journals}):
        both = [journals[j] for j in (JournalKey("requests", shard), JournalKey("outcomes", shard))]
        lost = sum(gap.end - gap.start for covered in both for gap in covered.gaps)
        spans = (f"{covered.start:,} to {covered.end:,}" for covered in both)
        shards.add_row(str(shard), *spans, f"{lost:,}" if lost else "-")
    steps = "1 step" if done.steps == 1 else f"{done.steps} steps"
    print_whole(tables)
    print_whole(shards)
    print_line(f"{done.path}: manifest {done.manifest.number}, {steps}, {done.seconds:.1f} s")
