from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from blackbox.config.settings import load
from blackbox.config.wiring import kafka
from blackbox.core.plan import Binding
from blackbox.engine.metrics import Metrics
from blackbox.engine.shard_owner import ShardOwner
from blackbox.engine.shard_pool import STOP_S, ShardPool
from blackbox.records.clock import Clock
from blackbox.records.entry import Entry
from blackbox.records.request import Reason, Shard
from tests.contract.held import NOW_MS

SHARD = Shard("TB", 0)


@dataclass
class FakeOwner:
    """The attributes of an owner that calls back."""

    shard: Shard = SHARD
    binding: Binding | None = None


@pytest.fixture
def told() -> list[object]:
    return []


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def owners(told: list[object], metrics: Metrics, tmp_path: Path) -> Iterator[ShardPool]:
    """Owners whose Redis and Kafka do not answer."""
    callers = tmp_path / "callers.toml"
    callers.write_text("[callers.shop]\nmost_pending = 5")
    settings = load(
        kafka_bootstrap_servers="127.0.0.1:1",
        redis_url="redis://127.0.0.1:1/0",
        callers_file=callers,
    )
    owners = ShardPool(
        settings,
        kafka(settings),
        metrics,
        Clock(),
        confirm=lambda shard, position: None,
        opened=lambda shard, position: told.append((shard, position)),
        closed=told.append,
    )
    yield owners
    owners.close()
    owners.lose([owner.shard for owner in owners.all() if isinstance(owner, ShardOwner)])


def test_a_replaced_owner_neither_starts_nor_stops_reading_for_its_successor(
    owners: ShardPool, told: list[object]
) -> None:
    replaced, successor = cast(Any, FakeOwner()), cast(Any, FakeOwner())
    owners._owners[SHARD] = successor

    owners._opened(replaced, 7)
    owners._closed(replaced)
    assert told == []

    owners._opened(successor, 7)
    owners._closed(successor)
    assert told == [(SHARD, 7), SHARD]


OTHER = Shard("TB", 1)


def test_a_shard_is_owned_from_gain_to_lose_and_open_only_after_recovery(
    owners: ShardPool, told: list[object]
) -> None:
    owners.gain(SHARD)
    owners.gain(OTHER)
    first = owners.get(SHARD)
    assert first is not None
    assert {owner.shard for owner in owners.all()} == {SHARD, OTHER}
    assert owners.open_shards() == set()
    assert owners.stuck() == []
    assert told == []

    owners.lose([SHARD])
    assert owners.get(SHARD) is None
    assert [owner.shard for owner in owners.all()] == [OTHER]
    assert first.join(0)
    assert told == [SHARD]


def test_a_shard_that_cannot_be_opened_is_released_without_delay(owners: ShardPool) -> None:
    owners.gain(SHARD)
    owners.gain(OTHER)
    began = time.monotonic()
    owners.lose([SHARD, OTHER])
    assert time.monotonic() - began < STOP_S


def test_a_shard_that_was_lost_may_be_gained_again(owners: ShardPool) -> None:
    owners.gain(SHARD)
    first = owners.get(SHARD)
    owners.lose([SHARD])
    owners.gain(SHARD)
    assert owners.get(SHARD) is not first


def test_operations_on_shards_that_are_not_owned_do_nothing(
    owners: ShardPool, told: list[object]
) -> None:
    owners.lose([])
    owners.lose([SHARD])
    owners.recover(SHARD, ValueError("whatever"))
    owners.poll()
    assert told == []


def test_a_shard_that_the_pool_released_has_no_metrics(owners: ShardPool, metrics: Metrics) -> None:
    owners.gain(SHARD)
    metrics.show(SHARD, shard_open=True)
    metrics.show(OTHER, shard_open=True)
    owners.lose([SHARD])
    shown = metrics.registry.get_sample_value
    assert shown("blackbox_shard_open", {"shard": "TB-0"}) is None
    assert shown("blackbox_shard_open", {"shard": "TB-1"}) == 1


def test_an_expired_or_dead_request_no_longer_counts_as_pending(owners: ShardPool) -> None:
    delivered = Entry("orders", b"m", NOW_MS, caller="shop")
    ended = {
        0: delivered,
        1: delivered._replace(reason=Reason.EXPIRED),
        2: delivered._replace(reason=Reason.REFUSED),
        3: delivered._replace(caller="nobody"),
    }
    assert owners._counted(ended) == {"shop": [0, 1, 2]}
