"""Redis over TLS: `rediss://`, with a private CA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blackbox.embedded import EmbeddedRedis, EmbeddedStack
from blackbox.embedded.tcp_ports import free_port
from tests.security.certificates import Certificates, make_ca, make_certificates
from tests.service.test_cli import blackbox
from tests.support.world import World, until

pytestmark = pytest.mark.service


class TlsRedis(EmbeddedRedis):
    """A Redis whose `url` is that of its port for TLS."""

    def __init__(self, folder: Path, certificates: Certificates) -> None:
        self.tls_port = free_port()
        self.ca = certificates.ca
        settings = {
            "tls-port": str(self.tls_port),
            "tls-cert-file": str(certificates.certificate),
            "tls-key-file": str(certificates.key),
            "tls-ca-cert-file": str(certificates.ca),
            "tls-auth-clients": "no",
        }
        super().__init__(folder, settings=settings)

    @property
    def url(self) -> str:
        return self.url_with(self.ca)

    def url_with(self, ca: Path) -> str:
        return f"rediss://127.0.0.1:{self.tls_port}/0?ssl_ca_certs={ca}"


@pytest.fixture
def world(
    redis_7: str, stack: EmbeddedStack, certificates: Certificates, tmp_path: Path
) -> Iterator[World]:
    redis = TlsRedis(tmp_path / "redis", certificates)
    redis.start()
    with World(stack.kafka, redis, tmp_path) as world:
        yield world
    redis.stop()


def test_the_service_works_over_tls(world: World) -> None:
    world.start_service().wait_ready()
    world.ask(50, within_s=0.5)
    assert world.wait_delivered().is_exact
    assert blackbox(world.environment(), "status").code == 0


def test_a_redis_certificate_of_another_ca_is_refused(world: World, tmp_path: Path) -> None:
    assert isinstance(world.redis, TlsRedis)
    url = world.redis.url_with(make_ca(tmp_path / "other"))
    answer = blackbox(world.environment(redis_url=url), "check")
    assert (answer.code, answer.out) == (1, "")
    [line] = answer.errors
    assert "certificate verify failed" in line
    assert f"127.0.0.1:{world.redis.tls_port}" in line

    service = world.start_service(redis_url=url)
    until("the service reports it", lambda: "certificate verify failed" in service.log.read_text())
    assert service.get("/readyz")[0] == 503


def test_a_redis_certificate_for_another_name_is_refused(world: World, tmp_path: Path) -> None:
    other = TlsRedis(tmp_path / "other", make_certificates(tmp_path, "DNS:redis.example"))
    other.start()
    answer = blackbox(world.environment(redis_url=other.url), "check")
    other.stop()
    assert answer.code == 1
    assert "IP address mismatch, certificate is not valid for '127.0.0.1'" in answer.errors[0]
