"""The progress of a load, which Kafka keeps as offsets of consumer groups."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.piece_writer import PieceProgressReader
from tests.servers.mock_cluster import OFFSET_FETCH, mock_cluster


@pytest.mark.parametrize(
    "error", [KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE]
)
def test_a_coordinator_that_moves_while_progress_is_read_ends_no_process(error: int) -> None:
    with mock_cluster() as cluster:
        cluster.answer(OFFSET_FETCH, error)
        progress = PieceProgressReader(KafkaAccess(cluster.bootstrap_servers, "blackbox"), "TB")

        assert progress.of(["blackbox.load.0123abcd.0", "blackbox.load.0123abcd.1"]) == {}
