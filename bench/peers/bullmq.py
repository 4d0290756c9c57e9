"""BullMQ: delayed jobs in Redis, workers in Node."""

from __future__ import annotations

from bench.peers.contestant import Setting
from bench.peers.redis_peer import Spec

SPEC = Spec(
    name="BullMQ",
    kind="node",
    packages=("bullmq@6.7.0", "ioredis@6.0.0"),
    workers=(("node", "bullmq.mjs", "work"), ("node", "bullmq.mjs", "work")),
    client=("node", "bullmq.mjs"),
    settings=(
        Setting("two worker processes", "its documentation recommends several; Node uses one core"),
        Setting("concurrency 100", "its documentation recommends a high factor for jobs that are short"),
        Setting("addBulk of 1,000 jobs", "its documentation: one round trip, and atomic"),
        Setting("removeOnComplete", "its guide to production: else ended jobs are kept for ever"),
        Setting("maxRetriesPerRequest null", "its guide to production, for workers"),
        Setting("stalledInterval 30 s, maxStalledCount 1", "the defaults: lost work returns after 30 s"),
    ),
    recovery_s=75.0,
)  # fmt: skip
