"""arq: deferred jobs in Redis, asynchronous workers in Python."""

from __future__ import annotations

from bench.peers.contestant import Setting
from bench.peers.redis_peer import Spec

WORKER = ("arq", "with_arq.WorkerSettings", "--custom-log-dict", "with_arq.LOG")

SPEC = Spec(
    name="arq",
    kind="python",
    packages=("arq==0.28.0",),
    workers=(WORKER, WORKER),
    client=("python", "schedule.py", "with_arq"),
    settings=(
        Setting("two workers", "one for each core"),
        Setting("max_jobs 200, queue_read_limit 1,000", "by default a poll starts 100 jobs at most"),
        Setting("poll_delay 0.05 s", "the default of 0.5 s limits rate and lateness"),
        Setting("keep_result 0", "else each result is stored for an hour"),
        Setting("job_timeout 10 s", "work of a killed worker returns 10 s after it; the default is 300 s"),
        Setting("log level ERROR", "by default it logs two lines for each job"),
        Setting("50 calls of enqueue_job at once", "it has no call for many jobs"),
    ),
    recovery_s=30.0,
)  # fmt: skip
