"""A caller with large requests that are refused, beside one with valid requests."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import pytest
import redis

from tests.support.world import AT_LENGTH, World, both_engines_at_length, until

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
MOST, MOST_MS = 1.5, 0 if AT_LENGTH else 2000
"""Limits of the valid caller's lateness (p99): as a multiple of its lateness alone, and in ms beside other tests."""


@contextmanager
def written(world: World, value: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """Records of one caller that a process writes to partition 0, compressed; it ends when all are written."""
    # Apart and at the lowest priority: a caller has a machine of its own, and does not take the
    # processor of the service.
    kafka = world.kafka.bootstrap_servers
    command = [sys.executable, "-m", "tests.service.flood", kafka, world.requests, str(REFUSED)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        writer.stdin.write(value)
        writer.stdin.close()
        try:
            yield writer
            assert writer.wait() == 0
        finally:
            writer.kill()


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
    with memory_sampled(world) as used, written(world, value) as writer:
        while writer.poll() is None or not seen:
            seen.append(p99_ms(world))
        least = REFUSED - MOST_ADMITTED
        until("dead letters", lambda: service.metric("blackbox_dead_total") >= least, ENDED_S)

    print(
        f"{world.engine}: {REFUSED:,} refused ({why}), Redis grew by {max(used) / 1e6:.1f} MB at most, "
        f"p99 {calm} ms before, {sorted(seen)} ms beside"
    )
    assert max(used) < MOST_BYTES
    assert median(seen) <= max(MOST * calm, MOST_MS)
