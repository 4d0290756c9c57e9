"""The driver's side of dispatch: a Spark job per group of shards, again and again."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Any

import orjson
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from blackbox.doubt import IndexLost
from blackbox.index.bus import Bus, Listener
from blackbox.journal.access import KafkaAccess
from blackbox.metrics import Metrics, Report
from blackbox.pipeline.failures import in_one_line
from blackbox.pipeline.tasks.dispatch import SCHEMA, Window, lease_of, report_of
from blackbox.request import Shard
from blackbox.settings import Settings

logger = logging.getLogger("blackbox.pipeline.dispatch")

WINDOW_S = 600.0
FRESH_S = 5.0
"""How old a task's last report may be for its shards to count as open."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
LISTEN_S = 0.2


class WindowLost(Exception):
    """A window ended before its time."""


@dataclass(slots=True)
class _Group:
    """One group of shards, and what is known of its present window."""

    shards: frozenset[Shard] = frozenset()
    number: int = 0
    ended_ms: int | None = None
    is_open: frozenset[Shard] = frozenset()
    owned: frozenset[Shard] = frozenset()
    stuck: frozenset[Shard] = frozenset()
    heard_s: float = float("-inf")
    counted: Report = field(default_factory=Report)
    is_handed_over: bool = False


class DispatchWindows:
    """Keeps every shard that was assigned in the window of some task, until `stop`.

    Tasks follow the lease that `renew` repeats: they take and give up shards while they linger.
    """

    def __init__(
        self,
        session: SparkSession,
        settings: Settings,
        access: KafkaAccess,
        metrics: Metrics,
        run: str,
        *,
        window_s: float = WINDOW_S,
    ) -> None:
        self._session = session
        self._settings = settings
        self._access = access
        self._metrics = metrics
        self._run = run
        self._window_s = window_s
        url = settings.redis_url.get_secret_value()
        self._bus = Bus(url, settings.group_id)
        self._listener = Listener(url, settings.group_id, (report_of(run),))
        self._topics = list(settings.topics)
        self._groups: dict[int, _Group] = {}
        self._threads: dict[int, Thread] = {}
        self._shards: frozenset[Shard] = frozenset()
        self._count = 0
        self._number = 0
        self._lock = Lock()
        self._bus_lock = Lock()
        self._stopping = Event()
        self._ears = Thread(target=self._listen, name="reports", daemon=True)

    def start(self, groups: int) -> None:
        """Let so many tasks begin to linger; they take shards when some are assigned."""
        self._ears.start()
        self.assign((), groups)

    def assign(self, shards: Iterable[Shard], groups: int) -> None:
        """Spread these shards over so many groups; the tasks hear of it at once."""
        with self._lock:
            self._shards, self._count = frozenset(shards), groups
            for number in range(groups):
                self._groups.setdefault(number, _Group())
            for number, group in self._groups.items():
                group.shards = frozenset(s for s in self._shards if self._place(s) == number)
            for number in range(groups):
                if number not in self._threads:
                    thread = Thread(
                        target=self._keep, args=(number,), name=f"window-{number}", daemon=True
                    )
                    self._threads[number] = thread
                    thread.start()
        self.renew()

    def renew(self) -> None:
        """Tell the tasks that their driver lives, and what is theirs; to be repeated every second."""
        with self._lock:
            lease = {
                str(number): [group.number, [list(shard) for shard in sorted(group.shards)]]
                for number, group in self._groups.items()
                if number < self._count
            }
        try:
            with self._bus_lock:
                self._bus.send(lease_of(self._run), lease)
        except IndexLost as reason:
            logger.warning("cannot renew the lease of dispatch: %s", reason)

    def wait_given_up(self, shards: Iterable[Shard], timeout_s: float) -> bool:
        """Wait until no task owns any of these shards; False when that takes longer."""
        given_up = frozenset(shards)
        deadline = time.monotonic() + timeout_s
        while any(group.owned & given_up for group in self._fresh()):
            if time.monotonic() > deadline:
                return False
            self._stopping.wait(0.02) if not self._stopping.is_set() else time.sleep(0.02)
        return True

    def open_shards(self) -> set[Shard]:
        """The shards that tasks have reported open within the last seconds."""
        return {shard for group in self._fresh() for shard in group.is_open}

    def stuck(self) -> set[Shard]:
        return {shard for group in self._fresh() for shard in group.stuck}

    def stop(self, timeout_s: float) -> None:
        """Let every task finish its ticks and end; cancel those that take longer."""
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        self.assign((), 0)
        for number, thread in list(self._threads.items()):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("dispatch group %d takes too long to end; cancelled", number)
                with suppress(Py4JError, OSError):
                    self._session.sparkContext.cancelJobGroup(_job_group(number))
        self._ears.join(1.0)
        self._bus.close()
        self._listener.close()

    def _place(self, shard: Shard) -> int:
        return (self._topics.index(shard.topic) + shard.partition) % max(1, self._count)

    def _fresh(self) -> list[_Group]:
        oldest_s = time.monotonic() - FRESH_S
        with self._lock:
            return [group for group in self._groups.values() if group.heard_s >= oldest_s]

    def _keep(self, number: int) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            window = self._next_window(number)
            if window is None:
                self._stopping.wait(LISTEN_S)
                continue
            began = time.monotonic()
            try:
                report = self._pass(window)
                self._ended(number, report)
                pause_s = FIRST_PAUSE_S
            except Exception as failure:
                self._ended(number, None)
                if self._stopping.is_set():
                    return
                if time.monotonic() - began > LONGEST_PAUSE_S:
                    pause_s = FIRST_PAUSE_S
                logger.warning(
                    "dispatch group %d failed: %s; again in %.1f s",
                    number, in_one_line(failure), pause_s,
                )  # fmt: skip
                self._stopping.wait(pause_s)
                pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    def _next_window(self, number: int) -> Window | None:
        with self._lock:
            group = self._groups[number]
            if number >= self._count:
                return None
            self._number += 1
            group.number = self._number
            group.is_handed_over = False
            return Window(
                run=self._run,
                settings=self._settings,
                access=self._access,
                group=number,
                number=group.number,
                shards=group.shards,
                length_s=self._window_s,
            )

    def _pass(self, window: Window) -> Mapping[str, Any]:
        context = self._session.sparkContext
        context.setJobGroup(_job_group(window.group), f"dispatch, window {window.number}")
        context.setLocalProperty("spark.scheduler.pool", "dispatch")
        lingering = self._session.range(0, 1, 1, 1).mapInArrow(window, SCHEMA)
        [row] = lingering.collect()
        if not row.report:
            raise WindowLost("its Python worker or its executor ended")
        report: dict[str, Any] = orjson.loads(bytes(row.report))
        return report

    def _listen(self) -> None:
        while not self._stopping.is_set():
            note = self._listener.next(LISTEN_S)
            try:
                if note is not None:
                    self._hear(note[1])
            except Exception:
                logger.exception("a report of dispatch cannot be used; going on")

    def _hear(self, report: Mapping[str, Any]) -> None:
        with self._lock:
            group = self._groups.get(report["group"])
            if group is None or report["number"] != group.number:
                return
            group.heard_s = time.monotonic()
            group.owned = _shards(report["owned"])
            group.is_open = _shards(report["open"])
            group.stuck = _shards(report["stuck"])
            self._count_in(group, report)
            if report["opened_ms"] is not None and not group.is_handed_over:
                group.is_handed_over = True
                if group.ended_ms is not None:
                    self._metrics.handed_over(max(0, report["opened_ms"] - group.ended_ms))

    def _ended(self, number: int, report: Mapping[str, Any] | None) -> None:
        with self._lock:
            group = self._groups[number]
            if report is not None and report["number"] == group.number:
                self._count_in(group, report)
                group.ended_ms = report["at_ms"]
            else:
                group.ended_ms = int(time.time() * 1000)
            self._metrics.absorb(group.counted._replace(gauges=()), group.counted)
            group.counted = Report()
            group.number = 0
            group.is_open = group.owned = group.stuck = frozenset()

    def _count_in(self, group: _Group, report: Mapping[str, Any]) -> None:
        counted = Report(*report["metrics"])
        self._metrics.absorb(counted, group.counted)
        group.counted = counted


def _job_group(number: int) -> str:
    return f"blackbox-dispatch-{number}"


def _shards(lists: Iterable[Iterable[Any]]) -> frozenset[Shard]:
    return frozenset(Shard(*parts) for parts in lists)
