"""Short notes between the processes of one deployment, through Redis' publish and subscribe.

Nothing is stored and nothing depends on a single note: senders repeat what matters, so a lost note
costs a moment. Works in a Redis that is at its `maxmemory`, or was just emptied.
"""

from __future__ import annotations

import time
from typing import Any

import orjson
import redis

from blackbox.index.connection import Clients, pool
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
# together must take less.
RECONNECT_S = 5.0
SILENCE_S = 5.0


class Bus:
    """Sends notes under a name, to everything that listens to that name. Not safe for two threads.

    Connects again every `RECONNECT_S`, which loses no note.
    """

    def __init__(self, url: str, name: str) -> None:
        self._clients = Clients(pool(url))
        self._prefix = f"{CHANNEL}{name}:"
        self._connected_s = time.monotonic()

    def send(self, kind: str, note: Any) -> None:
        """Send anything that JSON can hold. Raises IndexLost when Redis does not answer."""
        try:
            if time.monotonic() - self._connected_s > RECONNECT_S:
                self._connected_s = time.monotonic()
                self._clients.close()
            self._clients.any().publish(self._prefix + kind, orjson.dumps(note))
        except (redis.RedisError, OSError) as error:
            raise IndexLost(f"Redis does not answer PUBLISH: {error}") from error

    def close(self) -> None:
        self._clients.close()


class Listener:
    """Receives the notes of these kinds; connects again by itself. Not safe for two threads.

    It also connects again after `SILENCE_S` without a note: senders repeat theirs every second.
    """

    def __init__(self, url: str, name: str, kinds: tuple[str, ...]) -> None:
        self._clients = Clients(pool(url))
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
            self._heard = self._clients.any().pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
            self._heard.subscribe(*(self._prefix + kind for kind in self._kinds))
            self._heard_s = time.monotonic()
        found: dict[str, Any] | None = self._heard.get_message(timeout=min(timeout_s, SILENCE_S))
        if found is not None:
            self._heard_s = time.monotonic()
        elif time.monotonic() - self._heard_s > SILENCE_S:
            self._drop()
        return found

    def close(self) -> None:
        self._drop()
        self._clients.close()

    def _drop(self) -> None:
        if self._heard is not None:
            self._heard.close()
            self._heard = None
