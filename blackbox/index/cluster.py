"""Connections to the nodes of a Redis Cluster, which are asked for the slots of each node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import Lock
from typing import Any

import redis
from redis.crc import key_slot

from blackbox.index.address import Address, ServerAddress

Slots = list[tuple[range, ServerAddress]]


class Cluster:
    """One pool for each node."""

    def __init__(self, address: Address, options: dict[str, Any]) -> None:
        self._named = address.places
        self._options = options
        self._clients: dict[ServerAddress, redis.Redis] = {}
        self._lock = Lock()

    def servers_of(self, keys: Iterable[bytes]) -> dict[bytes, redis.ConnectionPool]:
        """The primaries that have these keys now. Raises redis.ConnectionError when no node reports them."""
        # Asked each time. redis-py's cluster client would follow a redirection and retry, but the
        # owner of a shard must notice that its slot has moved, and recover.
        _, slots = self._ask()
        return {key: self._server_of(key, slots) for key in keys}

    def _server_of(self, key: bytes, slots: Slots) -> redis.ConnectionPool:
        slot = key_slot(key)
        for held, place in slots:
            if slot in held:
                return self.pool(place)
        raise redis.ConnectionError(
            f"no node has slot {slot}, for the key {key.decode(errors='replace')}; run redis-cli "
            "--cluster check"
        )

    def servers(self) -> dict[str, redis.ConnectionPool]:
        """Every primary that has slots now, by its address."""
        _, slots = self._ask()
        return {str(place): self.pool(place) for _, place in slots}

    def any_server(self) -> redis.ConnectionPool:
        place, _ = self._ask()
        return self.pool(place)

    def pool(self, place: ServerAddress | None = None) -> redis.ConnectionPool:
        """The connections to this node; by default to the first named one."""
        return self._client(place or self._named[0]).connection_pool

    def disconnect(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.connection_pool.disconnect()

    def _client(self, place: ServerAddress) -> redis.Redis:
        with self._lock:
            if place not in self._clients:
                pool = redis.ConnectionPool(host=place.host, port=place.port, **self._options)
                self._clients[place] = redis.Redis(connection_pool=pool)
            return self._clients[place]

    def _ask(self) -> tuple[ServerAddress, Slots]:
        """The node that answers, and its slot table; preferably one that sees a working cluster."""
        said, cut_off = [], None
        for place in self._named:
            try:
                is_well, slots = self._look(place)
            except (redis.RedisError, OSError) as error:
                said.append(f"{place} {_why_silent(error)}")
                continue
            if slots and is_well:
                # Asked first from now on: each silent node before it would cost a timeout.
                self._named = (place, *(other for other in self._named if other != place))
                return place, slots
            if not slots:
                said.append(f"{place} does not belong to a cluster")
            # A node that is cut off from the others keeps reporting what was true before.
            elif cut_off is None:
                cut_off = place, slots
        if cut_off is not None:
            return cut_off
        raise redis.ConnectionError(f"no node describes its cluster: {'; '.join(said)}")

    def _look(self, asked: ServerAddress) -> tuple[bool, Slots]:
        pipeline = self._client(asked).pipeline(transaction=False)
        pipeline.execute_command("CLUSTER", "INFO")  # type: ignore[no-untyped-call]
        pipeline.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
        state, slots = pipeline.execute()
        return b"cluster_state:ok" in state, list(_primaries(slots, asked))


def _primaries(slots: list[Any], asked: ServerAddress) -> Iterator[tuple[range, ServerAddress]]:
    for first, last, (host, port, *_), *_ in slots:
        # a node that does not know its own name gets the one under which it was asked
        yield range(first, last + 1), ServerAddress(host.decode() if host else asked.host, port)


def _why_silent(error: Exception) -> str:
    if "cluster support disabled" in str(error):
        return "is not a node of a cluster: use redis:// for a single Redis"
    if isinstance(error, (redis.AuthenticationError, redis.ResponseError)):
        return f"refuses: {error}"
    return f"does not answer: {error}"
