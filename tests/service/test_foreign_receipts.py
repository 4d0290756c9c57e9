"""Records in the receipts topic that no owner of the shard wrote."""

from __future__ import annotations

import json

import pytest
import redis
from confluent_kafka import Producer

from blackbox.journal.topics import receipts_topic
from blackbox.records.request import Shard
from tests.support.world import World, both_engines_at_length, until

pytestmark = pytest.mark.service

REQUESTS = 40


@pytest.mark.proof
@both_engines_at_length
def test_foreign_records_in_the_receipts_topic_end_no_request(fragile_world: World) -> None:
    world = fragile_world
    service = world.start_service().wait_ready()
    world.ask(REQUESTS, within_s=16, from_s=14, partition=0)
    until("all are stored", lambda: service.metric("blackbox_pending") == REQUESTS)
    service.kill()
    forge(world)
    with redis.Redis.from_url(world.redis.url) as client:
        client.flushall()

    service = world.start_service().wait_ready()

    verdict = world.wait_delivered()
    assert verdict.is_exact, verdict
    assert "skipping a record that is not a receipt, and 3 more after it" in service.log.read_text()


def forge(world: World) -> None:
    """Write what another deployment would deliver to this topic, and other records."""
    topic = receipts_topic(world.requests)
    shard = Shard(world.requests, 0)
    ended = [asked.place[1] for asked in world.asked.values()]
    receipt = json.dumps({"v": 1, "at_ms": 5, "dead": ended}).encode()
    producer = Producer({"bootstrap.servers": world.kafka.bootstrap_servers})
    producer.produce(
        topic, receipt, str(shard), partition=0, headers={"blackbox-id": b"of a message"}
    )
    for key, value in (("somebody", receipt), (str(shard), b"not JSON"), (str(shard), None)):
        producer.produce(topic, value, key, partition=0)
    assert producer.flush(10) == 0
