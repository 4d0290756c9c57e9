"""Short notes between the processes of one deployment, through Redis' publish and subscribe.

Nothing is stored and nothing depends on a single note: senders repeat what matters, so a lost note
costs a moment. Works in a Redis that is at its `maxmemory`, or was just emptied.
"""

from __future__ import annotations

import time
from typing import Any

import orjson
import redis

from blackbox.index.connection import TIMEOUT_S, Clients, pool
from blackbox.records.errors import IndexLost

CHANNEL = "blackbox:bus:"
"""channel: messages between Spark's driver and its tasks: which shards a task has, its reports, that a
request is due soon, and that Kafka has removed requests before they were read. The name continues with the
group and the kind of message. Nothing is stored.

written -- the driver, dispatch and intake tasks
read    -- the driver, dispatch tasks
"""
PAUSE_S = 1.0
# After a failover, the old primary may go on as a replica. It accepts notes and answers a ping, so neither
# end notices that the name leads to another server now. A task ends after 15 s without a lease: the two
# together must take less. No connection is closed before another works: it may be that none can be made, with
# all Sentinels down, DNS away, a Redis at `maxclients` or a changed password, while the open ones work.
RECONNECT_S = 5.0
SILENCE_S = 5.0


class Bus:
    """Sends notes under a name, to everything that listens to that name. Not safe for two threads.

    Takes a new connection every `RECONNECT_S`, and keeps the one before while that fails.
    """

    def __init__(self, url: str, name: str) -> None:
        # Two that take turns: each remembers which Sentinel or node answered.
        self._clients, self._others = Clients(pool(url)), Clients(pool(url))
        self._prefix = f"{CHANNEL}{name}:"
        self._connected_s = time.monotonic()

    def send(self, kind: str, note: Any) -> None:
        """Send anything that JSON can hold. Raises IndexLost when Redis does not answer."""
        channel, text = self._prefix + kind, orjson.dumps(note)
        is_old = time.monotonic() - self._connected_s > RECONNECT_S
        if is_old and self._send_anew(channel, text):
            return
        try:
            self._clients.any().publish(channel, text)
        except (redis.RedisError, OSError) as error:
            raise IndexLost(f"Redis does not answer PUBLISH: {error}") from error

    def _send_anew(self, channel: str, text: bytes) -> bool:
        """Send on a new connection, and close the one before; False, with that one still open, if it fails."""
        try:
            self._others.any().publish(channel, text)
            self._clients, self._others = self._others, self._clients
            return True
        except (redis.RedisError, OSError):
            return False
        finally:
            self._others.close()
            self._connected_s = time.monotonic()

    def close(self) -> None:
        self._clients.close()
        self._others.close()


class Listener:
    """Receives the notes of these kinds; connects again by itself. Not safe for two threads.

    It also takes a new connection after `SILENCE_S` without a note, as senders repeat theirs every second,
    and keeps the one before while that fails.
    """

    def __init__(self, url: str, name: str, kinds: tuple[str, ...]) -> None:
        self._clients, self._others = Clients(pool(url)), Clients(pool(url))
        self._prefix = f"{CHANNEL}{name}:"
        self._kinds = kinds
        self._heard: redis.client.PubSub | None = None
        self._heard_s = 0.0

    def next(self, timeout_s: float) -> tuple[str, Any] | None:
        """The next note as (kind, content); None when there is none in time, or Redis is away."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                found = self._get(left_s)
            except (redis.RedisError, OSError):
                self._drop()
                time.sleep(min(PAUSE_S, max(0.0, deadline - time.monotonic())))
                continue
            if found is not None and found["type"] == "message":
                kind = found["channel"].decode().removeprefix(self._prefix)
                return kind, orjson.loads(found["data"])
        return None

    def _get(self, timeout_s: float) -> dict[str, Any] | None:
        if self._heard is None:
            self._heard = self._subscribe(self._clients)
            self._heard_s = time.monotonic()
        found: dict[str, Any] | None = self._heard.get_message(
            ignore_subscribe_messages=True, timeout=min(timeout_s, SILENCE_S)
        )
        if found is not None:
            self._heard_s = time.monotonic()
        elif time.monotonic() - self._heard_s > SILENCE_S:
            self._subscribe_anew()
        return found

    def _subscribe(self, clients: Clients) -> redis.client.PubSub:
        """A subscription that Redis has confirmed."""
        heard: redis.client.PubSub = clients.any().pubsub()  # type: ignore[no-untyped-call]
        try:
            heard.subscribe(*(self._prefix + kind for kind in self._kinds))
            for _ in self._kinds:
                if heard.get_message(timeout=TIMEOUT_S) is None:
                    raise redis.TimeoutError("Redis does not answer SUBSCRIBE")
        except BaseException:
            heard.close()
            raise
        return heard

    def _subscribe_anew(self) -> None:
        """Subscribe on a new connection, and close the one before; if it fails, that one stays."""
        try:
            heard = self._subscribe(self._others)
            self._drop()
            self._heard = heard
            self._clients, self._others = self._others, self._clients
        except (redis.RedisError, OSError):
            pass  # tried again after more silence
        finally:
            self._others.close()
            self._heard_s = time.monotonic()

    def close(self) -> None:
        self._drop()
        self._clients.close()
        self._others.close()

    def _drop(self) -> None:
        if self._heard is not None:
            self._heard.close()
            self._heard = None
