"""The two Redis users that `deploy/redis.acl` ships: each may use exactly the commands that it needs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from confluent_kafka.admin import NewTopic
from redis.exceptions import NoPermissionError

from blackbox.config.check import findings
from blackbox.core.due_batch import MOST_LETTER_SPAN
from blackbox.core.plan import Positions
from blackbox.embedded import EmbeddedRedis, EmbeddedStack
from blackbox.index import bus
from blackbox.index.connection import pool
from blackbox.index.index_dump import IndexDump
from blackbox.index.inspector import Inspector
from blackbox.index.redis_servers import RedisServers
from blackbox.index.shard_index import ShardIndex
from blackbox.records.errors import IndexLost
from blackbox.records.request import Shard
from tests.contract.held import entry, store
from tests.security.conftest import REDIS_PASSWORD, GuardedRedis, start_guarded_redis
from tests.security.rights import REDIS_ACL, commands_of, redis_users
from tests.service.test_cli import blackbox
from tests.support.world import World, read_all, until

pytestmark = pytest.mark.service

WITHOUT_A_RIGHT = {"auth"}
"""Commands that Redis accepts from everybody."""

NOT_FOR_A_SERVICE = {"config|get"}
"""It would also show passwords of the server, so a service does not use it; `check` says so."""

OWN = {"acl|log", "acl|setuser", "config|resetstat", "config|set", "flushall", "del", "keys"}
"""The commands of the tests themselves."""


@pytest.fixture(scope="module")
def server(
    stack: EmbeddedStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GuardedRedis]:
    server = start_guarded_redis(tmp_path_factory.mktemp("rights"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def deployment(
    stack: EmbeddedStack, server: GuardedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    with World(stack.kafka, server, tmp_path_factory.mktemp("deployment")) as world:
        yield world


@pytest.fixture(scope="module")
def used_by_the_service(redis_7: str, deployment: World, server: GuardedRedis) -> set[str]:
    """Everything that a service and its commands do in Redis; returns the commands that Redis counted."""
    with server.admin() as admin:
        admin.config_resetstat()
        daily_work(deployment, admin)
        missing_payload(deployment, admin)
        distant_payloads(deployment, admin)
        rolled_back(deployment, admin)
        full_redis(deployment, admin)
        emptied_redis(deployment, admin)
        cold_tier(deployment)
        callers_with_rules(deployment)
        lookups(deployment)
        notes_between_processes(server)
        return used(admin)


def used(admin: redis.Redis) -> set[str]:
    stats: dict[str, Any] = admin.info("commandstats")
    return {name.removeprefix("cmdstat_") for name in stats} - OWN - WITHOUT_A_RIGHT


def daily_work(deployment: World, admin: redis.Redis) -> None:
    """Deliveries, a replaced and a cancelled request, a missing target, a batch beyond 16 MiB."""
    target = extra(deployment)
    deployment.create(NewTopic(target, 1))
    service = deployment.start_service(retries=1, trim_interval_s=1).wait_ready()
    for message in ("first", "second"):
        ask(deployment, {"topic": target, "message": message, "countdown": 0.5, "id": "named"})
    ask(deployment, {"topic": target, "message": "never", "countdown": 3600, "id": "unwanted"})
    ask(deployment, {"id": "unwanted", "cancel": True})
    ask(deployment, {"topic": f"{deployment.name}.nowhere", "message": "x", "countdown": 0})
    for size in (900_000, *[10] * 20):
        ask(deployment, {"topic": target, "message": "x" * size, "countdown": 1})
    brokers = deployment.kafka.bootstrap_servers
    until(
        "all except the one without a target are delivered",
        lambda: len(read_all(brokers, target)) == 22,
    )
    until("it is a dead letter", lambda: deployment.received(deployment.dead_letters))
    assert service.metric("blackbox_replaced_total") == 1
    until("it has walked", lambda: service.metric("blackbox_journal_low_water_position") > 0)


def missing_payload(deployment: World, admin: redis.Redis) -> None:
    deployment.ask(1, within_s=2, from_s=2)
    [key] = until("it is in Redis", lambda: admin.keys("blackbox:*:msg:*"))
    admin.delete(key)
    assert deployment.wait_delivered().is_exact


def distant_payloads(deployment: World, admin: redis.Redis) -> None:
    """Two missing payloads whose records are far apart in Kafka: the second one is read a little later."""
    target, brokers = extra(deployment), deployment.kafka.bootstrap_servers
    before = len(read_all(brokers, target))
    asked = {"topic": target, "message": "far", "at": int(time.time() * 1000) + 5000}
    ask(deployment, asked)
    for _ in range(MOST_LETTER_SPAN + 1):
        ask(deployment, {"id": "nothing", "cancel": True})
    ask(deployment, asked)
    keys = until(
        "both are in Redis", lambda: k if len(k := admin.keys("blackbox:*:msg:*")) == 2 else None
    )
    admin.delete(*keys)
    until("both are delivered", lambda: len(read_all(brokers, target)) == before + 2)


def rolled_back(deployment: World, admin: redis.Redis) -> None:
    """A kept index that lacks outcomes."""
    service = deployment.services[-1]
    opened = service.metric("blackbox_recoveries_total")
    for key in admin.keys("blackbox:*:receipts"):
        admin.set(key, 0)
    until("it recovers", lambda: service.metric("blackbox_recoveries_total") > opened)


def full_redis(deployment: World, admin: redis.Redis) -> None:
    deployment.ask(1, within_s=2, from_s=2)
    until("it is in Redis", lambda: admin.keys("blackbox:*:msg:*"))
    admin.config_set("maxmemory", 1)
    assert deployment.wait_delivered().is_exact
    admin.config_set("maxmemory", "1gb")


def callers_with_rules(deployment: World) -> None:
    """Quotas, a rate, a paused target."""
    target = deployment.targets[0]
    path = deployment.folder / "callers.toml"
    path.write_text(
        "[others]\nrequests_per_second = 9\nmost_pending = 9\n"
        f"[targets.{target!r}]\nmessages_per_second = 1"
    )
    service = deployment.start_service(callers_file=path).wait_ready()
    ask(deployment, {"topic": target, "message": "x", "countdown": 3600, "id": "unwanted"})
    until(
        "it is listed",
        lambda: "unwanted" in blackbox(deployment.environment(), "pending", "--json").out,
    )
    ask(deployment, {"id": "unwanted", "cancel": True})
    for _ in range(20):
        ask(deployment, {"topic": target, "message": "x", "countdown": 0})
    until("some are refused", lambda: service.metric("blackbox_refused_total") > 0)
    until("some are pending", lambda: service.metric("blackbox_postponed_total") > 0)
    assert blackbox(deployment.environment(), "pause", target).code == 0
    assert blackbox(deployment.environment(), "resume", target).code == 0
    service.stop()


def emptied_redis(deployment: World, admin: redis.Redis) -> None:
    admin.flushall()
    deployment.ask(20, within_s=0)
    assert deployment.wait_delivered().is_exact
    deployment.services[-1].stop()


def cold_tier(deployment: World) -> None:
    service = deployment.start_service(hot_horizon_s=1).wait_ready()
    ask(deployment, {"topic": extra(deployment), "message": "never", "countdown": 3, "id": "cold"})
    deployment.ask(4, within_s=3, from_s=3)
    ask(deployment, {"id": "cold", "cancel": True})
    assert deployment.wait_delivered().is_exact
    assert service.metric("blackbox_cancelled_total") == 1
    service.stop()


def lookups(deployment: World) -> None:
    environment = deployment.environment()
    assert blackbox(environment, "status").code == 0
    for offset in range(3):
        assert blackbox(environment, "show", f"{deployment.requests}/0@{offset}").code == 0


def notes_between_processes(server: GuardedRedis) -> None:
    """The notes between the tasks and the driver of the Spark engine, with a URL that lets redis-py send PING."""
    url = f"{server.url}?health_check_interval=1"
    sender, listener = bus.Bus(url, "rights"), bus.Listener(url, "rights", ("kind",))
    listener.next(0.1)
    for number in range(2):
        time.sleep(1.1 * number)  # the connection is idle for longer than the interval
        sender.send("kind", {"of": number})
        assert until("it is received", lambda: listener.next(0.1)) == ("kind", {"of": number})
    sender.close()
    listener.close()


def extra(deployment: World) -> str:
    """A target that the bookkeeping of the world ignores."""
    return f"{deployment.name}.extra"


def ask(deployment: World, request: dict[str, object]) -> None:
    deployment.send_raw(json.dumps(request), partition=0)


@pytest.mark.proof
def test_the_user_of_the_service_may_do_exactly_what_the_service_does(
    used_by_the_service: set[str],
) -> None:
    assert used_by_the_service == commands_of("blackbox") | NOT_FOR_A_SERVICE


def test_nothing_the_service_does_is_refused(
    used_by_the_service: set[str], server: GuardedRedis
) -> None:
    with server.admin() as admin:
        assert {refused["object"] for refused in admin.acl_log()} == NOT_FOR_A_SERVICE


def test_the_read_only_user_may_do_exactly_what_read_commands_need(
    used_by_the_service: set[str], deployment: World, server: GuardedRedis
) -> None:
    url = server.url_of("blackbox-reader")
    shards = [Shard("whole", 0), Shard("bare", 0)]
    for shard in shards:
        fill(server, shard)
    lose_a_payload(server, shards[1])
    with server.admin() as admin:
        admin.config_resetstat()
        admin.acl_log_reset()
        environment = deployment.environment(redis_url=url)
        assert blackbox(environment, "check").code == 0
        assert blackbox(environment, "status").code == 0
        assert blackbox(environment, "show", f"{deployment.requests}/0@0").code == 0
        assert blackbox(environment, "pending").code == 0
        dump, inspector = IndexDump(url), Inspector.of(url)
        for shard in shards:
            assert inspector.positions(shard)
            assert [held.offset for page in dump.entries(shard) for held in page] == [0, 1]
            list(dump.cold(shard))
            list(dump.ignored(shard))
        assert [orphan for page in dump.orphans(shards) for orphan in page] == [(shards[1], 7)]
        dump.close()
        inspector.close()
        assert used(admin) == commands_of("blackbox-reader")
        assert admin.acl_log() == []


def fill(server: GuardedRedis, shard: Shard) -> None:
    """Two entries."""
    connections = pool(server.url)
    index = ShardIndex(shard, connections, grace_s=3600)
    index.begin(Positions(0, 0))
    store(index, 0, 2, {0: entry(), 1: entry()})
    index.close()
    connections.disconnect()


def lose_a_payload(server: GuardedRedis, shard: Shard) -> None:
    """Delete the payload of the first entry; and leave a payload without its entry."""
    with server.admin() as admin:
        prefix = f"blackbox:{{{shard}}}:msg:"
        admin.delete(f"{prefix}{0:016x}")
        admin.set(f"{prefix}{7:016x}", "left behind")


REFUSED = (
    "KEYS *", "FLUSHALL", "FLUSHDB", "SHUTDOWN NOSAVE", "DEBUG SLEEP 0", "SAVE", "BGREWRITEAOF",
    "CONFIG SET maxmemory-policy allkeys-lru", "CONFIG REWRITE", "ACL LIST", "ACL SETUSER x on",
    "CLIENT LIST", "CLIENT KILL TYPE normal", "CLIENT PAUSE 1", "MONITOR", "REPLICAOF NO ONE",
    "SWAPDB 0 1", "SELECT 1", "MODULE LIST", "SCRIPT FLUSH", "FUNCTION LIST", "RENAME a b",
    "MIGRATE h 1 k 0 1", "DUMP k", "OBJECT HELP", "SORT k", "RANDOMKEY", "DBSIZE", "SLOWLOG GET",
    "DEL blackbox:{TB-0}:due", "PERSIST blackbox:{TB-0}:due", "PSUBSCRIBE *",
)  # fmt: skip
OF_OTHERS = (
    "GET others", "SET others 1", "GET blackbox", "SET blackbox:others 1", "UNLINK others",
    "MGET blackbox:{TB-0}:state others", "PUBLISH others x", "PUBLISH blackbox:others x",
    "EVAL return(1) 1 others", "EXPIRE others 1",
)  # fmt: skip
WRITES = (
    "SET blackbox:{TB-0}:receipts 1", "ZADD blackbox:{TB-0}:due 1 a", "MULTI",
    "UNLINK blackbox:{TB-0}:due", "HSET blackbox:{TB-0}:state a 1", "EVAL return(1) 0",
    "PUBLISH blackbox:bus:x:y 1", "SUBSCRIBE blackbox:bus:x:y", "EXPIRE blackbox:{TB-0}:due 1",
)  # fmt: skip


@pytest.mark.usefixtures("redis_7")
@pytest.mark.parametrize(
    ("user", "commands"),
    [
        ("blackbox", (*REFUSED, *OF_OTHERS, "SCAN 0", "CONFIG GET *")),
        ("blackbox-reader", (*REFUSED, *OF_OTHERS, *WRITES)),
    ],
)  # fmt: skip
def test_redis_users_are_refused_other_commands_and_keys(
    server: GuardedRedis, user: str, commands: tuple[str, ...]
) -> None:
    with redis.Redis.from_url(server.url_of(user)) as client:
        for command in commands:
            with pytest.raises(redis.ResponseError, match=r"(?i)no permissions|not allowed"):
                client.execute_command(*command.split())


def test_a_script_reaches_no_other_key_and_no_other_command(server: GuardedRedis) -> None:
    with redis.Redis.from_url(server.url_of("blackbox")) as client:
        for call in ("'GET', 'others'", "'SET', 'others', '1'", "'KEYS', '*'", "'FLUSHALL'"):
            with pytest.raises(redis.ResponseError, match=r"can't (run|access)"):
                client.eval(f"return redis.call({call})", 0)


def test_check_warns_that_the_redis_configuration_cannot_be_read(
    deployment: World, server: GuardedRedis
) -> None:
    [finding] = [one for one in findings(deployment.settings()) if "CONFIG" in one.text]
    assert finding.severity == "warn"
    assert "CONFIG GET aof-load-truncated" in finding.text


def test_redis_users_without_a_password_cannot_log_in(stack: EmbeddedStack, tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text(REDIS_ACL.read_text())
    server = EmbeddedRedis(tmp_path / "redis", settings={"aclfile": f'"{users}"'})
    server.start()
    for user in redis_users():
        for password in ("", REDIS_PASSWORD):
            url = f"redis://{user}:{password}@127.0.0.1:{server.port}/0"
            with pytest.raises(IndexLost, match="invalid username-password pair"):
                RedisServers(url).now_ms()
    server.stop()


def test_the_oldest_supported_redis_accepts_the_shipped_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blackbox.embedded.redis.shutil.which", lambda name: None)
    server = start_guarded_redis(tmp_path)
    try:
        with server.admin() as admin:
            assert admin.info("server")["redis_version"].startswith("6.2.")
        connections = pool(server.url)
        index = ShardIndex(Shard("TB", 0), connections, grace_s=3600)
        index.begin(Positions(0, 0))
        index.close()
        connections.disconnect()
        with redis.Redis.from_url(server.url) as client, pytest.raises(NoPermissionError):
            client.publish("others", "x")
    finally:
        server.stop()
