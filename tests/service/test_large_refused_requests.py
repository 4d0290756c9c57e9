"""A caller with large requests that are refused, beside one with valid requests."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import pytest
import redis
from confluent_kafka import Producer

from tests.world import AT_LENGTH, World, both_engines_at_length, until

pytestmark = [pytest.mark.service, pytest.mark.timeout(7200)]

REFUSED = 1_000_000 if AT_LENGTH else 3_000
GARBAGE = b"{" * 100_000
LARGE = '{"topic": "%s", "message": "%s", "countdown": 86400}'
RULES = "[callers.flood]\nmost_pending = 1\n"
# Quotas are approximate.
MOST_ADMITTED = 10
GOOD, GOOD_S = (3000, 6.0) if AT_LENGTH else (1000, 3.0)
FROM_S = 2.0
# About 1,000 per second: each record is read from Kafka a second time for its dead letter.
ENDED_S = 3600 if AT_LENGTH else 600
MOST_BYTES = 200_000_000 if AT_LENGTH else 50_000_000
MOST, MOST_MS = 1.5, 250 if AT_LENGTH else 2000
"""Limits of the valid caller's lateness (p99): as a multiple of its lateness alone, or in ms; larger beside other tests."""


@contextmanager
def written(world: World, value: bytes) -> Iterator[threading.Event]:
    """Records of one caller that a thread writes to partition 0, compressed; the event is set when all are written."""
    is_done = threading.Event()
    settings = {"bootstrap.servers": world.kafka.bootstrap_servers, "compression.type": "lz4"}

    def write() -> None:
        # Of this thread and its client only: a caller has a machine of its own, and does not take
        # the processor of the service.
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        producer = Producer(settings | {"linger.ms": 20, "enable.idempotence": True})
        for _ in range(REFUSED):
            while len(producer) > 2000:
                producer.poll(0.01)
            headers: list[tuple[str, str | bytes | None]] = [("CALLER_SERVICE", b"flood")]
            producer.produce(world.requests, value, partition=0, headers=headers)
        assert producer.flush(60) == 0
        is_done.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield is_done
    finally:
        writer.join()


@contextmanager
def memory_sampled(world: World) -> Iterator[list[int]]:
    """Samples of the growth of Redis, in bytes."""
    client = redis.Redis.from_url(world.redis.url)
    is_over, grown = threading.Event(), list[int]()
    before = client.info("memory")["used_memory"]

    def look() -> None:
        while not is_over.wait(0.02):
            grown.append(client.info("memory")["used_memory"] - before)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield grown
    finally:
        is_over.set()
        watcher.join()
        client.close()


def p99_ms(world: World) -> int:
    """p99 of the valid caller's lateness, in all partitions but the first. Raises unless each is delivered once, and none early."""
    before = len(world.asked)
    for partition in range(1, world.partitions):
        share = GOOD // (world.partitions - 1)
        world.ask(share, from_s=FROM_S, within_s=FROM_S + GOOD_S, partition=partition)
    world.wait_delivered(120)
    verdict = world.verdict(late_from=before)
    assert (verdict.lost, verdict.duplicated, verdict.early_ms) == ([], [], []), verdict
    return verdict.late_at(0.99)


@pytest.mark.proof
@both_engines_at_length
@pytest.mark.parametrize("why", ["invalid", "over-quota"])
def test_large_refused_requests_neither_fill_redis_nor_delay_others(world: World, why: str) -> None:
    valid = (LARGE % (world.targets[0], "x" * 100_000)).encode()
    value = GARBAGE if why == "invalid" else valid
    config = world.folder / "compressing.properties"
    config.write_text("compression.type=lz4\n")
    letters = f"{world.name}.refused"  # not read here: a million of them are 100 GB
    rules = world.folder / "callers.toml"
    rules.write_text(RULES)
    service = world.start_service(
        kafka_config=config, dead_letter_topic=letters, callers_file=rules
    )
    service.wait_ready()
    p99_ms(world)  # warm-up
    calm = p99_ms(world)
    seen = list[int]()
    with memory_sampled(world) as used, written(world, value) as is_done:
        while not is_done.is_set() or not seen:
            seen.append(p99_ms(world))
        least = REFUSED - MOST_ADMITTED
        until("dead letters", lambda: service.metric("blackbox_dead_total") >= least, ENDED_S)

    print(
        f"{world.engine}: {REFUSED:,} refused ({why}), Redis grew by {max(used) / 1e6:.1f} MB at most, "
        f"p99 {calm} ms before, {sorted(seen)} ms beside"
    )
    assert max(used) < MOST_BYTES
    assert median(seen) <= max(MOST * calm, MOST_MS)
