"""Contestant: the same work of Kafka and Redis without any logic. All bytes are prepared."""

from __future__ import annotations

import time
from typing import Any

from confluent_kafka import TopicPartition

from bench.ground import HEADERS, MESSAGE_BYTES, TARGET, Ground, Stopwatch
from blackbox.index.connection import RedisSession, pack, pool
from blackbox.index.keys import Keys
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.records.entry import Entry, encode
from blackbox.records.request import member

READ = 2000
BODY = b"." * MESSAGE_BYTES
ADDED = [*HEADERS, ("blackbox-id", b"0" * 36), ("blackbox-due-ms", b"1" * 13), ("blackbox-source", b"TB/0@100000")]  # fmt: skip


def run(ground: Ground, batch: int, *, exactly_once: bool) -> tuple[float, float]:
    """Seconds to read all requests and fill Redis, and to empty Redis into Kafka."""
    ground.empty_redis()
    keys = Keys(ground.shard)
    session = RedisSession(pool(ground.stack.redis_url))
    kafka = KafkaAccess(ground.stack.bootstrap_servers, "bench")
    puts = [_put(keys, first, min(READ, ground.count - first)) for first in range(0, ground.count, READ)]  # fmt: skip
    intake_s = _fill(kafka, session, puts, ground)
    # Prepared before the stopwatch runs: this contestant shows the time of Kafka and Redis alone.
    removals = [_removal(keys, first, batch) for first in range(0, ground.count, batch)]
    drain_s = _drain(kafka, session, keys, removals, batch, exactly_once)
    session.close()
    return intake_s, drain_s


def _fill(
    kafka: KafkaAccess, session: RedisSession, puts: list[list[bytes]], ground: Ground
) -> float:
    consumer = kafka.consumer(
        **{"fetch.wait.max.ms": 20, "queued.min.messages": 20_000, "fetch.queue.backoff.ms": 1}
    )
    watch = Stopwatch()
    consumer.assign([TopicPartition("TB", 0, 0)])
    read = 0
    waiting = list(reversed(puts))
    while read < ground.count:
        first = consumer.poll(10)
        if first is not None:
            found = [first, *consumer.consume(READ - 1, timeout=0)]
            # Each accessor creates a Python object, as in any reader of these records.
            read += len(
                [(m.offset(), m.timestamp(), m.key(), m.value(), m.headers()) for m in found]
            )
        while waiting and (len(puts) - len(waiting) + 1) * READ <= read:
            session.run(waiting.pop())
    for commands in reversed(waiting):
        session.run(commands)
    seconds = watch.read_s()
    consumer.close()
    return seconds


def _drain(
    kafka: KafkaAccess,
    session: RedisSession,
    keys: Keys,
    removals: list[tuple[bytes, list[bytes]]],
    batch: int,
    exactly_once: bool,
) -> float:
    # The steps of dispatch: position and due members, payloads, messages, receipt, commit, removal.
    producer = kafka.producer("bench-raw" if exactly_once else None)
    if exactly_once:
        producer.init_transactions(30)
    receipt = b"x" * 20 * batch
    far = time.time_ns() // 1_000_000 + 1_000_000
    look = pack("ZRANGE", keys.due, "-inf", far, "BYSCORE", "LIMIT", 0, batch)
    watch = Stopwatch()
    for mget, removal in removals:
        session.run([look])
        session.run([mget])
        if exactly_once:
            producer.begin_transaction()
        for _ in range(batch):
            producer.produce(TARGET, BODY, headers=ADDED)
        # A receipt names the offsets of the messages, which only the flush returns.
        producer.flush(30)
        producer.produce("TB.receipts", receipt, "TB-0", 0)
        producer.flush(30)
        if exactly_once:
            producer.commit_transaction(30)
        session.run(removal)
    return watch.read_s()


def _put(keys: Keys, first: int, count: int) -> list[bytes]:
    headers: Any = HEADERS
    entry = encode(Entry(TARGET, BODY, 1_700_000_000_000, None, headers, "bench"))
    names = [member(offset) for offset in range(first, first + count)]
    commands = [pack("MULTI")]
    commands += [pack("SET", keys.message(name), entry, "EX", 604_800) for name in names]
    scored = [part for name in names for part in (1_700_000_000_000, name)]
    return [*commands, pack("ZADD", keys.due, *scored), pack("EXEC")]


def _removal(keys: Keys, first: int, count: int) -> tuple[bytes, list[bytes]]:
    names = [member(offset) for offset in range(first, first + count)]
    messages = [keys.message(name) for name in names]
    commands = [
        pack("MULTI"), pack("ZREM", keys.due, *names), pack("UNLINK", *messages), pack("EXEC"),
    ]  # fmt: skip
    return pack("MGET", *messages), commands
