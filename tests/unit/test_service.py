from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from blackbox.metrics import Metrics
from blackbox.request import Shard
from blackbox.service import Service
from blackbox.settings import load

SHARD = Shard("TB", 0)


@dataclass
class StandIn:
    """What the service asks of an owner when it is told of its happenings."""

    shard: Shard = SHARD


@pytest.fixture
def service() -> Service:
    settings = load(kafka_bootstrap_servers="127.0.0.1:1", redis_url="redis://127.0.0.1:1/0")
    return Service(settings, Metrics())


def is_reading_left_alone(service: Service) -> bool:
    return service._reader._asked.empty()


def test_an_owner_that_was_replaced_neither_starts_nor_stops_its_successors_reading(
    service: Service,
) -> None:
    replaced, successor = cast(Any, StandIn()), cast(Any, StandIn())
    service._owners[SHARD] = successor

    service._opened(replaced, 7)
    service._doubted(replaced)
    assert is_reading_left_alone(service)

    service._opened(successor, 7)
    assert not is_reading_left_alone(service)
