"""saq: scheduled jobs in Redis, asynchronous workers in Python."""

from __future__ import annotations

from bench.peers.contestant import Setting
from bench.peers.redis_peer import Spec

SPEC = Spec(
    name="saq",
    kind="python",
    packages=("saq[redis,hiredis]==0.26.4", "typing_extensions==4.16.0"),
    workers=(("saq", "with_saq.settings", "--workers", "2"),),
    client=("python", "schedule.py", "with_saq"),
    settings=(
        Setting("--workers 2", "one process for each core"),
        Setting(
            "concurrency 10",
            "the default; the jobs that a killed worker had begun return one by one, 5 s apart",
        ),
        Setting("schedule timer 1 s", "the default, and the shortest: a whole number of seconds"),
        Setting(
            "sweep timer 60 s",
            "the default; a sweep that takes longer than this runs twice at once",
        ),
        Setting("retries 3", "with the default of 1, a job of a killed worker is given up"),
        Setting("ttl -1", "else each result is stored for ten minutes"),
        Setting("due times in whole seconds", "`scheduled` is one"),
    ),
    # For twenty jobs that had begun.
    recovery_s=200.0,
    whole_seconds=True,
)
