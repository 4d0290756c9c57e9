"""Celery on Redis: tasks with an ETA."""

from __future__ import annotations

from bench.peers.contestant import Setting
from bench.peers.redis_peer import Spec

QUIET = ("--without-gossip", "--without-mingle", "--loglevel", "ERROR")

SPEC = Spec(
    name="Celery",
    kind="python",
    packages=("celery[redis]==5.7.0", "hiredis==3.5.0"),
    workers=(("celery", "-A", "with_celery", "worker", "--concurrency", "2", *QUIET),),
    client=("python", "schedule.py", "with_celery"),
    settings=(
        Setting("prefork, 2 processes", "the default: one for each core"),
        Setting("worker_prefetch_multiplier 128", "its guide to optimizing, for tasks that are short"),
        Setting("task_acks_late, task_reject_on_worker_lost", "else a killed worker loses its tasks"),
        Setting("visibility_timeout 120 s", "longer than each delay here, as its documentation asks; the default is an hour"),
        Setting("unacked_restore_throttle 1", "lost work is looked for each 10 s; by default each 100 s"),
        Setting("task_ignore_result", "its guide to optimizing: no results are needed"),
        Setting("one connection of the client for all tasks", "it has no call for many tasks"),
    ),
    recovery_s=145.0,
)  # fmt: skip
