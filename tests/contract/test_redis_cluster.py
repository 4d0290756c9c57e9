"""Connections to a cluster, with shards on all of its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from blackbox.core.plan import IndexMetadata, Positions
from blackbox.core.settlement import Settlement
from blackbox.embedded import EmbeddedRedis
from blackbox.embedded.tcp_ports import HOST, free_port
from blackbox.index.bus import Bus, Listener
from blackbox.index.connection import RedisSession, pack, pool
from blackbox.index.index_dump import DumpedEntry, IndexDump
from blackbox.index.inspector import Inspector
from blackbox.index.keys import Keys
from blackbox.index.redis_servers import RedisNode, RedisServers
from blackbox.index.shard_index import ShardIndex
from blackbox.records.errors import IndexLost
from blackbox.records.request import Shard
from tests.contract.held import GRACE_S, NOW_MS, PREFIX, SHARD, entry, loaded, store
from tests.servers.redis_cluster import ClusterServers
from tests.support.world import until


@pytest.fixture
def empty(cluster: ClusterServers) -> ClusterServers:
    for node in cluster.nodes:
        with redis.Redis.from_url(node.url) as client:
            client.flushall()
    return cluster


@pytest.fixture
def spread(empty: ClusterServers) -> list[Shard]:
    """A shard on each node."""
    found: dict[int, Shard] = {}
    for partition in count():
        shard = Shard("TB", partition)
        found.setdefault(empty.node_of(Keys(shard).state).port, shard)
        if len(found) == len(empty.nodes):
            return [found[node.port] for node in empty.nodes]
    raise AssertionError


@contextmanager
def opened(url: str, shard: Shard) -> Iterator[ShardIndex]:
    connections = pool(url)
    index = ShardIndex(shard, connections, grace_s=GRACE_S)
    try:
        yield index
    finally:
        index.close()
        connections.disconnect()


def fill(url: str, shard: Shard) -> None:
    with opened(url, shard) as index:
        index.begin(Positions(0, 0))
        store(index, 0, 3, {offset: entry(NOW_MS) for offset in range(3)})


def test_each_shard_is_kept_by_the_node_that_has_its_slot(
    empty: ClusterServers, spread: list[Shard]
) -> None:
    for shard in spread:
        fill(empty.url, shard)
    for node, shard in zip(empty.nodes, spread, strict=True):
        with redis.Redis.from_url(node.url) as client:
            keys: Any = client.keys("*")
        assert {key.partition(b"}")[0] for key in keys} == {f"blackbox:{{{shard}".encode()}


def test_the_inspector_reads_every_shard_of_a_cluster(
    empty: ClusterServers, spread: list[Shard]
) -> None:
    for shard in spread:
        fill(empty.url, shard)
    inspector = Inspector.of(empty.url)
    assert [inspector.shard_stats(shard, NOW_MS).due_now for shard in spread] == [3, 3, 3]
    inspector.close()


def test_an_audit_reads_every_shard_and_finds_orphans_on_every_node(
    empty: ClusterServers, spread: list[Shard]
) -> None:
    for shard in spread:
        fill(empty.url, shard)
        with redis.Redis.from_url(empty.node_of(Keys(shard).state).url) as client:
            client.zrem(Keys(shard).due, b"%016x" % 1)
    dump = IndexDump(empty.url)
    left = [DumpedEntry(0, NOW_MS, True), DumpedEntry(2, NOW_MS, True)]
    for shard in spread:
        assert sorted(held for some in dump.entries(shard) for held in some) == left
        assert list(dump.cold(shard)) == []
        assert list(dump.ignored(shard)) == [[]]
    orphans = {found for some in dump.orphans(spread) for found in some}
    assert orphans == {(shard, 1) for shard in spread}
    dump.close()


def test_a_note_reaches_listeners_of_every_node(cluster: ClusterServers) -> None:
    one_each = [f"redis+cluster://{HOST}:{node.port}" for node in cluster.nodes]
    listeners = [Listener(url, "ours", ("soon",)) for url in one_each]
    for listener in listeners:
        assert listener.next(0.1) is None
    for url in one_each:
        bus = Bus(url, "ours")
        bus.send("soon", url)
        assert [listener.next(5) for listener in listeners] == [("soon", url)] * 3
        bus.close()
    for listener in listeners:
        listener.close()


def test_a_cluster_reports_its_earliest_clock_and_its_fullest_memory(
    cluster: ClusterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks, used = iter([2000, 1000, 3000]), iter([0.2, 0.9, 0.1])
    monkeypatch.setattr(RedisNode, "now_ms", lambda server: next(clocks))
    monkeypatch.setattr(RedisNode, "memory_used", lambda server: next(used))
    server = RedisServers(cluster.url)
    assert server.now_ms() == 1000
    assert server.memory_used() == 0.9
    server.close()


def test_a_node_that_did_not_answer_is_not_asked_again_at_once(
    cluster: ClusterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def now_ms(server: RedisNode) -> int:
        asked.append(len(asked))
        if len(asked) == 2:
            raise IndexLost("silent")
        return len(asked)

    monkeypatch.setattr(RedisNode, "now_ms", now_ms)
    server = RedisServers(cluster.url)
    assert server.now_ms() == 1
    assert len(asked) == 3
    assert server.now_ms() == 4
    assert len(asked) == 5
    server.close()


def other_than(cluster: ClusterServers, node: EmbeddedRedis) -> EmbeddedRedis:
    return next(other for other in cluster.nodes if other is not node)


def test_a_moved_slot_ends_the_session_and_the_next_session_finds_it(empty: ClusterServers) -> None:
    home = empty.node_of(PREFIX)
    with opened(empty.url, SHARD) as index:
        index.begin(Positions(7, 3))
        empty.move(PREFIX, other_than(empty, home))
        with pytest.raises(IndexLost, match="Redis cannot serve requests now: MOVED"):
            index.settle(Settlement({}, 4))
    with opened(empty.url, SHARD) as index:
        assert loaded(index) == IndexMetadata(Positions(7, 3))
        index.settle(Settlement({}, 4))
    empty.move(PREFIX, home)
    with opened(empty.url, SHARD) as index:
        assert loaded(index) == IndexMetadata(Positions(7, 4))


def test_a_slot_that_is_being_moved_does_not_look_empty(empty: ClusterServers) -> None:
    home = empty.node_of(PREFIX)
    away = other_than(empty, home)
    with opened(empty.url, SHARD) as index:
        index.begin(Positions(0, 0))
        empty.begin_move(key_slot(PREFIX.encode()), home, away)
        migrate = ("MIGRATE", HOST, away.port, PREFIX + "state", 0, 5000)
        with redis.Redis.from_url(home.url) as client:
            client.execute_command(*migrate)
        with pytest.raises(IndexLost, match=r"Redis cannot serve requests now: (ASK|TRYAGAIN)"):
            store(index, 0, 1, {0: entry(NOW_MS)})
    with opened(empty.url, SHARD) as index, pytest.raises(IndexLost):
        index.load()
    empty.move(PREFIX, away)
    with opened(empty.url, SHARD) as index:
        assert loaded(index) == IndexMetadata(Positions(0, 0))
    empty.move(PREFIX, home)


def test_a_dead_node_closes_only_its_own_shards(tmp_path: Path) -> None:
    with ClusterServers(tmp_path, needs_all=False) as servers:
        dead = servers.nodes[0]
        url = servers.url
        shards = [Shard("TB", partition) for partition in range(12)]
        on_dead = [s for s in shards if servers.node_of(Keys(s).state) is dead]
        others = [s for s in shards if s not in on_dead]
        assert on_dead
        assert others
        dead.kill()

        def others_open() -> bool:
            try:
                for shard in others:
                    with opened(url, shard) as index:
                        index.load()
            except IndexLost:
                return False
            return True

        until("the cluster has settled", others_open)
        for shard in on_dead:
            with pytest.raises(IndexLost, match=f"connecting to {HOST}:{dead.port}"):
                ShardIndex(shard, pool(url), grace_s=GRACE_S)
        server = RedisServers(url)
        assert server.now_ms() > 0
        assert server.memory_used() >= 0
        server.close()
        bus = Bus(url, "ours")
        bus.send("soon", 1)
        bus.close()


def test_an_error_names_all_nodes_if_none_answers() -> None:
    ports = free_port(), free_port()
    url = f"redis+cluster://{HOST}:{ports[0]},{HOST}:{ports[1]}"
    with pytest.raises(IndexLost) as silent:
        RedisSession(pool(url))
    for port in ports:
        assert f"{HOST}:{port} does not answer: " in str(silent.value)
    for question in (RedisServers(url).now_ms, RedisServers(url).memory_used):
        with pytest.raises(IndexLost, match="no node describes its cluster"):
            question()


def test_a_cluster_url_of_a_single_redis_is_refused(real_redis: EmbeddedRedis) -> None:
    with pytest.raises(
        IndexLost, match="is not a node of a cluster: use redis:// for a single Redis"
    ):
        RedisSession(pool(f"redis+cluster://{HOST}:{real_redis.port}"))


def test_an_error_names_a_slot_that_no_node_has(tmp_path: Path) -> None:
    with ClusterServers(tmp_path, needs_all=False) as servers:
        slot = key_slot(PREFIX.encode())

        def is_unassigned() -> bool:
            """A node that still knows its owner may announce it to the others again."""
            return sum(forgets(node, slot) for node in servers.nodes) == 0

        until("no node has the slot", is_unassigned, every_s=0.2)
        with pytest.raises(
            IndexLost, match=rf"no node has slot {slot}, for the key blackbox:.TB-3.:"
        ):
            ShardIndex(SHARD, pool(servers.url), grace_s=GRACE_S)


def forgets(node: EmbeddedRedis, slot: int) -> bool:
    """Whether it still knew an owner of the slot."""
    with redis.Redis.from_url(node.url) as client:
        try:
            client.execute_command("CLUSTER", "DELSLOTS", slot)
        except redis.ResponseError:  # it is unassigned already
            return False
    return True


def test_a_plain_url_of_a_cluster_node_fails_for_keys_of_other_nodes(
    cluster: ClusterServers,
) -> None:
    alone = other_than(cluster, cluster.node_of(PREFIX))
    with opened(alone.url, SHARD) as index:
        with pytest.raises(IndexLost, match="Redis cannot serve requests now: MOVED"):
            index.load()
        with pytest.raises(IndexLost):
            index.load()


PONG = [b"PONG"]


@pytest.fixture
def locked(cluster: ClusterServers) -> Iterator[ClusterServers]:
    """A cluster whose nodes require the password hunter2."""
    with ExitStack() as ending:
        for node in cluster.nodes:
            client = ending.enter_context(
                redis.Redis.from_url(node.url, single_connection_client=True)
            )
            # the connection that sets it stays logged in
            client.config_set("requirepass", "hunter2")
            ending.callback(client.config_set, "requirepass", "")
        yield cluster


def test_one_login_applies_to_every_node_and_is_never_printed(locked: ClusterServers) -> None:
    url = locked.url
    connections = pool(url.replace("://", "://:hunter2@"))
    for shard in range(9):
        key = Keys(Shard("TB", shard)).state
        assert RedisSession(connections, key).run([pack("PING")]) == PONG
    assert "hunter2" not in repr(connections)
    for wrong in (url, url.replace("://", "://:hunter3@")):
        with pytest.raises(IndexLost, match="refuses: ") as refused:
            RedisSession(pool(wrong))
        assert "hunter" not in str(refused.value)
