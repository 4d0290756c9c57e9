"""The same contract on a Redis inside this process, a real server, a primary behind sentinels, a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import fakeredis
import pytest
import redis

from blackbox.embedded import EmbeddedError, EmbeddedRedis
from blackbox.index.connection import Connections, pool
from blackbox.index.shard_index import ShardIndex
from tests.conftest import missing
from tests.contract.held import GRACE_S, PREFIX, SHARD
from tests.servers.redis_cluster import ClusterServers
from tests.servers.sentinel import SentinelServers
from tests.support.fakes import fake_connections


@dataclass(frozen=True)
class Backend:
    """A Redis to test against, with a separate client that only reads."""

    connections: Callable[[], Connections]
    client: redis.Redis

    def cut(self) -> None:
        """End every connection but the client's own."""
        self.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")  # type: ignore[no-untyped-call]


def histories(few: int, many: int) -> pytest.MarkDecorator:
    """Random histories to try: a few of them each time, many for `make proof`."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.proof)])


def start_redis(redis_server: EmbeddedRedis) -> None:
    try:
        redis_server.start()
    except EmbeddedError as error:
        missing(str(error))


@pytest.fixture(scope="session")
def real_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("contract-redis"))
    start_redis(server)
    yield server
    server.stop()


@pytest.fixture
def real_backend(real_redis: EmbeddedRedis) -> Iterator[Backend]:
    with redis.Redis.from_url(real_redis.url) as client:
        client.flushall()
        yield Backend(lambda: pool(real_redis.url), client)


@pytest.fixture(scope="session")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelServers]:
    """A primary, its replica and one sentinel; nothing fails over here."""
    with SentinelServers(tmp_path_factory.mktemp("contract-sentinel")) as servers:
        yield servers


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServers]:
    """Three nodes; tests that move slots move them back."""
    with ClusterServers(tmp_path_factory.mktemp("contract-cluster")) as servers:
        yield servers


@pytest.fixture
def sentinel_backend(sentinels: SentinelServers) -> Iterator[Backend]:
    with redis.Redis.from_url(sentinels.primary.url) as client:
        client.flushall()
        yield Backend(lambda: pool(sentinels.url), client)


@pytest.fixture
def cluster_backend(cluster: ClusterServers) -> Iterator[Backend]:
    with redis.Redis.from_url(cluster.node_of(PREFIX).url) as client:
        client.flushall()
        yield Backend(lambda: pool(cluster.url), client)


@pytest.fixture
def fake_backend() -> Backend:
    server = fakeredis.FakeServer(server_type="redis")
    client: Any = fakeredis.FakeRedis(server=server)
    return Backend(lambda: fake_connections(server), client)


@pytest.fixture(
    params=["fake_backend", "real_backend", "sentinel_backend", "cluster_backend"],
    ids=["fakeredis", "redis", "sentinel", "cluster"],
)
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def client(backend: Backend) -> redis.Redis:
    return backend.client


Opener = Callable[[], ShardIndex]


@pytest.fixture
def open_index(backend: Backend) -> Iterator[Opener]:
    """Another owner's index of the same shard; all of them are closed at the end."""
    connections = backend.connections()
    opened: list[ShardIndex] = []

    def open_another() -> ShardIndex:
        opened.append(ShardIndex(SHARD, connections, grace_s=GRACE_S))
        opened[-1].load()
        return opened[-1]

    yield open_another
    for index in opened:
        index.close()
    connections.disconnect()
