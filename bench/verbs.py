"""Contestant: blackbox's own verbs, on one shard, in one thread."""

from __future__ import annotations

import time
from functools import partial
from itertools import islice

from bench.ground import Ground, Stopwatch
from blackbox.core.batch_limit import BatchLimit
from blackbox.core.dispatch import Dispatch
from blackbox.core.follow_ups import FollowUps
from blackbox.core.intake import Intake
from blackbox.core.lost_payload import reread
from blackbox.core.parsing import parse_batch
from blackbox.core.plan import Positions
from blackbox.core.triage import Triage
from blackbox.formats import Options, make_format
from blackbox.index.connection import pool
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.shard_writer import ShardWriter
from blackbox.journal.target_topics import TargetTopics


def run(ground: Ground, batch: int, *, exactly_once: bool) -> tuple[float, float]:
    """Seconds to store all requests, and to deliver them all."""
    ground.empty_redis()
    kafka = KafkaAccess(ground.stack.bootstrap_servers, "bench")
    journal = ShardJournal(ground.shard, kafka)
    index = ShardIndex(ground.shard, pool(ground.stack.redis_url), grace_s=604_800)
    index.begin(Positions(0, journal.receipt_bounds().end))
    format = make_format("countdown", Options(max_countdown_s=86_400, own_topics=lambda _: False))
    intake = Intake(format, index, None)
    end = journal.request_bounds().end
    watch = Stopwatch()
    batches = journal.requests(0, end)
    ahead = [parse_batch(format, next(batches), _now_ms(), None)]

    # As in the service: the next batch is parsed while Redis is busy with this one.
    def read_ahead() -> None:
        ahead.extend(parse_batch(format, batch, _now_ms(), None) for batch in islice(batches, 1))

    while ahead:
        intake.store(ahead.pop(), _now_ms(), read_ahead)
    intake_s = watch.read_s()
    journal.close()

    writer = ShardWriter(ground.shard, kafka, exactly_once=exactly_once)
    writer.open()
    triage = Triage(
        shard=ground.shard,
        targets=TargetTopics(kafka),
        journal=journal,
        reread=partial(reread, format),
        dead_letter_topic="blackbox.dead-letters",
        follow_ups=FollowUps(ground.shard, format, journal),
    )
    dispatch = Dispatch(index, writer, triage, BatchLimit(batch))
    watch = Stopwatch()
    delivered = 0
    while delivered < ground.count:
        delivered += len(dispatch.tick(_now_ms()).due_ms)
    drain_s = watch.read_s()
    writer.close()
    index.close()
    return intake_s, drain_s


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
