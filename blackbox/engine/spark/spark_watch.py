"""Notices that Spark runs no tasks any more although its JVM lives, so that only a new driver helps."""

from __future__ import annotations

from collections.abc import Collection

from pyspark.sql import SparkSession

from blackbox.config.settings import Half, Settings

# As long as an executor may take to be replaced.
NO_SLOTS_S = 60
# As long as an executor may take that Spark allocates: its pod may wait for a new node.
NEW_NODE_S = 300
# As long as a first task may take to load its modules on a busy machine.
SILENCE_S = 120


class EngineFailed(Exception):
    """Spark ended, or does nothing any more, and this application cannot go on without it."""


def spark_watch(session: SparkSession, settings: Settings, only: Half | None) -> SparkWatch:
    """The watch of a driver that does all work, or `only` one half."""
    # As Spark has it: an operator may set it in spark-defaults.conf, and Spark reads it in any case.
    conf = session.sparkContext.getConf()
    allocates = str(conf.get("spark.dynamicAllocation.enabled", "false")).strip().lower() == "true"
    # Intake alone runs no task without new requests, so Spark may take all its executors back.
    return SparkWatch(settings.spark_master, may_be_idle=allocates and only == "intake")


class SparkWatch:
    """Counts for how many seconds Spark has had no slots, answered nothing, or not begun a window.

    It counts its own looks instead of comparing times: after a pause of the whole process, nothing
    could have answered yet. With `may_be_idle`, having no slots is no fault while there is no work.
    """

    def __init__(self, master: str, *, may_be_idle: bool = False) -> None:
        self._master = master
        self._may_be_idle = may_be_idle
        self._slots = 0
        self._had_slots = False
        self._unanswered = 0
        self._without_slots = 0
        self._unheard: dict[int, int] = {}

    def answered(self, slots: int) -> None:
        """Note that Spark's JVM has answered, and how many tasks it can run at once."""
        self._unanswered = 0
        self._slots = slots
        self._had_slots |= slots > 0

    def look(self, unheard: Collection[int], *, has_work: bool) -> None:
        """Look, once a second. Raises EngineFailed if Spark does nothing any more.

        `unheard` are the numbers of the windows that should have begun, and have not been heard of.
        `has_work`: a batch of intake runs, or waits for an executor.
        """
        self._unanswered += 1
        if self._unanswered > SILENCE_S:
            raise EngineFailed(f"Spark's JVM has not answered for {SILENCE_S} s")
        # A driver that never had an executor waits for one, outside of the group. One that has lost them all
        # may wait in vain: a master that was restarted does not know this application.
        needs_slots = has_work or not self._may_be_idle
        is_without = self._had_slots and not self._slots and needs_slots
        self._without_slots = self._without_slots + 1 if is_without else 0
        limit_s = NEW_NODE_S if self._may_be_idle else NO_SLOTS_S
        if self._without_slots > limit_s:
            raise EngineFailed(
                f"Spark's master {self._master} has given this application no executor for {limit_s} s"
            )
        # Without slots, they wait for an executor.
        self._unheard = {n: self._unheard.get(n, 0) + 1 for n in unheard if self._slots}
        if max(self._unheard.values(), default=0) > SILENCE_S:
            raise EngineFailed(
                f"Spark has {self._slots} slots, and has not begun a window of dispatch for {SILENCE_S} s"
            )
