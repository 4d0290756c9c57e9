"""APScheduler's jobs, at intervals that a step of the host's clock does not change."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import STATE_STOPPED

logger = logging.getLogger("blackbox.engine.scheduler")

LOOK_S = 1.0
STEP_S = 0.5
"""A change of the clock by less than this only moves a run."""


class SteadyScheduler(BackgroundScheduler):  # type: ignore[misc]
    """Runs jobs at intervals, each of them once at a time; several missed runs become one.

    APScheduler compares times of the host's clock: after a step back it would run nothing until the
    clock shows the earlier time again, and after a step forward it would list each run in between.
    This one looks at the clock every second, and moves all next runs with it.
    """

    def __init__(self) -> None:
        # A run that is late happens all the same, once.
        super().__init__(
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None}
        )
        self._ahead_s = _wall_ahead_s()

    def _main_loop(self) -> None:
        wait_s = 0.0
        while self.state != STATE_STOPPED:
            self._event.wait(wait_s)
            self._event.clear()
            self._follow_the_clock()
            next_s = self._process_jobs()
            wait_s = LOOK_S if next_s is None else min(LOOK_S, next_s)

    def _follow_the_clock(self) -> None:
        before_s, self._ahead_s = self._ahead_s, _wall_ahead_s()
        step_s = self._ahead_s - before_s
        if abs(step_s) < STEP_S:
            return
        logger.warning(
            "the clock of this host was set %s by %.1f s; periodic work continues",
            "back" if step_s < 0 else "forward", abs(step_s),
        )  # fmt: skip
        now, step = datetime.now(UTC), timedelta(seconds=step_s)
        for job in self.get_jobs():
            # The trigger of an interval counts from the last run, not from the clock. A job that ran after the
            # step, but before this look, is due by the new clock already.
            latest = now + job.trigger.interval
            with suppress(JobLookupError):  # a job may have removed itself
                self.modify_job(job.id, next_run_time=min(job.next_run_time + step, latest))


def _wall_ahead_s() -> float:
    """How far the host's clock is ahead of the one that is never set."""
    return time.time() - time.monotonic()
