"""A Redis that fails over: a primary, its replica, and the sentinels that watch both."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import redis

from blackbox.embedded import EmbeddedRedis
from blackbox.embedded.guarded_process import GuardedProcess
from blackbox.embedded.redis import find_redis
from blackbox.embedded.tcp_ports import HOST, free_port
from tests.support.world import until

SERVICE = "shop"
DOWN_AFTER_MS = 1000
DEADLINE_S = 30.0
AT_ONCE = {"repl-diskless-sync-delay": "0"}


class SentinelProcess:
    """One sentinel, which watches the server at the port `primary`."""

    def __init__(
        self,
        folder: Path,
        primary: int,
        *,
        quorum: int = 1,
        password: str | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self._password = password
        folder.mkdir(parents=True)
        lines = [
            f"port {self.port}",
            f"bind {HOST}",
            f"dir {folder}",
            f"sentinel monitor {SERVICE} {HOST} {primary} {quorum}",
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {SERVICE} 6000",
        ]
        lines += [f"{name} {value}" for name, value in (settings or {}).items()]
        if password is not None:
            lines += [f"requirepass {password}", f"sentinel sentinel-pass {password}"]
        configuration = folder / "sentinel.conf"
        configuration.write_text("\n".join(lines) + "\n")
        server, _ = find_redis()
        self.process = GuardedProcess(
            [server, str(configuration), "--sentinel"], log=folder / "sentinel.log"
        )
        self.process.wait_until(self._listens, name="a sentinel", deadline_s=DEADLINE_S)

    def client(self) -> Any:
        return redis.Redis(HOST, self.port, password=self._password, decode_responses=True)

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection((HOST, self.port), timeout=1):
            return True
        return False


class SentinelServers:
    """Started when entered. The sentinels find a primary down after a second."""

    def __init__(
        self, folder: Path, *, sentinels: int = 1, sentinel_password: str | None = None
    ) -> None:
        self._folder = folder
        self._count = sentinels
        self._password = sentinel_password
        self.servers: list[EmbeddedRedis] = []
        self.sentinels: list[SentinelProcess] = []

    def __enter__(self) -> SentinelServers:
        first = EmbeddedRedis(self._folder / "redis-0", settings=AT_ONCE)
        first.start()
        second = EmbeddedRedis(
            self._folder / "redis-1", settings=AT_ONCE | {"replicaof": f"{HOST} {first.port}"}
        )
        self.servers = [first, second]
        second.start()
        for number in range(self._count):
            folder = self._folder / f"sentinel-{number}"
            quorum = self._count // 2 + 1
            self.sentinels.append(
                SentinelProcess(folder, first.port, quorum=quorum, password=self._password)
            )
        self.wait_replicated()
        for sentinel in self.sentinels:
            until("the sentinel knows all", partial(self._knows_all, sentinel), DEADLINE_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for sentinel in self.sentinels:
            sentinel.process.stop(5)
        for server in self.servers:
            server.stop()

    @property
    def url(self) -> str:
        return self.url_of(SERVICE, self._password)

    def url_of(self, service: str, password: str | None = None) -> str:
        """The sentinels' address; `password` is theirs."""
        places = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        option = "" if password is None else f"?sentinel_password={quote(password, safe='')}"
        return f"redis+sentinel://{places}/{service}/0{option}"

    @property
    def primary(self) -> EmbeddedRedis:
        """The server that is the primary for the first sentinel."""
        state = self.sentinels[0].client().sentinel_master(SERVICE)
        return next(server for server in self.servers if server.port == state["port"])

    @property
    def replica(self) -> EmbeddedRedis:
        """The other one."""
        primary = self.primary
        return next(server for server in self.servers if server is not primary)

    def fail_over(self) -> None:
        """As an operator starts it; returns when the replica is the primary."""
        before = self.primary

        def is_ordered() -> bool:
            with suppress(
                redis.ResponseError
            ):  # the sentinel does not know yet that it is a replica
                self.sentinels[0].client().execute_command("SENTINEL FAILOVER", SERVICE)
                return True
            return False

        until("a replica can be promoted", is_ordered, DEADLINE_S)
        until("the replica is promoted", lambda: self.primary is not before, DEADLINE_S)

    def kill_primary(self) -> EmbeddedRedis:
        """kill -9; returns the dead server when the replica is the primary."""
        dead = self.primary
        dead.kill()
        until("the replica is promoted", lambda: self.primary is not dead, DEADLINE_S)
        return dead

    def stop_replicating(self) -> None:
        """Stop replication; a failover loses what is written from now on."""
        with client_of(self.replica) as replica:
            replica.config_set("masterauth", "wrong")
            replica.execute_command("CLIENT", "KILL", "TYPE", "master")
            until("the replication link is down", lambda: _link(replica) != "up", DEADLINE_S)

    def wait_replicated(self) -> None:
        """Wait until one is the replica of the other, and is up to date."""
        until("the replica follows", self._follows, DEADLINE_S)

    def _follows(self) -> bool:
        for server in self.servers:
            with suppress(redis.RedisError, OSError), client_of(server) as client:
                if client.info("replication")["role"] == "slave":
                    client.config_set("masterauth", "")
                    return _link(client) == "up"
        return False

    def _knows_all(self, sentinel: SentinelProcess) -> bool:
        state = sentinel.client().sentinel_master(SERVICE)
        others = len(self.sentinels) - 1
        return (state["num-slaves"], state["num-other-sentinels"]) == (1, others)


def client_of(server: EmbeddedRedis) -> Any:
    return redis.Redis.from_url(server.url, decode_responses=True)


def _link(replica: Any) -> str:
    return str(replica.info("replication").get("master_link_status"))
