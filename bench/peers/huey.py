"""huey on Redis: tasks with an ETA."""

from __future__ import annotations

from bench.peers.contestant import Setting
from bench.peers.redis_peer import Spec

SPEC = Spec(
    name="huey",
    kind="python",
    packages=("huey==3.5.4", "redis==8.1.0", "hiredis==3.5.0"),
    workers=(
        ("huey_consumer", "with_huey.huey", "-k", "process", "-w", "2", "--no-periodic", "--quiet"),
    ),
    client=("python", "schedule.py", "with_huey"),
    settings=(
        Setting("RedisHuey", "workers block on the queue, so a polling interval does not apply"),
        Setting("2 worker processes", "one for each core"),
        Setting(
            "`delay`, not `eta`",
            "a naive `eta` is rounded down to seconds, which makes tasks early",
        ),
        Setting("scheduler interval 1 s", "the default, and the shortest"),
        Setting("results=False", "no results are needed"),
        Setting("--no-periodic", "there are no periodic tasks"),
    ),
    recovery_s=20.0,
)
