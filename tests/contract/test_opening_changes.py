"""A new index: which owner may start it, and when its first walk may start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
import redis

from blackbox.core.plan import Positions, Replacement
from blackbox.index.shard_index import ShardIndex
from blackbox.index.stored_fields import OLDER
from blackbox.index.walk import WalkVoid
from blackbox.records.errors import IndexFull, PositionsMoved
from blackbox.records.request import request_id
from tests.contract.held import NOW_MS, PREFIX, SHARD, entry, store

Opener = Callable[[], ShardIndex]


def test_an_owner_frozen_before_it_empties_an_index_does_not_affect_the_next_one(
    open_index: Opener,
) -> None:
    zombie, owner = open_index(), open_index()
    zombie.load()
    owner.load()
    owner.begin(Positions(0, 0))
    store(owner, 0, 1, {0: entry()})

    with pytest.raises(PositionsMoved):
        zombie.begin(Positions(0, 0))

    assert [offset for offset, _ in owner.due(NOW_MS, 10).entries] == [0]


def test_an_owner_that_finds_redis_full_takes_nothing_from_the_next_one(
    open_index: Opener, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, zombie, owner = open_index(), open_index(), open_index()
    before.begin(Positions(0, 0))
    store(before, 0, 1, {0: entry()})
    client.hset(f"{PREFIX}state", "format", OLDER[-1])
    zombie.load()
    owner.load()

    def full(_: object) -> bool:
        owner.begin(Positions(0, 0))
        store(owner, 0, 1, {0: entry()})
        raise IndexFull("Redis has no memory left")

    monkeypatch.setattr(zombie, "_run_multi", full)
    with pytest.raises(PositionsMoved):
        zombie.begin(Positions(0, 0))

    assert owner.positions == Positions(1, 0), "those that the zombie saw"
    assert [offset for offset, _ in owner.due(NOW_MS, 10).entries] == [0]


def test_no_walk_starts_until_all_requests_with_a_recorded_verdict_are_read(
    open_index: Opener,
) -> None:
    index = open_index()
    index.begin(
        Positions(10, 5), verdicts_below=20
    )  # a receipt below 5 says that a carried record at 15 counted
    store(index, 10, 14, {})  # and Redis has no room for more

    with pytest.raises(WalkVoid, match="not yet read from Kafka"):
        index.walk()

    store(index, 14, 20, {})
    with closing(index.walk()) as walk:
        assert walk.positions == Positions(20, 5)


def test_requests_that_kafka_removed_stay_known_as_such_if_another_passed_them_first(
    open_index: Opener,
) -> None:
    first, second = open_index(), open_index()
    first.begin(Positions(0, 0))
    second.load()
    # the replacement of a removed request was read before Redis went back; a receipt has the verdict
    replacement = Replacement(
        request_id(SHARD, 5), None, entry(), entry()._replace(reason="too-late")
    )
    first.lost_before(10, 20, (0, 10))
    store(first, 10, 11, {})

    second.lost_before(10, 20, (0, 10))

    assert second.positions == Positions(11, 0)
    assert store(second, 11, 12, {11: replacement}).puts == {11: entry()}
