"""Promotion of all shards at once, for a run by hand or by cron."""

from __future__ import annotations

from contextlib import closing

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from blackbox.config.settings import Settings
from blackbox.index.redis_servers import RedisServers
from blackbox.jobs.promote.tasks import Outcome, PromoteShards
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.topics import Topics
from blackbox.records.clock import Clock
from blackbox.records.errors import RecoveryRequired
from blackbox.records.request import Shard
from blackbox.spark.job_failures import in_one_line
from blackbox.spark.spark_session import numbered
from blackbox.spark.task_io import REPORT, reports


def promote(session: SparkSession, settings: Settings, access: KafkaAccess) -> list[Outcome]:
    """Promote every shard once. Raises RecoveryRequired when Kafka, Redis or Spark does not answer."""
    names = list(settings.topics)
    counts = Topics(access.admin()).partitions(names)
    shards = tuple(Shard(name, p) for name in names for p in range(counts.get(name, 0)))
    task = PromoteShards(settings, access, shards, _now_ms(settings))
    rows = numbered(session, len(shards)).mapInArrow(task, REPORT)
    try:
        return reports(rows.collect())
    except (PySparkException, Py4JError) as failure:
        raise RecoveryRequired(in_one_line(failure)) from failure


def _now_ms(settings: Settings) -> int:
    clock = Clock()
    with closing(RedisServers(settings.redis_url.get_secret_value())) as server:
        clock.observe(server.now_ms())
    return clock.earliest_ms()
