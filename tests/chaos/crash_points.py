"""Ends a service right after one numbered step of a verb (docs/how-it-works.md), at its n-th time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, NamedTuple

from blackbox import intake, recovery, service
from blackbox.dispatch import Dispatch
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.writer import Writer
from blackbox.receipt import Receipt
from blackbox.recovery import Recovery

CRASHED = 86


class Crash(NamedTuple):
    """After which step, and at which of its times, counted from 1."""

    step: str
    time: int


class Step(NamedTuple):
    """Where a step ends in the code.

    `counts(result, *arguments)` says whether a call did the step for something; `first(*arguments)`
    is done between the step and the end.
    """

    owner: Any
    name: str
    counts: Callable[..., bool] = lambda *_: True
    first: Callable[..., object] = lambda *_: None


def _of_a_batch(label: int, writer: Writer, receipt: Receipt) -> bool:
    return not receipt.barrier


def _has_gone_out(writer: Writer, receipt: Receipt, places: object) -> object:
    return writer._transactions.flush()


STEPS = {
    "I1": Step(service, "parse", lambda parsed, *_: bool(parsed.changes)),
    "I2": Step(intake, "resolve", lambda plan, changes, _: bool(changes)),
    "I3": Step(ShardIndex, "store", lambda plan, *_: bool(plan.puts or plan.removals)),
    "D1": Step(Dispatch, "_read", lambda read, *_: bool(read[1].ready or read[1].dead)),
    "D2": Step(Writer, "flush"),
    "D3": Step(
        Writer,
        "_produce_receipt",
        lambda _, writer, receipt, places: not receipt.barrier,
        _has_gone_out,
    ),
    "D4": Step(Writer, "commit", _of_a_batch),
    "D5": Step(Dispatch, "_deliver"),
    "R1": Step(Writer, "open"),
    "R2": Step(ShardJournal, "missing"),
    "R3": Step(recovery, "commit_barrier"),
    "R4": Step(Recovery, "_apply_receipts"),
    "R5": Step(Recovery, "_catch_up"),
}


def install(crash: Crash) -> None:
    """Let this process end after that step."""
    step = STEPS[crash.step]
    does_step: Callable[..., Any] = getattr(step.owner, step.name)
    lock = Lock()
    left = crash.time

    @wraps(does_step)
    def crashing(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        result = does_step(*arguments, **named)
        if step.counts(result, *arguments):
            with lock:
                left -= 1
                if left == 0:
                    step.first(*arguments)
                    print(f"crashed after {crash.step}, time {crash.time}", file=sys.stderr)
                    os._exit(CRASHED)
        return result

    setattr(step.owner, step.name, crashing)
