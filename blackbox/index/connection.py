"""One exclusive connection to Redis that never reconnects by itself.

A connection that is lost may come back to a Redis that lost writes, so the owner of a shard
must notice: every failure here is a doubt, and a new session is opened by recovery only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import hiredis
import redis
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.backoff import NoBackoff
from redis.retry import Retry

from blackbox.doubt import IndexFull, IndexLost

Command = tuple[bytes | str | int, ...]

NOT_SERVING = (
    "LOADING", "READONLY", "MASTERDOWN", "BUSY", "NOREPLICAS", "MISCONF", "CLUSTERDOWN", "TRYAGAIN",
)  # fmt: skip


STREAM_COMMANDS = 250
"""Commands sent at once; enough to make a system call worth its while."""


def pool(url: str, *, timeout_s: float = 5.0) -> redis.ConnectionPool:
    """Connections for `url` (`redis://`, `rediss://`, `unix://`), each tried once and never retried."""
    scheme = url.partition("://")[0]
    if scheme not in ("redis", "rediss", "unix"):
        raise ValueError(
            f"REDIS_URL has the scheme {scheme!r}; give redis://, rediss:// or unix://"
        )
    over_network: dict[str, Any] = (
        {} if scheme == "unix" else {"socket_connect_timeout": timeout_s, "socket_keepalive": True}
    )
    return redis.ConnectionPool.from_url(
        url,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=timeout_s,
        **over_network,
    )


def pack(*command: bytes | str | int) -> bytes:
    """One command in the Redis protocol."""
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return packed


class Session:
    """A connection of one owner, for packed commands; unusable after its first failure.

    Not safe for use from two threads at once.
    """

    def __init__(self, connections: redis.ConnectionPool) -> None:
        self._pool = connections
        try:
            self._connection: Any = connections.get_connection()
        except (redis.RedisError, OSError) as error:
            raise IndexLost(f"cannot connect to Redis: {error}") from error
        self._lost = False

    def run(self, packed: Iterable[bytes], replies: int) -> list[Any]:
        """Send packed commands in one go and return their `replies` replies.

        Raises IndexFull when Redis is out of memory, IndexLost for everything that leaves the
        connection or its server in doubt, redis.ResponseError for a command that is wrong.
        """
        if self._lost:
            raise IndexLost("the connection to Redis was lost before")
        try:
            self._connection.send_packed_command([b"".join(packed)])
            return self._read(replies)
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            self.close()
            raise IndexLost(f"the connection to Redis was lost: {error}") from error

    def stream(
        self, commands: Iterable[bytes], meanwhile: Callable[[], None] | None = None
    ) -> list[Any]:
        """Like `run`, one reply per command, sending while later commands are still being made.

        Redis works on the first ones already, and on the rest while `meanwhile` runs. An exception
        from either ends the session.
        """
        if self._lost:
            raise IndexLost("the connection to Redis was lost before")
        replies = 0
        coming = iter(commands)
        try:
            while block := list(islice(coming, STREAM_COMMANDS)):
                self._connection.send_packed_command((b"".join(block),))
                replies += len(block)
            if meanwhile is not None:
                meanwhile()
            return self._read(replies)
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            self.close()
            raise IndexLost(f"the connection to Redis was lost: {error}") from error
        except IndexFull:
            raise
        except BaseException:
            self.close()
            raise

    def _read(self, replies: int) -> list[Any]:
        answers: list[Any] = []
        while len(answers) < replies:
            answers.append(self._read_one())
            answers += self._at_hand(replies - len(answers))
        for failure in (answer for answer in answers if isinstance(answer, redis.RedisError)):
            raise self._meaning(failure)
        return answers

    def _read_one(self) -> Any:
        try:
            return self._connection.read_response(disable_decoding=True)
        except redis.ResponseError as failure:
            return failure

    def _at_hand(self, most: int) -> Iterator[Any]:
        """Replies that have arrived with the last one, past redis-py's layers: a tenth of intake."""
        reader = getattr(self._connection._parser, "_reader", None)
        if reader is not None:
            come = iter(lambda: reader.gets(False), NOT_ENOUGH_DATA)
            yield from islice(come, most)

    def _meaning(self, failure: redis.RedisError) -> Exception:
        if isinstance(failure, redis.ConnectionError):
            return failure
        text = str(failure)
        if isinstance(failure, redis.exceptions.OutOfMemoryError) or text.startswith("OOM"):
            return IndexFull(f"Redis has no memory left: {text}")
        self.close()
        if isinstance(failure, redis.exceptions.ReadOnlyError) or text.startswith(NOT_SERVING):
            return IndexLost(f"Redis does not serve now: {text}")
        return failure

    def close(self) -> None:
        """Give the connection up; safe to call twice."""
        if not self._lost:
            self._lost = True
            self._connection.disconnect()
            self._pool.release(self._connection)
