"""What the tests of the verbs share: one shard, whose index is the real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fakeredis
import pytest
import redis

from blackbox.index.shard_index import ShardIndex
from blackbox.plan import Labels
from tests.contract.held import GRACE_S, SHARD
from tests.fakes import FakeJournal, FakeTargets, FakeWriter, fake_connections


@pytest.fixture
def connections() -> Iterator[redis.ConnectionPool]:
    """Connections to a Redis inside this process, empty at first."""
    connections = fake_connections(fakeredis.FakeServer(server_type="redis"))
    yield connections
    connections.disconnect()


@pytest.fixture
def client(connections: redis.ConnectionPool) -> Any:
    return redis.Redis(connection_pool=connections)


@pytest.fixture
def empty_index(connections: redis.ConnectionPool) -> Iterator[ShardIndex]:
    index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
    yield index
    index.close()


@pytest.fixture
def index(empty_index: ShardIndex) -> ShardIndex:
    """An index whose journals are at their start."""
    empty_index.begin(Labels(0, 0))
    return empty_index


@pytest.fixture
def journal() -> FakeJournal:
    return FakeJournal()


@pytest.fixture
def writer(journal: FakeJournal) -> FakeWriter:
    return FakeWriter(journal)


@pytest.fixture
def targets() -> FakeTargets:
    return FakeTargets()
