from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from blackbox.clock import Clock
from blackbox.connect import kafka
from blackbox.metrics import Metrics
from blackbox.owners import Owners
from blackbox.request import Shard
from blackbox.settings import load

SHARD = Shard("TB", 0)


@dataclass
class StandIn:
    """What is asked of an owner that tells of its happenings."""

    shard: Shard = SHARD


@pytest.fixture
def told() -> list[object]:
    return []


@pytest.fixture
def owners(told: list[object]) -> Owners:
    settings = load(kafka_bootstrap_servers="127.0.0.1:1", redis_url="redis://127.0.0.1:1/0")
    return Owners(
        settings,
        kafka(settings),
        Metrics(),
        Clock(),
        confirm=lambda shard, label: None,
        opened=lambda shard, label: told.append((shard, label)),
        closed=told.append,
    )


def test_an_owner_that_was_replaced_neither_starts_nor_stops_its_successors_reading(
    owners: Owners, told: list[object]
) -> None:
    replaced, successor = cast(Any, StandIn()), cast(Any, StandIn())
    owners._owners[SHARD] = successor

    owners._opened(replaced, 7)
    owners._doubted(replaced)
    assert told == []

    owners._opened(successor, 7)
    owners._doubted(successor)
    assert told == [(SHARD, 7), SHARD]
