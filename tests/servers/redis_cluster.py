"""A Redis Cluster of three primaries without replicas, each with a third of the slots."""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
from redis.crc import key_slot

from blackbox.embedded import EmbeddedRedis
from blackbox.embedded.tcp_ports import HOST, is_free
from tests.support.world import until

NODES = 3
SLOTS = 16_384
DEADLINE_S = 30.0
PORTS = range(20_000, 22_000)
"""Keeps the ports of the cluster bus, 10,000 higher, out of the range of client ports."""


class ClusterServers:
    """Started when entered. A node counts as dead after a second of silence."""

    def __init__(self, folder: Path, *, needs_all: bool = True) -> None:
        settings = {
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": "1000",
            "cluster-require-full-coverage": "yes" if needs_all else "no",
        }
        ports = _free_ports(NODES)
        self.nodes = [
            EmbeddedRedis(folder / f"node-{number}", port=port, settings=settings)
            for number, port in enumerate(ports)
        ]

    def __enter__(self) -> ClusterServers:
        with ThreadPoolExecutor() as pool:
            list(pool.map(EmbeddedRedis.start, self.nodes))
        share = SLOTS // NODES
        for number, node in enumerate(self.nodes):
            last = SLOTS - 1 if number == NODES - 1 else (number + 1) * share - 1
            _ask(node, "CLUSTER", "ADDSLOTS", *range(number * share, last + 1))
            _ask(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            _ask(self.nodes[0], "CLUSTER", "MEET", HOST, node.port)
        self.wait_well()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in self.nodes:
            node.stop()

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{HOST}:{node.port}" for node in self.nodes)

    def wait_well(self) -> None:
        """Wait until every node reports that the cluster is ok."""
        until("the cluster is ok", lambda: all(map(_is_well, self.nodes)), DEADLINE_S)

    def node_of(self, key: str | bytes) -> EmbeddedRedis:
        """The node that has this key."""
        slot = key_slot(key.encode() if isinstance(key, str) else key)
        for first, last, (_, port, *_), *_ in _ask(self.nodes[0], "CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"nobody has the slot {slot}")

    def move(self, key: str, target: EmbeddedRedis) -> None:
        """Move the slot of this key to another node, with its content, key by key."""
        source, slot = self.node_of(key), key_slot(key.encode())
        if source is target:
            return
        self.begin_move(slot, source, target)
        while some := _ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            _ask(source, "MIGRATE", HOST, target.port, "", 0, 5000, "KEYS", *some)
        for node in (target, source, *self.nodes):
            _ask(node, "CLUSTER", "SETSLOT", slot, "NODE", _id(target))
        until("every node knows", lambda: self.node_of(key) is target, DEADLINE_S)

    def begin_move(self, slot: int, source: EmbeddedRedis, target: EmbeddedRedis) -> None:
        """From now on, clients must ask the target for a key that is no longer at the source."""
        _ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", _id(source))
        _ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", _id(target))

    def spread(self, keys: Iterable[str]) -> None:
        """Assign the slots of these keys to the nodes in turn."""
        for number, key in enumerate(keys):
            self.move(key, self.nodes[number % NODES])


def _ask(node: EmbeddedRedis, *command: object) -> Any:
    client: Any = redis.Redis.from_url(node.url)
    with client:
        return client.execute_command(*command)


def _id(node: EmbeddedRedis) -> str:
    return str(_ask(node, "CLUSTER", "MYID").decode())


def _is_well(node: EmbeddedRedis) -> bool:
    with suppress(redis.RedisError, OSError):
        state = _ask(node, "CLUSTER", "INFO").decode().splitlines()
        return {"cluster_state:ok", f"cluster_known_nodes:{NODES}"} <= set(state)
    return False


def _free_ports(count: int) -> list[int]:
    ports = random.SystemRandom().sample(PORTS, len(PORTS))
    return [port for port in ports if is_free(port) and is_free(port + 10_000)][:count]
