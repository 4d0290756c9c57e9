"""The code on the path of a message: the functions that a usual request goes through, with their lengths."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.docs.markdown import codes, table

ROOT = Path(__file__).parents[2]


class Station(NamedTuple):
    """Functions of one file, and what they do. A method is named with its class."""

    file: str
    functions: Sequence[str]
    does: str


INTAKE = (
    Station(
        "engine/process.py",
        ("ProcessEngine._take_in", "ProcessEngine._read", "ProcessEngine._take"),
        "The thread `intake` reads `TB`, parses, and calls the owner of the shard of each batch. It parses the next "
        "batch (`while_busy`) after it has sent this one to Redis and before it reads the replies.",
    ),
    Station("core/parsing.py", ("parse_batch",), "I1: parses the records of a batch."),
    Station(
        "core/interpret.py",
        ("interpret_record",),
        "The kind of a record: a request, a cancel, a replacement, a carried or an invalid record.",
    ),
    Station(
        "formats/countdown.py",
        ("Countdown.parse", "Countdown._read"),
        "The request in the usual [format](formats.md), with its due time.",
    ),
    Station(
        "engine/shard_owner.py",
        ("ShardOwner.take", "ShardOwner.wake_at"),
        "Stores the batch if the shard is open, and sets an event that wakes the thread of the owner at the first due "
        "time.",
    ),
    Station("core/intake.py", ("Intake.store",), "Gives the index a `make_plan`."),
    Station(
        "index/intake_changes.py",
        ("IntakeChanges.store", "IntakeChanges._read_view", "IntakeChanges._commands_that_store"),
        "I2, I3: reads, calls `make_plan`, and writes one `MULTI`.",
    ),
    Station("core/resolve.py", ("resolve",), "The plan: what the batch changes in the index."),
)

DISPATCH = (
    Station(
        "engine/shard_owner.py",
        (
            "ShardOwner._run",
            "ShardOwner._dispatch_until_recovery",
            "ShardOwner._tick",
            "ShardOwner._wait",
        ),
        "The thread of the owner opens the shard, then ticks and waits: for the next due time, or for the event, which "
        "the job `poll` sets, too.",
    ),
    Station(
        "core/dispatch.py",
        (
            "Dispatch.tick",
            "Dispatch._deliver",
            "Dispatch._mark_in_flight",
            "Dispatch._commit_and_remove",
        ),
        "One tick: D1 to D5, each marked at its line.",
    ),
    Station(
        "core/due_reader.py",
        ("DueReader.next", "DueReader.read"),
        "D1: the batch that was read ahead, or what is due now.",
    ),
    Station(
        "index/dispatch_changes.py",
        (
            "DispatchChanges.due",
            "DispatchChanges.mark_in_flight",
            "DispatchChanges.settle",
            "DispatchChanges._commands_that_settle",
        ),
        "D1 and D5 in Redis: read, mark, remove.",
    ),
    Station(
        "core/triage.py",
        ("Triage.divide",),
        "Divides the batch: what is sent, what becomes a dead letter, what waits.",
    ),
    Station(
        "core/delivery_transaction.py",
        (
            "DeliveryTransaction.send",
            "DeliveryTransaction._send_messages",
            "DeliveryTransaction.receipt",
        ),
        "D2, and the content of the receipt.",
    ),
    Station("records/outgoing.py", ("deliveries",), "A message with its headers."),
    Station(
        "journal/shard_writer.py",
        ("ShardWriter.begin", "ShardWriter.send", "ShardWriter.flush", "ShardWriter.commit"),
        "D2 to D4 in Kafka: produce, wait for the brokers, write the receipt, commit.",
    ),
)


def intake() -> str:
    return _table(INTAKE)


def dispatch() -> str:
    return _table(DISPATCH)


def summary() -> str:
    every = (*INTAKE, *DISPATCH)
    files = {one.file for one in every}
    return (
        f"A usual request goes through {sum(map(length, every))} lines in {len(files)} files, "
        "in the order of the two tables."
    )


def length(station: Station) -> int:
    """The lines of its functions. Raises KeyError if one does not exist."""
    there = _lengths(station.file)
    return sum(there[name] for name in station.functions)


def _table(stations: Sequence[Station]) -> str:
    return table(
        ("file in `blackbox`", "functions", "what they do", "lines"),
        (
            (
                f"`{one.file}`",
                codes(name.rpartition(".")[2] for name in one.functions),
                one.does,
                str(length(one)),
            )
            for one in stations
        ),
    )


@cache
def _lengths(file: str) -> dict[str, int]:
    found: dict[str, int] = {}
    body = ast.parse((ROOT / "blackbox" / file).read_text()).body
    for one in body:
        if isinstance(one, ast.ClassDef):
            for inner in one.body:
                if isinstance(inner, ast.FunctionDef):
                    found[f"{one.name}.{inner.name}"] = _length_of(inner)
        elif isinstance(one, ast.FunctionDef):
            found[one.name] = _length_of(one)
    return found


def _length_of(function: ast.FunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1
