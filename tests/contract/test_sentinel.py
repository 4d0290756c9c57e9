"""Connections to a Redis that sentinels name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blackbox.core.plan import Positions
from blackbox.core.settlement import Settlement
from blackbox.embedded.tcp_ports import HOST, free_port
from blackbox.index.bus import Bus, Listener
from blackbox.index.connection import RedisSession, pack, pool
from blackbox.index.inspector import Inspector
from blackbox.index.redis_servers import RedisServers
from blackbox.index.shard_index import ShardIndex
from blackbox.records.errors import IndexLost
from tests.contract.held import GRACE_S, SHARD
from tests.servers.sentinel import SentinelServers, client_of
from tests.support.world import until

PING = [pack("PING")]
PASSWORD = "hunter2/@?#"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[SentinelServers]:
    """Servers whose primary the test may fail over."""
    with SentinelServers(tmp_path) as servers:
        yield servers


def positions(url: str) -> Positions | None:
    """The positions of the shard, as a new owner reads them."""
    index = ShardIndex(SHARD, pool(url), grace_s=GRACE_S)
    try:
        kept = index.load()
        return None if kept is None else kept.positions
    finally:
        index.close()


def fail_over(servers: SentinelServers) -> None:
    servers.fail_over()


def kill_primary(servers: SentinelServers) -> None:
    servers.kill_primary()


@pytest.mark.parametrize("lose", [pytest.param(fail_over, marks=pytest.mark.proof), kill_primary])
def test_a_failover_ends_every_session_and_the_next_one_finds_the_new_primary(
    own: SentinelServers, lose: Callable[[SentinelServers], None]
) -> None:
    connections = pool(own.url)
    before = own.primary
    index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
    index.begin(Positions(7, 3))
    until("it is replicated", lambda: client_of(own.replica).dbsize() > 0)
    lose(own)
    with pytest.raises(IndexLost):
        until("the session ends", lambda: index.load() is None)
    assert own.primary is not before
    assert positions(own.url) == Positions(7, 3)


def test_the_positions_show_what_a_failover_lost(own: SentinelServers) -> None:
    connections = pool(own.url)
    index = ShardIndex(SHARD, connections, grace_s=GRACE_S)
    index.begin(Positions(7, 3))
    until("it is replicated", lambda: client_of(own.replica).dbsize() > 0)
    own.stop_replicating()
    index.settle(Settlement({}, 4))
    own.kill_primary()
    assert positions(own.url) == Positions(7, 3)


def test_readers_and_notes_follow_the_primary(own: SentinelServers) -> None:
    server, inspector = RedisServers(own.url), Inspector.of(own.url)
    bus, listener = Bus(own.url, "ours"), Listener(own.url, "ours", ("soon",))
    assert listener.next(0.1) is None
    assert server.now_ms() > 0
    assert inspector.positions(SHARD) is None
    own.kill_primary()

    def all_work() -> bool:
        try:
            bus.send("soon", 1)
            return (
                server.now_ms() > 0
                and inspector.positions(SHARD) is None
                and listener.next(1) == ("soon", 1)
            )
        except IndexLost:
            return False

    until("all follow", all_work)
    for closable in (server, inspector, bus, listener):
        closable.close()


def test_a_sentinel_that_does_not_answer_is_skipped(sentinels: SentinelServers) -> None:
    url = sentinels.url.replace("://", f"://{HOST}:{free_port()},")
    assert RedisSession(pool(url)).run(PING) == [b"PONG"]


def test_an_error_names_the_unknown_service_and_the_services_that_sentinels_know(
    sentinels: SentinelServers,
) -> None:
    with pytest.raises(IndexLost) as unknown:
        RedisSession(pool(sentinels.url_of("warehouse")))
    port = sentinels.sentinels[0].port
    assert str(unknown.value) == (
        "cannot connect to Redis: no sentinel knows a primary of 'warehouse': "
        f"{HOST}:{port} knows other services: shop"
    )


def test_an_error_names_all_sentinels_if_none_answers() -> None:
    ports = free_port(), free_port()
    with pytest.raises(IndexLost) as silent:
        RedisSession(pool(f"redis+sentinel://{HOST}:{ports[0]},{HOST}:{ports[1]}/shop"))
    for port in ports:
        assert f"{HOST}:{port} does not answer: " in str(silent.value)


def test_a_sentinel_url_of_a_plain_redis_is_refused(sentinels: SentinelServers) -> None:
    url = f"redis+sentinel://{HOST}:{sentinels.primary.port}/shop"
    with pytest.raises(IndexLost, match="is not a sentinel, or refuses to answer: unknown command"):
        RedisSession(pool(url))


def test_an_error_says_that_the_primary_is_down_and_has_no_successor(tmp_path: Path) -> None:
    with SentinelServers(tmp_path) as servers:
        for server in servers.servers:
            server.kill()

        def is_reported() -> bool:
            with pytest.raises(IndexLost) as lost:
                RedisSession(pool(servers.url))
            return "reports that it is down, without a new primary yet" in str(lost.value)

        until("the sentinel has noticed", is_reported)


def test_a_sentinel_with_a_password(tmp_path: Path) -> None:
    with SentinelServers(tmp_path, sentinel_password="hunter2") as servers:
        connections = pool(servers.url)
        assert RedisSession(connections).run(PING) == [b"PONG"]
        assert "hunter2" not in repr(connections)
        with pytest.raises(IndexLost, match=r"requires a password: add \?sentinel_password="):
            RedisSession(pool(servers.url_of("shop")))
        with pytest.raises(IndexLost, match="rejects sentinel_username and") as refused:
            RedisSession(pool(servers.url_of("shop", PASSWORD)))
        assert PASSWORD not in str(refused.value)
