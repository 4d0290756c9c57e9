"""The cost of reading and storing an offset of each partition: measured by intake's tasks, for the plan of its batches."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import orjson

from blackbox.engine.spark.batch_size import FIRST_COST_S
from blackbox.engine.spark.plan_file import write_whole
from blackbox.engine.spark.shard_result import ShardResult
from blackbox.journal.readable_bounds import Partition
from blackbox.records.request import Shard

# Fixed costs, 0.1 s on a busy machine, dominate a range that is both shorter and quicker.
LEAST_OFFSETS, LEAST_S = 100, 0.5
# Otherwise, if large records follow small ones, a single batch could take minutes.
MOST_CHEAPER = 4


class Stopwatch:
    """Divides the time of a task between the shards on which it worked."""

    def __init__(self) -> None:
        self._seconds: defaultdict[Shard | None, float] = defaultdict(float)
        self._since_s = time.monotonic()

    def charge(self, shard: Shard | None) -> None:
        """Count the time since the last call for this shard; None: for no shard."""
        now_s = time.monotonic()
        self._seconds[shard] += now_s - self._since_s
        self._since_s = now_s

    def seconds(self, shard: Shard) -> float:
        return self._seconds[shard]


class ReadCosts:
    """Keeps the costs in a file, because Spark plans batches in a process of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._costs: dict[Shard, float] = {}

    def note(self, done: Iterable[ShardResult]) -> None:
        """Note what the tasks of a batch measured, unless a problem held them up."""
        for one in done:
            if one.problem is not None or not one.offsets:
                continue
            cost_s = one.seconds / one.offsets
            before_s = self._costs.get(one.shard, FIRST_COST_S)
            is_known = one.offsets >= LEAST_OFFSETS or one.seconds >= LEAST_S
            # Fixed costs make it too high, never too low. Without this, a shard that was slow once would
            # get short ranges for good.
            if is_known or cost_s < before_s:
                self._costs[one.shard] = max(cost_s, before_s / MOST_CHEAPER)
        rows = [[*shard, cost] for shard, cost in self._costs.items()]
        write_whole(self.path, orjson.dumps(rows))


def costs_in(path: Path) -> dict[Partition, float]:
    """The costs that were noted last, in seconds per offset; none before the first batch has ended."""
    try:
        rows = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return {(topic, partition): cost for topic, partition, cost in rows}
