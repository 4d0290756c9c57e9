"""State of the Redis servers: clocks, memory, configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import redis

from blackbox.index.connection import Clients, pool
from blackbox.records.errors import IndexLost

T = TypeVar("T")

PAUSE_AT = 0.85  # the share of `maxmemory` from which on requests stay in Kafka

MEMORY_KNOWN_FOR_S = 0.5
# A node that was silent is not asked for this long: it must not delay every look at the others.
SILENT_S = 30.0


class NotAnswered(IndexLost):
    """Redis answers, but not this question: the user may not ask it, or the server does not know it."""


class RedisNode:
    """Queries of one server, not of a shard. Raises IndexLost when it does not answer."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def now_ms(self) -> int:
        """Its wall clock, epoch milliseconds."""
        seconds, micros = self._ask("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def memory_used(self) -> float:
        """The used share of `maxmemory`, 0 to 1 and above; 0 without a limit."""
        info = self._ask("INFO", "memory")
        limit = int(info.get("maxmemory", 0))
        return int(info["used_memory"]) / limit if limit else 0.0

    def info(self, section: str) -> dict[str, Any]:
        """A section of INFO, numbers as numbers. Raises NotAnswered when it may not be asked for."""
        found: dict[str, Any] = self._ask("INFO", section)
        return found

    def config(self, name: str) -> str:
        """The value of a directive in the running server. Raises NotAnswered when it may not be asked for."""
        found = {_text(key): _text(value) for key, value in self._ask("CONFIG GET", name).items()}
        if name not in found:
            raise NotAnswered(f"Redis does not know the directive {name}")
        return found[name]

    def _ask(self, *command: str) -> Any:
        try:
            return self._client.execute_command(*command)  # type: ignore[no-untyped-call]
        except redis.ResponseError as error:
            raise NotAnswered(f"Redis refuses {' '.join(command)}: {error}") from error
        except (redis.RedisError, OSError) as error:
            raise IndexLost(f"Redis does not answer {command[0]}: {error}") from error


class RedisServers:
    """The same for all servers that have keys now: one, or the primaries of a cluster.

    A server that is silent is skipped; raises IndexLost when none answers.
    """

    def __init__(self, url: str) -> None:
        self._clients = Clients(pool(url))
        self._silent_s: dict[str, float] = {}

    def each(self) -> dict[str, RedisNode]:
        """The servers by their addresses; a single server has the name ""."""
        try:
            return {name: RedisNode(client) for name, client in self._clients.each().items()}
        except (redis.RedisError, OSError) as error:
            raise IndexLost(f"Redis does not answer: {error}") from error

    def now_ms(self) -> int:
        """The earliest of their wall clocks, epoch ms."""
        asked = self._answers(lambda server: (server.now_ms(), time.monotonic()))
        # A later server may have been waited for in vain: the earlier answers are older by that time.
        now_s = time.monotonic()
        # The earliest, so that one fast clock makes no message early.
        return min(now_ms + int((now_s - at_s) * 1000) for now_ms, at_s in asked)

    def memory_used(self) -> float:
        """The used share of `maxmemory` of the fullest server; see `RedisNode`."""
        return max(self._answers(RedisNode.memory_used))

    def close(self) -> None:
        self._clients.close()

    def _answers(self, question: Callable[[RedisNode], T]) -> list[T]:
        answers, silence = [], IndexLost("no node of the cluster answered just now")
        for name, server in self.each().items():
            if time.monotonic() < self._silent_s.get(name, 0.0):
                continue
            try:
                answers.append(question(server))
            except NotAnswered:
                raise
            except IndexLost as silent:
                silence = silent
                self._silent_s[name] = time.monotonic() + SILENT_S
        if not answers:
            self._silent_s.clear()
            raise silence
        return answers


@dataclass
class RedisRoom:
    """Whether Redis has room for more requests; asked at most twice a second."""

    redis: RedisServers
    _looked_s: float = float("-inf")
    _has_room: bool = True

    def __call__(self) -> bool:
        if time.monotonic() - self._looked_s > MEMORY_KNOWN_FOR_S:
            try:
                self._has_room = self.redis.memory_used() < PAUSE_AT
            except IndexLost:  # if it is full, Redis refuses the store
                self._has_room = True
            self._looked_s = time.monotonic()
        return self._has_room


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
