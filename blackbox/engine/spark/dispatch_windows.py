"""The driver's side of dispatch: a long-running task for each group of shards, and its successors."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from blackbox.config.settings import Settings
from blackbox.engine.metrics import Metrics
from blackbox.engine.shard_pool import STUCK_S
from blackbox.engine.spark.dispatch_task import Window, lease_of, report_of
from blackbox.engine.spark.running_window import RunningWindow, lease_for, unheard
from blackbox.index.bus import Bus, Listener
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.records.errors import IndexLost
from blackbox.records.request import Shard
from blackbox.spark.job_failures import in_one_line
from blackbox.spark.spark_session import numbered
from blackbox.spark.task_io import REPORT, reports

logger = logging.getLogger("blackbox.spark.dispatch")

# Windows end so that load moves to new executors; a job for each check would add 0.3 s of lateness.
WINDOW_S = 600.0
WINDOW_SETTING = "spark.blackbox.window.seconds"
FRESH_S = 5.0  # how old a task's last report may be for its shards to count as open

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
LISTEN_S = 0.2
LOOK_S, SLOW_LOOK_S = 0.05, 0.2


class WindowLost(Exception):
    """A window ended early."""


@dataclass(eq=False, repr=False)
class DispatchWindows:
    """Keeps every assigned shard in the window of some task, until `stop`.

    Tasks follow the lease that `renew` repeats: they take and give up shards while they run. A window
    that has lasted 10 minutes gets a successor.
    """

    session: SparkSession
    settings: Settings
    access: KafkaAccess
    metrics: Metrics
    run: str

    def __post_init__(self) -> None:
        self._window_s = float(self.session.conf.get(WINDOW_SETTING, str(WINDOW_S)) or WINDOW_S)
        url = self.settings.redis_url.get_secret_value()
        self._bus = Bus(url, self.settings.group_id)
        self._listener = Listener(url, self.settings.group_id, (report_of(self.run),))
        self._topics = list(self.settings.topics)
        self._is_fenced = self.settings.delivery == "exactly-once"
        self._shards: frozenset[Shard] = frozenset()
        self._count = 0
        self._number = 0
        self._current: dict[int, int] = {}
        self._given_up: dict[int, tuple[int, int]] = {}
        self._running: dict[int, RunningWindow] = {}
        self._keepers: dict[int, Thread] = {}
        self._lock = Lock()
        self._bus_lock = Lock()  # a Bus is not safe for two threads; several renew the lease
        self._stopping = Event()
        self._listening = Thread(target=self._listen, name="reports", daemon=True)

    def start(self, groups: int) -> None:
        """Launch `groups` tasks; they take shards when some are assigned."""
        self._listening.start()
        self.assign((), groups)

    def assign(self, shards: Iterable[Shard], groups: int) -> bool:
        """Spread these shards over `groups` groups, and notify the tasks; False if that is not possible."""
        with self._lock:
            self._shards, self._count = frozenset(shards), groups
            for group in range(groups):
                if group not in self._keepers:
                    keeper = Thread(
                        target=self._keep_window, args=(group,), name=f"group-{group}", daemon=True
                    )
                    self._keepers[group] = keeper
                    keeper.start()
        return self.renew()

    def renew(self) -> bool:
        """Send the tasks their lease, every second: the driver lives, and these are their shards; False if it fails."""
        with self._lock:
            # 0: its tasks have higher numbers, and wait
            wanted = {n: (self._current.get(n, 0), self._shards_of(n)) for n in range(self._count)}
            lease = lease_for(wanted, self._running.values(), is_fenced=self._is_fenced)
        try:
            with self._bus_lock:
                self._bus.send(lease_of(self.run), lease)
        except IndexLost as reason:
            logger.warning("cannot renew the lease of dispatch: %s", reason)
            return False
        return True

    def wait_given_up(self, shards: Iterable[Shard], timeout_s: float) -> bool:
        """Wait until no task owns any of these shards; False when that takes longer."""
        given_up = frozenset(shards)
        deadline = time.monotonic() + timeout_s
        while any(window.owned & given_up for window in self._fresh()):
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
        return True

    def open_shards(self) -> set[Shard]:
        """The shards that tasks have reported open within the last seconds."""
        return {shard for window in self._fresh() for shard in window.is_open}

    def why_not_open(self) -> dict[Shard, str]:
        """The reason that tasks report for each shard that could not be opened."""
        fresh = self._fresh()
        return {shard: why for window in fresh for shard, why in window.why_not_open.items()}

    def stuck(self) -> set[Shard]:
        """The shards whose task reports them as stuck, or has not reported for a minute."""
        long_ago_s = time.monotonic() - STUCK_S
        with self._lock:
            silent = {
                shard
                for window in self._running.values()
                if max(window.heard_s, window.began_s) < long_ago_s
                and self._current.get(window.group) == window.number  # others may wait for a slot
                for shard in self._shards_of(window.group)
            }
        return silent | {shard for window in self._fresh() for shard in window.stuck}

    def unheard(self) -> set[int]:
        """The windows that have not been heard of since their launch, while no other has their shards."""
        with self._lock:
            return unheard(one for one in self._running.values() if one.group < self._count)

    def stop(self, timeout_s: float) -> None:
        """Let every task finish its ticks and end; cancel those that take longer, or cannot be notified."""
        self._stopping.set()
        can_hear = self.assign((), 0)  # a lease without groups ends every task
        deadline = time.monotonic() + (timeout_s if can_hear else 0.0)
        for keeper in self._keepers.values():
            keeper.join(max(0.0, deadline - time.monotonic()))
        for number, running in list(self._running.items()):
            logger.warning("window %d did not end in time; cancelling it", number)
            with suppress(Py4JError, OSError):
                self.session.sparkContext.cancelJobGroup(running.job_group)
        self._listening.join(1.0)
        self._bus.close()
        self._listener.close()

    def _shards_of(self, group: int) -> frozenset[Shard]:
        # By the topic's place as well: partitions 0 of several topics go to different groups.
        return frozenset(
            shard
            for shard in self._shards
            if (self._topics.index(shard.topic) + shard.partition) % max(1, self._count) == group
        )

    def _fresh(self) -> list[RunningWindow]:
        oldest_s = time.monotonic() - FRESH_S
        with self._lock:
            return [window for window in self._running.values() if window.heard_s >= oldest_s]

    def _keep_window(self, group: int) -> None:
        """Keep one window of the group running, and launch its successor in time."""
        present: RunningWindow | None = None
        following: RunningWindow | None = None
        pause_s = FIRST_PAUSE_S
        while present is not None or not self._stopping.is_set():
            if following is not None and following.has_ended:
                self._log_failure(following, pause_s)
                following = None
                pause_s = self._pause(pause_s)
            if present is not None and present.has_ended:
                failed = present.failure is not None
                self._log_failure(present, pause_s)
                lasted_s = time.monotonic() - present.began_s
                present, following = following, None
                self.renew()  # its shards may have waited for its end
                if present is None and failed:
                    pause_s = self._pause(FIRST_PAUSE_S if lasted_s > LONGEST_PAUSE_S else pause_s)
            elif following is not None and following.heard_s > following.began_s:
                self._make_current(following)  # it has a slot: no shard waits for Spark
            if not self._stopping.is_set() and group < self._count:
                if present is None:
                    present = self._launch(group)
                elif following is None and time.monotonic() - present.began_s > self._window_s:
                    following = self._launch(group)
                if present is not None and following is None:
                    self._make_current(present)
            # Once `_stopping` is set, waiting for it returns at once.
            self._stopping.wait(SLOW_LOOK_S) if not self._stopping.is_set() else time.sleep(LOOK_S)

    def _launch(self, group: int) -> RunningWindow:
        with self._lock:
            self._number += 1
            # A successor gets no shards from its launch: its predecessor still owns them. Without
            # fencing no window does: until it has a slot, they may be another group's.
            is_first = not any(window.group == group for window in self._running.values())
            window = Window(
                run=self.run,
                settings=self.settings,
                access=self.access,
                group=group,
                number=self._number,
                shards=self._shards_of(group) if is_first and self._is_fenced else frozenset(),
                length_s=2 * self._window_s,
            )
            running = self._running[window.number] = RunningWindow(window.number, group)
        # A thread for each job: its group and its scheduler pool are properties of the thread.
        try:
            Thread(target=self._run_job, args=(window, running), daemon=True).start()
        except RuntimeError as failure:  # the process has no thread left: retried, as any failure
            running.failure = failure
            self._end(running)
        return running

    def _run_job(self, window: Window, running: RunningWindow) -> None:
        try:
            context = self.session.sparkContext
            context.setJobGroup(running.job_group, f"dispatch, group {window.group}")
            context.setLocalProperty("spark.scheduler.pool", "dispatch")
            task = numbered(self.session, 1).mapInArrow(window, REPORT)
            found = reports(task.collect())
            if not found:  # Spark's second attempt at a task returns nothing
                raise WindowLost("its Python worker or its executor ended")
            [running.last] = found
        except Exception as failure:
            running.failure = failure
        self._end(running)

    def _make_current(self, window: RunningWindow) -> None:
        with self._lock:
            if self._current.get(window.group) == window.number:
                return
            self._current[window.group] = window.number
        self.renew()

    def _end(self, window: RunningWindow) -> None:
        with self._lock:
            if window.last is not None:
                window.count(window.last, self.metrics)
            ended_ms = window.last["at_ms"] if window.last else int(time.time() * 1000)
            self._given_up[window.group] = window.number, ended_ms
            # Counts nothing again, and removes the gauges that the task showed.
            self.metrics.absorb(window.counted._replace(gauges=()), window.counted)
            for other in self._running.values():
                if other is not window:  # it may show the same shards
                    self.metrics.absorb(other.counted, other.counted)
            del self._running[window.number]
            for other in self._running.values():
                self._measure_handover(other)
            window.has_ended = True

    def _log_failure(self, window: RunningWindow, pause_s: float) -> None:
        if window.failure is not None and not self._stopping.is_set():
            logger.warning(
                "dispatch group %d failed: %s; retrying in %.1f s", window.group, in_one_line(window.failure), pause_s,
            )  # fmt: skip

    def _pause(self, pause_s: float) -> float:
        """Wait, and return how long the next pause is."""
        self._stopping.wait(pause_s)
        return min(LONGEST_PAUSE_S, pause_s * 2)

    def _listen(self) -> None:
        while not self._stopping.is_set():
            note = self._listener.next(LISTEN_S)
            try:
                if note is not None:
                    self._take_report(note[1])
            except Exception:
                logger.exception("cannot use a dispatch report; continuing")

    def _take_report(self, report: Mapping[str, Any]) -> None:
        with self._lock:
            if (window := self._running.get(report["number"])) is not None:
                window.hear(report)
                window.count(report, self.metrics)
                self._measure_handover(window)

    def _measure_handover(self, window: RunningWindow) -> None:
        """Record how long no task owned the group's shards, once both windows have reported it."""
        number, given_up_ms = self._given_up.get(window.group, (window.number, 0))
        if window.opened_ms is not None and number < window.number:
            del self._given_up[window.group]
            self.metrics.handed_over(max(0, window.opened_ms - given_up_ms))
