"""A connection to Kafka that is too slow for a batch of the usual size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blackbox.embedded import EmbeddedError, EmbeddedRedis
from tests.conftest import missing
from tests.servers.narrow_kafka import NarrowKafka, narrow_kafka
from tests.support.world import World

pytestmark = [pytest.mark.service, pytest.mark.timeout(400)]

BYTES_PER_S = 50_000
REQUESTS, SIZE = 1000, 1000
"""In one batch, they take 20 s; Kafka's client waits 15 s."""


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[NarrowKafka]:
    try:
        with narrow_kafka(tmp_path / "kafka", BYTES_PER_S) as narrow:
            yield narrow
    except EmbeddedError as error:
        missing(str(error))


@pytest.mark.proof
def test_a_connection_that_is_too_slow_for_a_batch_delivers_smaller_ones(
    narrow: NarrowKafka, own_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    with World(narrow.kafka, own_redis, tmp_path, partitions=1) as world:
        service = world.start_service(kafka_bootstrap_servers=narrow.bootstrap_servers)
        service.wait_ready()
        world.ask(REQUESTS, within_s=3.0, from_s=3.0, size=SIZE)

        verdict = world.wait_delivered(timeout_s=240)

    assert verdict.is_exact, verdict
    assert "aborted" in service.log.read_text(), "a batch was too large"
