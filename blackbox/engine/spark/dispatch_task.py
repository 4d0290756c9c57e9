"""A long-running Spark task of dispatch, which owns a group of shards until its window ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

from blackbox.config.settings import Settings
from blackbox.engine.metrics import Metrics
from blackbox.engine.shard_pool import ShardPool
from blackbox.index.bus import Bus, Listener
from blackbox.index.redis_servers import RedisServers
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.records.clock import Clock
from blackbox.records.errors import IndexLost, RecordsRemoved, RecoveryRequired
from blackbox.records.request import Shard
from blackbox.spark.task_io import as_reports
from blackbox.support import interpreter, logs

logger = logging.getLogger("blackbox.spark.dispatch")

NOTES_AWAITED_S = 0.1
REPORT_S = 1.0
# How old the last lease may be for a shard to be opened; the driver repeats it every second.
LEASE_VALID_S = 3.0

# Without a lease for this long, the driver counts as gone, and the task ends.
ABANDONED_S = 15.0


def lease_of(run: str) -> str:
    """The kind of note by which a driver assigns shards to groups."""
    return f"lease.{run}"


def report_of(run: str) -> str:
    """The kind of note by which tasks report the state of their shards."""
    return f"report.{run}"


@dataclass(frozen=True, slots=True)
class Window:
    """The parameters of a task: its group, its first shards, and how long it runs at most.

    `number` grows with every window of a driver. A task that receives a later number for its group
    has been replaced, and ends.
    """

    run: str
    settings: Settings
    access: KafkaAccess
    group: int
    number: int
    shards: frozenset[Shard]
    length_s: float

    def __call__(self, nothing: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in nothing:
            pass
        # Spark's own second attempt at a task ends without a report: the driver launches another
        # window, with a number of its own.
        context = TaskContext.get()
        if context is not None and context.attemptNumber() > 0:
            return
        interpreter.tune()
        logs.to_stderr()
        yield from as_reports([_WindowRun(self).run()])


class _WindowRun:
    """A window while it runs in its task."""

    def __init__(self, window: Window) -> None:
        self._window = window
        settings = window.settings
        url = settings.redis_url.get_secret_value()
        self._clock = Clock()
        self._metrics = Metrics()
        self._redis = RedisServers(url)
        self._bus = Bus(url, settings.group_id)
        self._listener = Listener(url, settings.group_id, (lease_of(window.run), "soon", "removed"))
        self._pool = ShardPool(
            settings,
            window.access,
            self._metrics,
            self._clock,
            confirm=self._confirm,
            # After about half of its time, a successor takes the shards over.
            lasts_s=window.length_s / 2,
        )
        self._shards: frozenset[Shard] = frozenset()
        self._lease_s = time.monotonic()
        self._is_over = False
        self._opened_ms: int | None = None
        self._reported: tuple[set[Shard], frozenset[Shard]] | None = None

    def run(self) -> dict[str, Any]:
        """Own the shards until the window ends; returns the last report."""
        began = time.monotonic()
        polled_s = reported_s = float("-inf")
        poll_s = self._window.settings.poll_interval_ms / 1000
        try:
            self._observe()
            self._own_exactly(self._window.shards)
            while not self._is_over and time.monotonic() - began < self._window.length_s:
                to_poll_s = max(0.0, polled_s + poll_s - time.monotonic())
                self._handle_note(self._listener.next(min(NOTES_AWAITED_S, to_poll_s)))
                now = time.monotonic()
                if now - polled_s >= poll_s:
                    polled_s = now
                    self._pool.poll()
                # Changes are reported at once: readiness and handovers depend on them.
                has_changed = (self._pool.open_shards(), self._shards) != self._reported
                if has_changed or now - reported_s >= REPORT_S:
                    reported_s = now
                    self._observe()
                    report = self._report()
                    with suppress(IndexLost):
                        self._bus.send(report_of(self._window.run), report)
                self._is_over |= now - self._lease_s > ABANDONED_S
        finally:
            self._pool.close()
            self._pool.lose(list(self._shards))
            # The result of the task, not a note: a note may be lost, and the last counts with it.
            report = self._report()
            self._bus.close()
            self._listener.close()
            self._redis.close()
        return report

    def _handle_note(self, note: tuple[str, Any] | None) -> None:
        if note is None:
            return
        kind, content = note
        if kind == "soon":
            topic, partition, due_ms = content
            owner = self._pool.get(Shard(topic, partition))
            if owner is not None:
                owner.wake_at(due_ms)
            return
        if kind == "removed":
            topic, partition, first, why = content
            self._recover_from_removal(Shard(topic, partition), RecordsRemoved(why, first))
            return
        self._lease_s = time.monotonic()
        number, shards = content.get(str(self._window.group), (None, ()))
        # None: the driver stops or has fewer groups. Lower: the predecessor still owns the shards.
        if number is None or number > self._window.number:
            self._is_over = True
        elif number == self._window.number:
            self._own_exactly(frozenset(Shard(*shard) for shard in shards))

    def _recover_from_removal(self, shard: Shard, removed: RecordsRemoved) -> None:
        owner = self._pool.get(shard)
        positions = owner.positions if owner is not None else None
        # Intake repeats its note every second; the shard may have been opened past the gap by then.
        if positions is not None and positions.requests < removed.first:
            self._pool.recover(shard, removed)

    def _own_exactly(self, shards: frozenset[Shard]) -> None:
        # Set first: `_confirm` must refuse a shard that is being given up.
        before, self._shards = self._shards, shards
        self._pool.lose(list(before - shards))
        for shard in sorted(shards - before):
            self._pool.gain(shard)

    def _confirm(self, shard: Shard, position: int) -> None:
        if shard not in self._shards:
            raise RecoveryRequired(f"{shard}: given to another owner")
        if time.monotonic() - self._lease_s > LEASE_VALID_S:
            raise RecoveryRequired(f"{shard}: not confirmed by the driver for {LEASE_VALID_S} s")

    def _observe(self) -> None:
        with suppress(IndexLost):
            self._clock.observe(self._redis.now_ms())

    def _report(self) -> dict[str, Any]:
        is_open = self._pool.open_shards()
        if self._opened_ms is None and self._shards and is_open >= self._shards:
            self._opened_ms = self._clock.earliest_ms()
        self._reported = is_open, self._shards
        return {
            "group": self._window.group,
            "number": self._window.number,
            "owned": _as_lists(self._shards),
            "open": _as_lists(is_open),
            "stuck": _as_lists(self._pool.stuck()),
            "why_not_open": [[list(s), why] for s, why in self._pool.why_not_open().items()],
            "opened_ms": self._opened_ms,
            "at_ms": self._clock.earliest_ms(),
            "metrics": list(self._metrics.report()),
        }


def _as_lists(shards: Iterable[Shard]) -> list[list[Any]]:
    return [list(shard) for shard in sorted(shards)]
