"""`blackbox load`: send millions of requests from files."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from blackbox.cli.batch import Bar, need_spark, tasks_of
from blackbox.cli.error_exit import REFUSED, BadUsage, error_exit
from blackbox.cli.terminal import (
    AsJson,
    RequestTopic,
    as_json,
    chosen_topic,
    load_silenced,
    print_whole,
    printable,
    table,
)
from blackbox.config.settings import Settings
from blackbox.config.wiring import kafka
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.piece_writer import largest_record
from blackbox.journal.topics import Topics, TopicSettings
from blackbox.records.errors import RecoveryRequired
from blackbox.support import logs

if TYPE_CHECKING:
    from blackbox.jobs.load.load import BadRow, Load, LoadCheck, LoadFile

DefaultCaller = Annotated[str | None, typer.Option(help="The caller, for rows that name none.")]
FileFormat = Annotated[
    str | None,
    typer.Option(
        help="parquet, csv or jsonl; default: by the name of the file (.parquet .pq, .csv, "
        ".jsonl .ndjson .json)."
    ),
]
Rate = Annotated[
    int | None, typer.Option(help="Maximum rows per second, of all tasks together.", min=1)
]
Again = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Load the same content once more; NAME distinguishes the loads."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only validate the rows; send nothing.")]


class Loaded(NamedTuple):
    """The result of a load. `seconds` is the time spent sending, or with --dry-run validating."""

    files: int
    rows: int
    sent: int
    already: int
    seconds: float = 0.0
    rows_per_s: int = 0
    judged_s: float = 0.0
    dry_run: bool = False


def load(
    file: Annotated[list[str], typer.Argument(help="Files, folders or globs.")],
    request_topic: RequestTopic = None,
    caller: DefaultCaller = None,
    format: FileFormat = None,
    rate: Rate = None,
    again: Again = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Send the requests in files, each exactly once; an interrupted load continues where it stopped.

    When a row is invalid, nothing is sent, and it exits with 3. docs/load.md has the columns.
    """
    settings = load_silenced()
    topic = _topic(request_topic, settings)
    kind = _kind(format)
    # With the content of a file they name its load: the same command again continues it, another
    # topic, caller or --again begins a new one.
    options = (topic, _utf8("--caller", caller), _utf8("--again", again))
    access = kafka(settings, logs.NO_CLIENT_LOG)
    need_spark()
    from blackbox.jobs.load.load import Load, NotLoaded, UnusableFile, find_files, read_files

    try:
        found = find_files(file, kind)
        most_bytes = _most_bytes(access, topic)
        with Bar() as bar:
            bar.show("reading", sum(os.path.getsize(path) for path, _ in found))
            files = read_files(found, options, partial(bar.advance, bar.step))
            job = Load(settings, access, topic, caller, files)
            # A complete load needs no Spark, which takes several seconds to start.
            if job.is_finished and not dry_run:
                done = Loaded(len(files), job.rows_in, 0, job.rows_in)
            else:
                done = _check_and_send(job, settings, files, most_bytes, rate, dry_run, json, bar)
    except UnusableFile as error:
        raise error_exit(printable(str(error))) from None
    except (NotLoaded, RecoveryRequired) as error:
        remedy = "run the same command again to continue where it stopped"
        raise error_exit(f"{printable(str(error))}; {remedy}") from None
    if json:
        typer.echo(as_json(done._asdict()))
    else:
        _print(done)


def _check_and_send(
    job: Load,
    settings: Settings,
    files: Sequence[LoadFile],
    most_bytes: int,
    rate: int | None,
    dry_run: bool,
    json: bool,
    bar: Bar,
) -> Loaded:
    from blackbox.spark.spark_session import start_session

    bar.show("starting Spark")
    with start_session(settings.spark_master, settings.spark_settings()) as session:
        # All rows before the first is sent: a bad row must not leave a part of the load in Kafka.
        bar.show("validating")
        begun_s = time.monotonic()
        with bar.following(tasks_of(session)):
            verdict = job.validate(session, most_bytes, whole=dry_run)
        if verdict.bad:
            # A live bar would overwrite the lines of the error.
            bar.stop()
            raise _refused(verdict, job.rows_in, json=json)
        judged_s = time.monotonic() - begun_s
        rows, before = sum(verdict.rows.values()), job.rows_in
        if dry_run:
            per_s = round(rows / judged_s)
            return Loaded(len(files), rows, 0, before, judged_s, per_s, judged_s, True)
        bar.show("sending", rows)
        begun_s = time.monotonic()
        with bar.following(lambda: (job.count_rows_in(), rows)):
            job.send(session, verdict.rows, rate)
        took_s = time.monotonic() - begun_s
        sent = job.rows_in - before
        return Loaded(len(files), rows, sent, before, took_s, round(sent / took_s), judged_s)


def _topic(asked: str | None, settings: Settings) -> str:
    if asked is not None and asked not in settings.topics:
        raise BadUsage(
            f"--request-topic {asked!r}: BLACKBOX_REQUEST_TOPICS has {', '.join(settings.topics)}"
        )
    return chosen_topic(asked, settings)


def _kind(asked: str | None) -> str | None:
    if asked not in (None, "parquet", "csv", "jsonl"):
        raise BadUsage(f"--format {asked!r}: wanted: parquet, csv or jsonl")
    return asked


def _utf8(option: str, text: str | None) -> str | None:
    # Python keeps bytes of an argument that are not UTF-8 as surrogates, which cannot be encoded.
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise BadUsage(f"{option} is not valid UTF-8; use UTF-8") from None
    return text


def _most_bytes(access: KafkaAccess, topic: str) -> int:
    described = Topics(access.admin()).describe([topic]).get(topic)
    if described is None:
        raise error_exit(
            f"the request topic {topic!r} does not exist on {access.bootstrap_servers}; start "
            "blackbox once to create it, or name another topic"
        )
    settings = described.settings
    return largest_record(
        access, settings.max_message_bytes if isinstance(settings, TopicSettings) else None
    )


def _refused(verdict: LoadCheck, rows_in: int, *, json: bool) -> typer.Exit:
    if json:
        first = [one._asdict() | {"path": printable(one.path)} for one in verdict.first]
        typer.echo(as_json({"bad": verdict.bad, "bad_rows": first}))
    more = verdict.bad - len(verdict.first)
    lines = [_line(one) for one in verdict.first]
    lines += [f"… and {more:,} more"] if more else []
    before = f" ({rows_in:,} rows were sent by earlier runs)" if rows_in else ""
    rows = "1 bad row" if verdict.bad == 1 else f"{verdict.bad:,} bad rows"
    lines += [f"{rows}; nothing was sent{before}"]
    return error_exit("\n".join(lines), REFUSED)


def _line(bad: BadRow) -> str:
    unit = "row" if bad.kind == "parquet" else "line"
    return printable(f"{bad.path}, {unit} {bad.number}: {bad.reason}: {bad.detail}")


def _print(done: Loaded) -> None:
    names = ("files", "rows", "sent now", "already there", "seconds", "rows/s")
    shown = table(numbers=names)
    counts = (f"{count:,}" for count in done[:4])
    shown.add_row(*counts, f"{done.seconds:.1f}", f"{done.rows_per_s:,}")
    print_whole(shown)
    if done.dry_run:
        typer.echo("all rows are valid; nothing was sent (--dry-run)")
    elif not done.rows:
        typer.echo("these files have no rows")
    elif not done.sent:
        typer.echo("this load was already complete; --again NAME sends it once more")
