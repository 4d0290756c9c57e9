"""Redis may lose all or some of its data: it is rebuilt from the journals, without an operator."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
import redis

from blackbox.embedded import EmbeddedRedis
from tests.support.world import World, both_engines_at_length, both_engines_in_proof, until

pytestmark = [pytest.mark.service, pytest.mark.fault, pytest.mark.timeout(600)]

CUTS = int(os.environ.get("BLACKBOX_TEST_CUTS", "3"))


@both_engines_in_proof
def test_redis_emptied_under_load_loses_and_duplicates_nothing(
    fragile_world: World,
) -> None:
    service = fragile_world.start_service().wait_ready()
    client = redis.Redis.from_url(fragile_world.redis.url)
    for _ in range(CUTS):
        fragile_world.ask(2000, within_s=3)
        client.flushall()
    verdict = fragile_world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict
    assert service.metric("blackbox_recoveries_total") > 4
    assert pending(client, fragile_world) == 0


@pytest.mark.proof
def test_an_index_whose_positions_are_deleted_is_rebuilt_while_the_service_runs(
    fragile_world: World,
) -> None:
    service = fragile_world.start_service().wait_ready()
    client = redis.Redis.from_url(fragile_world.redis.url)
    for _ in range(CUTS):
        fragile_world.ask(2000, within_s=3)
        for p in range(4):
            keys = (f"blackbox:{{{fragile_world.requests}-{p}}}:{n}" for n in ("state", "receipts"))
            client.unlink(*keys)
    verdict = fragile_world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict
    assert service.metric("blackbox_recoveries_total") > 4
    assert pending(client, fragile_world) == 0


@both_engines_at_length
def test_redis_restarted_from_a_truncated_aof_loses_and_duplicates_nothing(
    fragile_world: World,
) -> None:
    dice = random.Random(11)
    fragile_world.start_service().wait_ready()
    for _ in range(CUTS):
        fragile_world.ask(2000, within_s=3)
        moment = threading.Event()
        moment.wait(dice.uniform(0, 1.5))
        fragile_world.redis.kill()
        cut_aof(fragile_world.redis, dice)
        fragile_world.redis.start()
    verdict = fragile_world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict
    # A message is visible before it is removed from the index.
    client = redis.Redis.from_url(fragile_world.redis.url)
    until("nothing is pending", lambda: pending(client, fragile_world) == 0)


def cut_aof(server: EmbeddedRedis, dice: random.Random) -> None:
    """Lose a random tail of what Redis last wrote, as a power cut would."""
    aof = newest_aof(server.folder)
    size = aof.stat().st_size
    with aof.open("r+b") as file:
        file.truncate(dice.randint(size * 2 // 3, size))


def newest_aof(folder: Path) -> Path:
    parts = [*folder.glob("appendonlydir/*.incr.aof"), *folder.glob("appendonly.aof")]
    return max(parts, key=lambda part: part.stat().st_mtime)


def pending(client: redis.Redis, world: World) -> int:
    keys = [f"blackbox:{{{world.requests}-{p}}}:due" for p in range(4)]
    return sum(int(client.zcount(key, "-inf", "(inf")) for key in keys)
