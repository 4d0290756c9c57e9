"""What all shards share, on every kind of Redis: in a cluster its keys are on many nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blackbox.index.address import ServerAddress
from blackbox.index.cluster import Cluster
from blackbox.index.shared_state import SharedState
from blackbox.records.request import Second, Shard
from tests.contract.conftest import Backend
from tests.contract.held import NOW_MS

SHARDS = [Shard("TB", partition) for partition in range(8)]


@pytest.fixture
def shared(backend: Backend) -> Iterator[SharedState]:
    shared = SharedState(backend.connections())
    shared.resume("orders", SHARDS)
    yield shared
    shared.close()


def test_a_repeated_pause_reaches_the_shards_without_it(shared: SharedState) -> None:
    shared.pause("orders", NOW_MS, SHARDS[:5])
    shared.pause("orders", NOW_MS + 5000, SHARDS)

    assert [shared.paused([shard]) for shard in SHARDS] == [{"orders": NOW_MS}] * len(SHARDS)

    shared.resume("orders", SHARDS)
    assert shared.paused(SHARDS) == {}


def test_a_backlog_of_many_seconds_is_counted_in_one_round_trip(real_backend: Backend) -> None:
    shared = SharedState(real_backend.connections())
    backlog = {Second("requests", "shop", second): 2 for second in range(4000)}

    def reads() -> int:
        return int(real_backend.client.info("stats")["total_reads_processed"])

    before = reads()
    assert set(shared.count(backlog).values()) == {0}
    assert reads() - before < 400  # each has up to 16 KiB of it
    shared.close()


def test_the_slots_of_all_shards_are_looked_up_once(
    cluster_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections, asked = cluster_backend.connections(), 0
    assert isinstance(connections, Cluster)
    look = connections._look

    def counting(place: ServerAddress) -> object:
        nonlocal asked
        asked += 1
        return look(place)

    monkeypatch.setattr(connections, "_look", counting)
    assert SharedState(connections).pending("shop", []) == asked == 0
    assert SharedState(connections).paused(SHARDS) == {}
    assert asked == 1
    connections.disconnect()


def test_the_counts_of_several_callers_do_not_mix(shared: SharedState) -> None:
    found = {Second("requests", name, 7): count for count, name in enumerate("abcdef", 1)}
    assert shared.count(found) == dict.fromkeys(found, 0)
    assert shared.count(found) == found
