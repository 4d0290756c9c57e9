"""asynq: scheduled tasks in Redis, a server in Go."""

from __future__ import annotations

from bench.peers.contestant import Setting
from bench.peers.redis_peer import Spec

SPEC = Spec(
    name="asynq",
    kind="go",
    packages=("asynq@0.26.0",),
    workers=(("program", "work"),),
    client=("program",),
    settings=(
        Setting("one server, Concurrency 100", "Go uses all cores; the tasks are short"),
        Setting("DelayedTaskCheckInterval 100 ms", "the default of 5 s is the lateness of a task"),
        Setting("TaskCheckInterval 200 ms", "the shortest: how soon an idle server sees new tasks"),
        Setting("50 clients at once in one process", "it has no call for many tasks"),
        Setting(
            "due times in milliseconds", "its interface has them; it rounds them down to seconds"
        ),
        Setting("RetryDelayFunc 1 s", "else work of a killed server waits for a back-off, too"),
    ),
    # A lease of 30 s, and a check each minute.
    recovery_s=105.0,
)
