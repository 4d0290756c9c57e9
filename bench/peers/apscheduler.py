"""APScheduler 3 with its Redis job store: jobs with a date."""

from __future__ import annotations

from bench.peers.contestant import Setting
from bench.peers.redis_peer import Spec

SPEC = Spec(
    name="APScheduler",
    kind="python",
    packages=("apscheduler==3.11.3", "redis==8.1.0", "hiredis==3.5.0"),
    workers=(("python", "with_apscheduler.py", "serve"),),
    client=("python", "with_apscheduler.py"),
    settings=(
        Setting("one process, which also adds the jobs", "its documentation forbids several with one job store"),
        Setting("ThreadPoolExecutor(20)", "as in the example of its documentation"),
        Setting("misfire_grace_time None", "else jobs that are late by a second are dropped"),
        Setting("coalesce", "each job runs once"),
    ),
    recovery_s=15.0,
    schedules_in_worker=True,
)  # fmt: skip
