"""A Redis at its `maxmemory` stores no request, but due requests are still removed from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from blackbox.core.parking import bands_of, parked_at
from blackbox.core.plan import Positions
from blackbox.core.settlement import Settlement
from blackbox.embedded import EmbeddedRedis
from blackbox.index.connection import pool
from blackbox.index.inspector import Inspector
from blackbox.index.shard_index import ShardIndex
from blackbox.index.shared_state import SharedState
from blackbox.records import entry as entries
from blackbox.records.errors import IndexFull, PositionsMoved
from blackbox.rules.file import RulesFile
from blackbox.rules.target_rates import TargetRates
from tests.contract.conftest import start_redis
from tests.contract.held import GRACE_S, NOW_MS, PREFIX, SHARD, entry, held, store

MESSAGE = b"x" * 2000
BATCH = 100
ROOM = 1_000_000


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("full"))
    start_redis(server)
    yield server
    server.stop()


@pytest.fixture
def client(own_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", 0)
        client.flushall()
        yield client


@pytest.fixture
def index(own_server: EmbeddedRedis, client: redis.Redis) -> Iterator[ShardIndex]:
    connections = pool(own_server.url)
    index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
    index.begin(Positions(0, 0))
    yield index
    index.close()
    connections.disconnect()


def store_batch(index: ShardIndex) -> None:
    start = index.positions.requests
    batch = {start + o: entry(message=MESSAGE, caller_id=f"c{start + o}") for o in range(BATCH)}
    store(index, start, start + BATCH, batch)


def store_batches(index: ShardIndex, count: int) -> None:
    for _ in range(count):
        store_batch(index)


def fill(index: ShardIndex, client: redis.Redis) -> int:
    """Fill Redis far above its limit, as another user of it may; returns the position `requests`."""
    store_batch(index)
    client.config_set("maxmemory", 1)
    return index.positions.requests


def test_a_full_redis_stores_nothing_of_a_batch(index: ShardIndex, client: redis.Redis) -> None:
    end = fill(index, client)
    before = held(client)

    for _ in range(2):
        with pytest.raises(IndexFull, match="Redis has no memory left"):
            store_batch(index)

    assert held(client) == before
    assert before.positions == index.positions == Positions(end, 0)


def test_due_requests_are_removed_from_a_full_redis(index: ShardIndex, client: redis.Redis) -> None:
    end = fill(index, client)

    due = index.due(NOW_MS, 10)
    index.settle(Settlement({offset: f"c{offset}" for offset, _ in due.entries}, 1))

    assert [offset for offset, _ in due.entries] == list(range(10))
    assert held(client).positions == index.positions == Positions(end, 1)
    assert held(client).offsets() == list(range(10, end))
    assert held(client).holders.keys() == {f"c{offset}" for offset in range(10, end)}


def test_a_full_redis_passes_requests_that_kafka_removed(
    index: ShardIndex, client: redis.Redis
) -> None:
    end = fill(index, client)

    index.lost_before(end + 1000, end + 2000, (end, end + 1000))

    assert held(client).positions == index.positions == Positions(end + 1000, 0)
    kept = index.load()
    assert kept is not None
    assert kept.gone == (end, end + 1000)


def test_an_index_is_emptied_and_begun_again_in_a_full_redis(
    index: ShardIndex, client: redis.Redis
) -> None:
    fill(index, client)
    assert index.load() is not None

    index.judged_before(7)
    with pytest.raises(
        IndexFull
    ):  # only the beginning needs room, which is there in most cases by now
        index.begin(Positions(0, 0))

    assert held(client).offsets() == []
    assert client.hget(f"{PREFIX}state", "judged") == b"7"


@pytest.mark.parametrize("older", [b"1", b"7"])
def test_an_index_of_an_earlier_version_is_emptied_and_begun_again_in_a_full_redis(
    index: ShardIndex, client: redis.Redis, older: bytes
) -> None:
    store_batch(index)
    client.hset(f"{PREFIX}state", "format", older)
    payloads = BATCH * len(MESSAGE)
    used: int = client.info("memory")["used_memory"]
    client.config_set("maxmemory", used - payloads // 2)
    assert index.load() is None

    index.begin(Positions(0, 0))

    assert (held(client).positions, held(client).payloads) == (Positions(0, 0), {})
    assert held(client).offsets() == []


def test_a_full_redis_records_what_is_in_flight_until_it_is_settled(
    index: ShardIndex, client: redis.Redis, own_server: EmbeddedRedis
) -> None:
    fill(index, client)
    with closing(Inspector.of(own_server.url)) as inspector:
        assert index.mark_in_flight(range(10), index.removed) == set()
        assert [inspector.is_in_flight(SHARD, offset) for offset in (0, 9, 10)] == [
            True,
            True,
            False,
        ]
        index.settle(Settlement({offset: f"c{offset}" for offset in range(10)}, 1))
        assert not inspector.is_in_flight(SHARD, 0)


def test_deliveries_make_the_room_for_the_next_requests(
    index: ShardIndex, client: redis.Redis
) -> None:
    used: int = client.info("memory")["used_memory"]
    client.config_set("maxmemory", used + ROOM)
    with pytest.raises(IndexFull):
        store_batches(index, 100)
    end = index.positions.requests

    index.settle(Settlement({offset: f"c{offset}" for offset in range(end)}, 1))
    store_batch(index)

    assert held(client).offsets() == list(range(end, end + BATCH))


def test_removals_of_requests_not_read_yet_are_kept_in_a_full_redis(
    index: ShardIndex, client: redis.Redis
) -> None:
    end = fill(index, client)

    index.settle(Settlement({0: "c0", end: None, end + 100_000: None}, 1))

    assert held(client).skip == {end, end + 100_000}
    assert held(client).positions == Positions(end, 1)


def test_a_fenced_owner_removes_nothing_from_a_full_redis(
    index: ShardIndex, client: redis.Redis, own_server: EmbeddedRedis
) -> None:
    fill(index, client)
    connections = pool(own_server.url)
    following = ShardIndex(SHARD, connections, grace_s=GRACE_S)
    following.load()
    following.settle(Settlement({}, 1))
    before = held(client)

    with pytest.raises(PositionsMoved):
        index.settle(Settlement({0: "c0"}, 1))

    assert held(client) == before
    following.close()
    connections.disconnect()


def test_requests_are_postponed_in_a_full_redis(index: ShardIndex, client: redis.Redis) -> None:
    end = fill(index, client)
    binary = entry(message=b"\x00\r\n\xff" * 500, caller_id="c0")

    index.postpone({0: (NOW_MS + 60_000, binary)}, NOW_MS)
    index.settle(Settlement({end - 1: None}, 1, {1: (NOW_MS + 60_000, binary)}, NOW_MS))

    due = index.due(NOW_MS, end)
    assert due.next_due_ms == NOW_MS + 60_000
    assert [offset for offset, _ in due.entries] == list(range(2, end - 1))
    postpone = index.due(NOW_MS + 60_000, end).entries[-2:]
    assert postpone == [(0, entries.encode(binary)), (1, entries.encode(binary))]


def test_a_full_redis_parks_what_exceeds_a_rate_and_the_rate_is_kept(
    index: ShardIndex, client: redis.Redis, own_server: EmbeddedRedis, tmp_path: Path
) -> None:
    end, band = fill(index, client), next(bands_of("orders"))
    rules = tmp_path / "callers.toml"
    rules.write_text("[targets.orders]\nmessages_per_second = 1")
    rates = TargetRates(RulesFile(rules), SharedState(pool(own_server.url)))
    assert rates.count("cluster", {"orders": 1}, NOW_MS) == {"orders": 0}
    assert rates.count("cluster", {"orders": 1}, NOW_MS) == {"orders": 1}

    index.postpone(
        {o: (parked_at(band, NOW_MS), entry()._replace(target="orders")) for o in range(end)},
        NOW_MS,
    )

    assert not index.due(NOW_MS, end).entries
    assert index.parked() == {band: "orders"}
