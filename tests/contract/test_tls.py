"""Addresses with TLS, on servers whose certificate is made for the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from blackbox.core.plan import Positions
from blackbox.embedded import EmbeddedRedis
from blackbox.embedded.tcp_ports import HOST, free_port
from blackbox.index.connection import pool
from blackbox.index.redis_servers import RedisServers
from blackbox.index.shard_index import ShardIndex
from blackbox.records.errors import IndexLost
from tests.contract.conftest import start_redis
from tests.contract.held import GRACE_S, SHARD
from tests.security.certificates import openssl
from tests.servers.sentinel import SERVICE, SentinelProcess
from tests.support.world import until


@pytest.fixture(scope="module")
def tls(redis_7: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directives of Redis that give it a certificate for this host."""
    folder = tmp_path_factory.mktemp("tls")
    names = ("-subj", f"/CN={HOST}", "-addext", f"subjectAltName=IP:{HOST}")
    made = ("-keyout", f"{folder}/key.pem", "-out", f"{folder}/ca.pem", *names)
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *made)
    return {
        "tls-port": str(free_port()),
        "tls-cert-file": f"{folder}/ca.pem",
        "tls-key-file": f"{folder}/key.pem",
        "tls-ca-cert-file": f"{folder}/ca.pem",
        "tls-auth-clients": "no",
    }


@pytest.fixture
def of_sentinel(tls: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The URL of a service behind a sentinel."""
    server = EmbeddedRedis(tmp_path / "redis", settings=tls)
    start_redis(server)
    port = str(free_port())
    sentinel = SentinelProcess(
        tmp_path / "sentinel",
        int(tls["tls-port"]),
        settings=tls | {"tls-port": port, "tls-replication": "yes"},
    )
    yield f"rediss+sentinel://{HOST}:{port}/{SERVICE}"
    sentinel.process.stop(5)
    server.stop()


@pytest.fixture
def of_cluster(tls: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The URL of a cluster of one node."""
    bus = str(
        free_port()
    )  # the default is 10,000 above the other port, in the range of client ports
    settings = {"cluster-enabled": "yes", "tls-cluster": "yes", "cluster-port": bus}
    server = EmbeddedRedis(tmp_path / "redis", settings=tls | settings)
    start_redis(server)
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
        until("it is a cluster", lambda: b"cluster_state:ok" in told(client))
    yield f"rediss+cluster://{HOST}:{tls['tls-port']}"
    server.stop()


def told(client: redis.Redis) -> bytes:
    info: bytes = client.execute_command("CLUSTER", "INFO")  # type: ignore[no-untyped-call]
    return info


@pytest.mark.parametrize("servers", ["of_sentinel", "of_cluster"])
def test_tls_secures_the_connection_to_every_server(
    servers: str, tls: dict[str, str], request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue(servers)
    url = f"{place}?ssl_ca_certs={tls['tls-ca-cert-file']}"
    connections = pool(url)
    index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
    index.begin(Positions(7, 3))
    index.close()
    connections.disconnect()
    server = RedisServers(url)
    assert server.now_ms() > 0
    server.close()
    with pytest.raises(IndexLost, match="certificate verify failed"):
        ShardIndex(SHARD, pool(place), grace_s=GRACE_S)
