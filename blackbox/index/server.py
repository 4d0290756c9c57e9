"""What the Redis server itself says: its clock, its memory, how it is configured."""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from blackbox.doubt import IndexLost


class NotTold(IndexLost):
    """Redis answers, but not this question: the user may not ask it, or the server does not know it."""


class RedisServer:
    """Questions about the server, not about any shard. Raises IndexLost when it does not answer."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(
            url, protocol=2, socket_timeout=5, socket_connect_timeout=5, retry=Retry(NoBackoff(), 0)
        )

    def now_ms(self) -> int:
        """Redis' wall clock, epoch milliseconds."""
        seconds, micros = self._ask("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def memory_used(self) -> float:
        """The used share of `maxmemory`, 0 to 1 and above; 0 without a limit."""
        info = self._ask("INFO", "memory")
        limit = int(info.get("maxmemory", 0))
        return int(info["used_memory"]) / limit if limit else 0.0

    def info(self, section: str) -> dict[str, Any]:
        """A section of INFO, numbers as numbers. Raises NotTold when it may not be asked."""
        found: dict[str, Any] = self._ask("INFO", section)
        return found

    def config(self, name: str) -> str:
        """A directive's value as Redis runs with it. Raises NotTold when it may not be asked."""
        found = {_text(key): _text(value) for key, value in self._ask("CONFIG GET", name).items()}
        if name not in found:
            raise NotTold(f"Redis does not know the directive {name}")
        return found[name]

    def close(self) -> None:
        self._client.close()

    def _ask(self, *command: str) -> Any:
        try:
            return self._client.execute_command(*command)  # type: ignore[no-untyped-call]
        except redis.ResponseError as error:
            raise NotTold(f"Redis does not tell {' '.join(command)}: {error}") from error
        except (redis.RedisError, OSError) as error:
            raise IndexLost(f"Redis does not answer {command[0]}: {error}") from error


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
