"""Servers with authentication: Kafka with ACLs over TLS, Redis with the users that `deploy/` ships."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from blackbox.embedded import EmbeddedError, EmbeddedRedis, EmbeddedStack
from tests.conftest import missing
from tests.security.certificates import Certificates, make_certificates
from tests.security.guarded import GuardedKafka
from tests.security.rights import REDIS_ACL, redis_users

REDIS_PASSWORD = "s3cret-of-redis"


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def guarded_kafka(
    certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GuardedKafka]:
    """A Kafka with ACLs, SASL and TLS."""
    kafka = GuardedKafka(tmp_path_factory.mktemp("guarded"), certificates)
    try:
        kafka.start()
    except EmbeddedError as error:
        missing(str(error))
    yield kafka
    kafka.stop()


class GuardedRedis(EmbeddedRedis):
    """A Redis with the shipped users, for whom `url` logs in; `default` is the admin."""

    user = "blackbox"

    @property
    def url(self) -> str:
        return self.url_of(self.user)

    def url_of(self, user: str) -> str:
        return f"redis://{user}:{REDIS_PASSWORD}@127.0.0.1:{self.port}/0"

    def admin(self) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2)


def start_guarded_redis(folder: Path) -> GuardedRedis:
    """With the users of the file, and then a password for each."""
    folder.mkdir(parents=True, exist_ok=True)
    users = folder / "users.acl"
    users.write_text(REDIS_ACL.read_text())
    server = GuardedRedis(folder, settings={"aclfile": f'"{users}"', "maxmemory": "1gb"})
    server.start()
    with server.admin() as admin:
        for user in redis_users():
            admin.acl_setuser(user, reset=False, enabled=True, passwords=[f"+{REDIS_PASSWORD}"])
    return server


@pytest.fixture
def guarded_redis(stack: EmbeddedStack, tmp_path: Path) -> Iterator[GuardedRedis]:
    server = start_guarded_redis(tmp_path / "guarded-redis")
    yield server
    server.stop()
