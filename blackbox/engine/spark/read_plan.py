"""Which shards intake reads now, from where on and in how many tasks: given to the plan of the stream in a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import orjson

from blackbox.engine.spark.plan_file import write_whole
from blackbox.journal.readable_bounds import Partition
from blackbox.records.request import Shard


class ShardStart(NamedTuple):
    """Where a shard was begun. It gets a higher number each time, so that the plan forgets how far it was."""

    number: int
    start: int


class PlannedReads(NamedTuple):
    """The plan for the next batches: how many tasks, and which partitions from which offset on."""

    tasks: int
    begun: dict[Partition, ShardStart]


class ReadPlan:
    """Keeps them in a file, because Spark plans batches in a process of its own.

    Safe for use from two threads at once.
    """

    def __init__(self, path: Path, tasks: int) -> None:
        self.path = path
        self._number = 0
        self._lock = Lock()
        self._write(tasks, {})

    def shards(self) -> frozenset[Shard]:
        return frozenset(self._begun)

    def begin(self, starts: Mapping[Shard, int]) -> None:
        """Read these shards from these offsets on, from the next batch that is planned."""
        with self._lock:
            self._number += 1
            begun = {shard: ShardStart(self._number, start) for shard, start in starts.items()}
            self._write(self._tasks, self._begun | begun)

    def end(self, shards: Iterable[Shard]) -> None:
        """Do not read these shards in the next batch that is planned."""
        gone = frozenset(shards)
        with self._lock:
            kept = {shard: begun for shard, begun in self._begun.items() if shard not in gone}
            self._write(self._tasks, kept)

    def use(self, tasks: int) -> None:
        """Divide batches over at most so many tasks."""
        with self._lock:
            if tasks != self._tasks:
                self._write(tasks, self._begun)

    def _write(self, tasks: int, begun: dict[Shard, ShardStart]) -> None:
        rows = [[*shard, *at] for shard, at in begun.items()]
        write_whole(self.path, orjson.dumps([tasks, rows]))
        self._tasks, self._begun = tasks, begun


def read_plan_from(path: Path) -> PlannedReads:
    """The last plan that was written."""
    tasks, rows = orjson.loads(path.read_bytes())
    return PlannedReads(
        tasks, {(topic, at): ShardStart(number, start) for topic, at, number, start in rows}
    )
