from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blackbox.embedded import EmbeddedError, EmbeddedKafka, EmbeddedRedis
from blackbox.embedded.jars import find_ivy
from blackbox.embedded.java import find_java
from blackbox.embedded.redis import find_redis
from tests.conftest import missing


def require(find: Callable[[], object]) -> None:
    try:
        find()
    except EmbeddedError as error:
        missing(str(error))


@pytest.fixture(scope="session")
def redis_is_there() -> None:
    require(find_redis)


@pytest.fixture(scope="session")
def kafka_is_there() -> None:
    require(find_java)
    require(find_ivy)


@pytest.fixture
def redis(redis_is_there: None, tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path / "redis")
    yield server
    server.stop()


@pytest.fixture
def kafka(kafka_is_there: None, tmp_path: Path) -> Iterator[EmbeddedKafka]:
    server = EmbeddedKafka(tmp_path / "kafka")
    yield server
    server.stop()
