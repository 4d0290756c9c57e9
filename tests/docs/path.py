"""The code on the path of a message: which function calls which for a usual request, with their lengths."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

INTAKE = """
_take_in                              engine/process.py             the thread intake
  _read                               engine/process.py             reads TB
    parse_batch                       core/parsing.py               I1
      interpret_record                core/interpret.py             request, cancel, replacement …
        parse                         formats/countdown.py          the usual format
  _take                               engine/process.py             the batch of each shard
    take                              engine/shard_owner.py         if the shard is open
      store                           core/intake.py
        store                         index/intake_changes.py       I2, I3: one MULTI
          _read_view                  index/intake_changes.py       what Redis has of it
          _commands_that_store        index/intake_changes.py
        resolve                       core/resolve.py               what the batch changes
      _record_taken                   engine/shard_owner.py
        wake_at                       engine/shard_owner.py         wakes the thread of the shard
"""
"""What is indented is called by the line above it that is less indented, or is passed on by it."""

DISPATCH = """
_run                                  engine/shard_owner.py         the thread of one shard
  _dispatch_until_recovery            engine/shard_owner.py         while the shard is open
    _tick                             engine/shard_owner.py
      tick                            core/dispatch.py              D1 to D5
        next                          core/due_reader.py            D1, unless it was read ahead
          read                        core/due_reader.py
            due                       index/dispatch_changes.py     what is due, with payloads
            _triaged                  core/due_reader.py
              divide                  core/triage.py                send, dead-letter, or wait
        _deliver_all                  core/dispatch.py
          _deliver                    core/dispatch.py
            _mark_in_flight           core/dispatch.py              D1, second half
              mark_in_flight          index/dispatch_changes.py     now too late for a cancel
            begin                     journal/shard_writer.py       D2
            send                      core/delivery_transaction.py
              _send_messages          core/delivery_transaction.py
                deliveries            records/outgoing.py           the messages with headers
                send                  journal/shard_writer.py
            flush                     core/delivery_transaction.py
              flush                   journal/shard_writer.py       the brokers have all of them
            _commit_and_remove        core/dispatch.py
              receipt                 core/delivery_transaction.py
              commit                  journal/shard_writer.py       D3, D4
              settle                  index/dispatch_changes.py     D5: one MULTI
                _commands_that_settle index/dispatch_changes.py
    _wait                             engine/shard_owner.py         until something is due
"""


class Call(NamedTuple):
    """A line of a tree. `file` is below `blackbox`."""

    depth: int
    name: str
    file: str
    does: str

    @property
    def lines(self) -> list[str]:
        """The lines of the function. Raises ValueError unless the file has one of this name."""
        found = _functions(self.file).get(self.name, [])
        if len(found) != 1:
            raise ValueError(f"{self.file} has {len(found)} functions {self.name}")
        return found[0]


def summary() -> str:
    every = {(one.name, one.file): len(one.lines) for one in (*_calls(INTAKE), *_calls(DISPATCH))}
    files = {file for _, file in every}
    return (
        f"A usual request goes through {len(every)} functions with {sum(every.values()):,} lines, in "
        f"{len(files)} files. The first half is below, [the second](#the-code-of-dispatch) is dispatch."
    )


def intake() -> str:
    return _drawn(INTAKE)


def dispatch() -> str:
    return _drawn(DISPATCH)


def _calls(tree: str) -> Iterator[Call]:
    """The calls of a tree. Raises ValueError for one that the code does not have."""
    callers: list[Call] = []
    for line in tree.strip().splitlines():
        name, file, *does = re.split(r" +", line.strip(), maxsplit=2)
        depth = (len(line) - len(line.lstrip())) // 2
        call = Call(depth, name, file, "".join(does))
        del callers[depth:]
        if callers and not re.search(rf"\b{name}\b", "\n".join(callers[-1].lines[1:])):
            raise ValueError(f"{callers[-1].name} in {callers[-1].file} does not call {name}")
        callers.append(call)
        yield call


def _drawn(tree: str) -> str:
    rows = [
        f"{'  ' * one.depth + one.name:<38}{one.file:<29}{len(one.lines):>5}  {one.does}".rstrip()
        for one in _calls(tree)
    ]
    head = f"{'function':<38}{'file in blackbox':<29}{'lines':>5}"
    return "\n".join(["```text", head, *rows, "```"])


@cache
def _functions(file: str) -> dict[str, list[list[str]]]:
    """The lines of the functions and methods of a file, by name."""
    text = (ROOT / "blackbox" / file).read_text()
    lines, found = text.splitlines(), dict[str, list[list[str]]]()
    for one in ast.parse(text).body:
        for inner in one.body if isinstance(one, ast.ClassDef) else [one]:
            if isinstance(inner, ast.FunctionDef):
                found.setdefault(inner.name, []).append(lines[inner.lineno - 1 : inner.end_lineno])
    return found
