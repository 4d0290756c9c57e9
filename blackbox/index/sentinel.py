"""Connections to the primary of a service; Redis Sentinel is asked where it is."""

from __future__ import annotations

from typing import Any

import redis
from redis.sentinel import Sentinel, SentinelConnectionPool

from blackbox.index.address import Address, ServerAddress

# A sentinel that is silent for this long is skipped; the next connection asks another one first.
SENTINEL_TIMEOUT_S = 2.0


class Primary(SentinelConnectionPool):
    """A pool that asks for the primary at each new connection."""

    def __init__(self, address: Address, options: dict[str, Any], of_any: dict[str, Any]) -> None:
        of_sentinels = of_any | address.of_sentinels
        for timeout in ("socket_timeout", "socket_connect_timeout"):
            of_sentinels[timeout] = SENTINEL_TIMEOUT_S
        sentinels = _Sentinels(address.places, sentinel_kwargs=of_sentinels)  # type: ignore[no-untyped-call]
        # The pool has connection classes of its own, which ask for the primary.
        is_tls = options.pop("connection_class", None) is not None
        super().__init__(address.service, sentinels, ssl=is_tls, **options)  # type: ignore[no-untyped-call]

    def disconnect(self, inuse_connections: bool = True) -> None:
        super().disconnect(inuse_connections)
        if inuse_connections:
            self.sentinel_manager.close()


class _Sentinels(Sentinel):
    """redis-py's Sentinel; its error also reports each sentinel's answer when none names a primary."""

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Where the primary is now. Raises redis.ConnectionError when no sentinel knows one."""
        said = []
        for sentinel in tuple(self.sentinels):
            try:
                services: Any = sentinel.sentinel_masters()
            except (redis.RedisError, OSError) as error:
                said.append(f"{_place(sentinel)} {_why_silent(error)}")
                continue
            state = services.get(service_name)
            if state is None:
                others = ", ".join(sorted(services)) or "none at all"
                said.append(f"{_place(sentinel)} knows other services: {others}")
            elif not self.check_master_state(state, service_name):  # type: ignore[no-untyped-call]
                said.append(
                    f"{_place(sentinel)} reports that it is down, without a new primary yet"
                )
            else:
                self.sentinels = [sentinel, *(s for s in self.sentinels if s is not sentinel)]
                return state["ip"], state["port"]
        raise redis.ConnectionError(
            f"no sentinel knows a primary of {service_name!r}: {'; '.join(said)}"
        )


def _place(sentinel: redis.Redis) -> ServerAddress:
    connection = sentinel.connection_pool.connection_kwargs
    return ServerAddress(connection["host"], connection["port"])


def _why_silent(error: Exception) -> str:
    if isinstance(error, redis.AuthenticationError):
        if "required" in str(error):
            return (
                "requires a password: add ?sentinel_password=… to the URL, and "
                "&sentinel_username=… for a user other than the default one"
            )
        return f"rejects sentinel_username and sentinel_password: {error}"
    if isinstance(error, redis.ResponseError):
        return f"is not a sentinel, or refuses to answer: {error}"
    return f"does not answer: {error}"
