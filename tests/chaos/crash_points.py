"""Ends a service right after the n-th occurrence of one step of a verb (docs/how-it-works.md)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, NamedTuple

from blackbox.core import intake, recovery
from blackbox.core.dispatch import Dispatch
from blackbox.core.due_reader import DueReader
from blackbox.core.intake import Intake
from blackbox.core.low_water import LowWater
from blackbox.core.plan import Batch
from blackbox.core.recovery import Recovery
from blackbox.engine import process
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.promotion_producer import ShardPromotionProducer
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.shard_writer import ShardWriter
from blackbox.journal.trim import Trimmer
from blackbox.records.receipt import Receipt

CRASHED = 86


class Crash(NamedTuple):
    """The step, and the number of its occurrence, counted from 1."""

    step: str
    time: int


class Step(NamedTuple):
    """The end of a step in the code: the return of any of the functions `names`.

    `counts(result, *arguments)` returns whether a call performed the step. `first(*arguments)` runs
    between the step and the crash.
    """

    owner: Any
    names: str | tuple[str, ...]
    counts: Callable[..., bool] = lambda *_: True
    first: Callable[..., object] = lambda *_: None


def _of_a_batch(position: int, writer: ShardWriter, receipt: Receipt, *_: object) -> bool:
    return not receipt.barrier


def _of_a_rebuild(taken: object, verb: Intake, batch: Batch, now_ms: int, opening: object) -> bool:
    return opening is not None


def _has_gone_out(writer: ShardWriter, receipt: Receipt, places: object) -> object:
    return writer._transactions.flush()


STEPS = {
    "I1": Step(process, "parse_batch", lambda parsed, *_: bool(parsed.changes)),
    "I2": Step(intake, "resolve", lambda plan, changes, _: bool(changes)),
    "I3": Step(ShardIndex, "store", lambda plan, *_: bool(plan.puts or plan.removals)),
    "D1": Step(DueReader, "read", lambda read, *_: bool(read[1].ready or read[1].dead)),
    "D2": Step(ShardWriter, "flush"),
    "D3": Step(
        ShardWriter,
        "_produce_receipt",
        lambda _, writer, receipt, places: not receipt.barrier,
        _has_gone_out,
    ),
    "D4": Step(ShardWriter, "commit", _of_a_batch),
    "D5": Step(Dispatch, "_deliver"),
    "R1": Step(ShardWriter, "open"),
    "R2": Step(ShardJournal, "check"),
    "R3": Step(recovery, "commit_barrier"),
    "R4": Step(Recovery, ("_apply_outcomes", "_rebuild")),
    "R5": Step(Recovery, "_catch_up"),
}

REBUILDING = {
    "an index was begun at a mark": Step(ShardIndex, "begin", lambda _, index, at: at.requests > 0),
    "a batch of a rebuild": Step(Intake, "parse_and_store", _of_a_rebuild),
    "the end of a rebuild": Step(ShardIndex, "finish"),
}

MARKING = {
    "a mark was committed": Step(
        ShardWriter, "commit", lambda _, writer, receipt, *__: bool(receipt.mark)
    ),
    "a mark was written": Step(LowWater, "write"),
    "one journal was trimmed": Step(Trimmer, "_remove", lambda is_done, *_: is_done),
}

PROMOTING = {
    "a promotion began": Step(ShardPromotionProducer, "open"),
    "records were carried on": Step(ShardPromotionProducer, "flush"),
    "a promotion was committed": Step(ShardPromotionProducer, "commit"),
}


def install(crash: Crash) -> None:
    """Make this process end after that step."""
    step = (STEPS | REBUILDING | MARKING | PROMOTING)[crash.step]
    lock = Lock()
    left = crash.time

    def crashing(does_step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(does_step)
        def does_and_crashes(*arguments: Any, **named: Any) -> Any:
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

        return does_and_crashes

    for name in (step.names,) if isinstance(step.names, str) else step.names:
        setattr(step.owner, name, crashing(getattr(step.owner, name)))
