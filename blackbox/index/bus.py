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
# After this long without a note, a listener sends a ping; after twice that, it connects again.
SILENCE_S = 5.0


class Bus:
    """Sends notes under a name, to everything that listens to that name. Not safe for two threads."""

    def __init__(self, url: str, name: str) -> None:
        self._clients = Clients(pool(url))
        self._prefix = f"{CHANNEL}{name}:"

    def send(self, kind: str, note: Any) -> None:
        """Send anything that JSON can hold. Raises IndexLost when Redis does not answer."""
        try:
            self._clients.any().publish(self._prefix + kind, orjson.dumps(note))
        except (redis.RedisError, OSError) as error:
            raise IndexLost(f"Redis does not answer PUBLISH: {error}") from error

    def close(self) -> None:
        self._clients.close()


class Listener:
    """Receives the notes of these kinds; connects again by itself. Not safe for two threads."""

    def __init__(self, url: str, name: str, kinds: tuple[str, ...]) -> None:
        self._clients = Clients(pool(url))
        self._prefix = f"{CHANNEL}{name}:"
        self._kinds = kinds
        self._heard: redis.client.PubSub | None = None
        self._sign_s = 0.0
        self._asked_s: float | None = None

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
            self._sign_s, self._asked_s = time.monotonic(), None
        if self._asked_s is None and time.monotonic() - self._sign_s > SILENCE_S:
            # Nothing else shows a listener that the other end is gone without closing the connection.
            self._heard.ping()
            self._asked_s = time.monotonic()
        found: dict[str, Any] | None = self._heard.get_message(timeout=min(timeout_s, SILENCE_S))
        if found is not None:
            self._sign_s, self._asked_s = time.monotonic(), None
        elif self._asked_s is not None and time.monotonic() - self._asked_s > SILENCE_S:
            raise redis.ConnectionError(f"Redis did not answer for {2 * SILENCE_S} s")
        return found

    def close(self) -> None:
        self._drop()
        self._clients.close()

    def _drop(self) -> None:
        if self._heard is not None:
            self._heard.close()
            self._heard = None
