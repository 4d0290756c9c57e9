"""How connections to Redis are made: all of them here, each tried once and never retried.

At each new connection, Sentinel or the cluster is asked where the server is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import hiredis
import redis
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.backoff import NoBackoff
from redis.retry import Retry

from blackbox.index.address import BadAddress, read
from blackbox.index.cluster import Cluster
from blackbox.index.packed_commands import KeyedCommand
from blackbox.index.sentinel import Primary
from blackbox.records.errors import IndexFull, IndexLost

Connections = redis.ConnectionPool | Cluster

# The server is alive but does not serve this shard: it is a replica, or a node that lost the slot.
NOT_SERVING = (
    redis.ReadOnlyError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.AskError,
    redis.exceptions.TryAgainError,
)

# A script runs for too long, too few replicas are connected, or no snapshot can be written.
NOT_SERVING_NOW = ("BUSY", "NOREPLICAS", "MISCONF")

STREAM_COMMANDS = 250  # commands sent at once: enough to make a system call worthwhile

# If Redis hung for longer, recovery first reads what was cancelled in that time.
TIMEOUT_S = 2.5

MOST_CONNECTIONS = 1_000_000  # one for each shard of a process; redis-py's default is 100


def pool(url: str) -> Connections:
    """The connections for a `BLACKBOX_REDIS_URL`. Raises BadAddress; does not connect yet."""
    address = read(url)
    # No retry: a connection that is lost may come back to a Redis that lost writes, or to another
    # server. The owner of a shard must notice that, so only recovery opens another session.
    of_any = {"protocol": 2, "retry": Retry(NoBackoff(), 0)}
    options: dict[str, Any] = of_any | {
        "socket_timeout": TIMEOUT_S,
        "max_connections": MOST_CONNECTIONS,
    }
    if address.places:
        options |= {"socket_connect_timeout": TIMEOUT_S, "socket_keepalive": True}
    options |= address.options
    if address.kind == "sentinel":
        return Primary(address, options, of_any)
    if address.kind == "cluster":
        return Cluster(address, options)
    return redis.ConnectionPool(**options)


def check(url: str) -> None:
    """Raise BadAddress for a URL that does not lead to a Redis; no server has to be running."""
    connections = pool(url)
    one = connections.pool() if isinstance(connections, Cluster) else connections
    try:
        one.make_connection()
    except (ValueError, TypeError):
        # the cause may quote a piece of the password
        raise BadAddress("an option is unknown to the client, or invalid") from None


def servers_of(
    connections: Connections, keys: Iterable[bytes]
) -> dict[bytes, redis.ConnectionPool]:
    """The servers that have these keys now. Raises redis.RedisError or OSError when none reports that."""
    if isinstance(connections, Cluster):
        return connections.servers_of(keys)
    return dict.fromkeys(keys, connections)


def servers(connections: Connections) -> dict[str, redis.ConnectionPool]:
    """Every server that has keys now, by its address; a single server has the name ""."""
    return connections.servers() if isinstance(connections, Cluster) else {"": connections}


class Clients:
    """redis-py clients for use outside an owner's session."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        # Kept, as making a client costs more than a command.
        self._made: dict[redis.ConnectionPool, redis.Redis] = {}

    def of_each(self, keys: Iterable[bytes]) -> dict[bytes, redis.Redis]:
        """Clients for the servers that have these keys now. This, `each` and `any` raise as `servers_of`."""
        found = servers_of(self._connections, keys)
        return {key: self._client(server) for key, server in found.items()}

    def each(self) -> dict[str, redis.Redis]:
        """A client for every server that has keys now, by its address; a single server has the name ""."""
        found = servers(self._connections)
        return {name: self._client(server) for name, server in found.items()}

    def any(self) -> redis.Redis:
        """A client for a server that passes notes on to all."""
        known = self._connections
        return self._client(known.any_server() if isinstance(known, Cluster) else known)

    def together(self, *commands: KeyedCommand) -> list[Any]:
        """The replies to these commands, with one round trip to each server. Raises IndexFull, IndexLost."""
        if not commands:
            return []
        try:
            asked: defaultdict[redis.Redis, list[int]] = defaultdict(list)
            clients = self.of_each({key for _, key, *_ in commands})
            for number, (_, key, *_) in enumerate(commands):
                asked[clients[key]].append(number)
            replies: dict[int, Any] = {}
            for client, numbers in asked.items():
                pipeline = client.pipeline(transaction=False)
                for number in numbers:
                    pipeline.execute_command(*commands[number])  # type: ignore[no-untyped-call]
                replies |= zip(numbers, pipeline.execute(), strict=True)
            return [replies[number] for number in range(len(commands))]
        except redis.exceptions.OutOfMemoryError as error:
            raise IndexFull(f"Redis has no memory left: {error}") from error
        except (redis.RedisError, OSError) as error:
            raise IndexLost(f"Redis does not answer: {reason(error)}") from error

    def close(self) -> None:
        self._connections.disconnect()

    def _client(self, server: redis.ConnectionPool) -> redis.Redis:
        if server not in self._made:
            self._made[server] = redis.Redis(connection_pool=server)
        return self._made[server]


def reason(error: Exception) -> str:
    """The text of an error, with the word by which Redis names its kind."""
    code = getattr(error, "status_code", None)
    return f"{code} {error}" if isinstance(error, NOT_SERVING) and code else str(error)


def pack(*command: bytes | str | int) -> bytes:
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return packed


class RedisSession:
    """A connection of one owner, for packed commands; unusable after its first failure.

    Goes to the server that has `key` now. Not safe for use from two threads at once.
    """

    def __init__(self, connections: Connections, key: bytes = b"") -> None:
        try:
            self._pool = servers_of(connections, [key])[key]
            self._connection: Any = self._pool.get_connection()
        except (redis.RedisError, OSError) as error:
            raise IndexLost(f"cannot connect to Redis: {error}") from error
        self._lost = False

    def ask(self, *command: bytes | str | int) -> Any:
        """The reply to one command. Raises as `run`."""
        return self.run([pack(*command)])[0]

    def run(
        self, commands: Iterable[bytes], while_busy: Callable[[], None] | None = None
    ) -> list[Any]:
        """Send packed commands, while later ones are still being made; return the reply to each.

        Redis works on them while `while_busy` runs. An exception from either argument ends the
        session. Raises IndexFull when Redis is out of memory, IndexLost for everything that leaves
        the connection or its server in doubt, redis.ResponseError for a command that is wrong.
        """
        if self._lost:
            raise IndexLost("the connection to Redis was lost earlier")
        replies = 0
        coming = iter(commands)
        try:
            while block := list(islice(coming, STREAM_COMMANDS)):
                self._connection.send_packed_command((b"".join(block),))
                replies += len(block)
            if while_busy is not None:
                while_busy()
            return self._read(replies)
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            self.close()
            raise IndexLost(f"the connection to Redis was lost: {error}") from error
        except IndexFull:  # all replies have been read: the session can go on
            raise
        except BaseException:  # replies may be left that the next command would take for its own
            self.close()
            raise

    def _read(self, replies: int) -> list[Any]:
        answers: list[Any] = []
        # Every reply is read before the first failure is raised.
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
        # Replies that arrived with the last one, past redis-py's layers: saves a tenth of intake.
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
        if isinstance(failure, NOT_SERVING) or text.startswith(NOT_SERVING_NOW):
            return IndexLost(f"Redis cannot serve requests now: {reason(failure)}")
        return failure

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        if not self._lost:
            self._lost = True
            self._connection.disconnect()
            self._pool.release(self._connection)
