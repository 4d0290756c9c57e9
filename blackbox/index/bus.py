"""Short notes between the processes of one deployment, through Redis' publish and subscribe.

Nothing is stored and nothing depends on a single note: senders repeat what matters, so a lost note
costs a moment. Works in a Redis that is at its `maxmemory`, or was just emptied.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

import orjson
import redis

from blackbox.index.connection import TIMEOUT_S, Clients, pool
from blackbox.records.errors import IndexLost

CHANNEL = "blackbox:bus:"
"""channel: messages between Spark's driver and its tasks: which shards a task has, its reports, that a
request is due soon, and that Kafka has removed requests before they were read. The name continues with the
group and the kind of message. Empty messages of the kind `connected`, to nobody, try a new connection.
Nothing is stored.

written -- the driver, dispatch and intake tasks
read    -- the driver, dispatch tasks
"""
PAUSE_S = 1.0
# After a failover, the old primary may go on as a replica. It accepts notes and answers a ping, so neither
# end notices that the name leads to another server now. A task ends after 15 s without a lease: the two
# together must take less, with one more second, as a sender uses its new connection for the next note. No
# connection is closed before another works: it may be that none can be made, with all Sentinels down, DNS
# away, a Redis at `maxclients` or a changed password, while the open ones work.
RECONNECT_S = 5.0
SILENCE_S = 5.0

Made = TypeVar("Made")


class _Attempt(Generic[Made]):
    """An attempt to make a connection, in a thread of its own.

    A name server that does not answer can take a minute to fail, and a task ends after 15 s without a lease.
    """

    def __init__(self, clients: Clients, make: Callable[[Clients], Made]) -> None:
        self.began_s = time.monotonic()
        self.has_ended = False
        self.made: Made | None = None
        self._clients, self._make = clients, make
        self._lock = Lock()
        self._is_abandoned = False
        Thread(target=self._run, name="bus", daemon=True).start()

    def _run(self) -> None:
        made = None
        try:
            with suppress(redis.RedisError, OSError):
                made = self._make(self._clients)
        finally:
            with self._lock:
                self.made, self.has_ended = made, True
                if self._is_abandoned:
                    self._clients.close()

    def abandon(self) -> None:
        """Close what it made, now or as soon as it has ended."""
        with self._lock:
            self._is_abandoned = True
            if self.has_ended:
                self._clients.close()


class Bus:
    """Sends notes under a name, to everything that listens to that name. Not safe for two threads.

    Makes a new connection every `RECONNECT_S`, and sends on the one before until the new one works.
    """

    def __init__(self, url: str, name: str) -> None:
        # Two that take turns: each remembers which Sentinel or node answered.
        self._clients, self._others = Clients(pool(url)), Clients(pool(url))
        self._prefix = f"{CHANNEL}{name}:"
        self._connected_s = time.monotonic()
        self._attempt: _Attempt[bool] | None = None

    def send(self, kind: str, note: Any) -> None:
        """Send anything that JSON can hold. Raises IndexLost when Redis does not answer."""
        self._use_new_connection()
        channel, text = self._prefix + kind, orjson.dumps(note)
        try:
            self._clients.any().publish(channel, text)
        except (redis.RedisError, OSError) as error:
            raise IndexLost(f"Redis does not answer PUBLISH: {error}") from error

    def _use_new_connection(self) -> None:
        """Use the new connection if it works by now; begin to make one if this one is old."""
        attempt = self._attempt
        if attempt is None:
            if time.monotonic() - self._connected_s > RECONNECT_S:
                self._attempt = _Attempt(self._others, self._connect)
        elif attempt.has_ended:
            if attempt.made:
                self._clients, self._others = self._others, self._clients
            self._others.close()
            self._attempt, self._connected_s = None, time.monotonic()

    def _connect(self, clients: Clients) -> bool:
        # To nobody: it shows that the server accepts notes. PING may be missing in the ACL of an operator.
        clients.any().publish(self._prefix + "connected", b"")
        return True

    def close(self) -> None:
        self._clients.close()
        _close(self._others, self._attempt)


class Listener:
    """Receives the notes of these kinds; connects again by itself. Not safe for two threads.

    It also makes a new connection after `SILENCE_S` without a note, as senders repeat theirs every second,
    and listens to the one before until the new one works.
    """

    def __init__(self, url: str, name: str, kinds: tuple[str, ...]) -> None:
        self._clients, self._others = Clients(pool(url)), Clients(pool(url))
        self._prefix = f"{CHANNEL}{name}:"
        self._kinds = kinds
        self._heard: redis.client.PubSub | None = None
        self._heard_s = 0.0
        self._attempt: _Attempt[redis.client.PubSub] | None = None

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
        else:
            self._use_new_connection()
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

    def _use_new_connection(self) -> None:
        """Listen to the new connection if it works by now; begin to make one if this one is silent."""
        attempt = self._attempt
        if attempt is None:
            if time.monotonic() - self._heard_s > SILENCE_S:
                self._attempt = _Attempt(self._others, self._subscribe)
        elif attempt.has_ended:
            # If the one before was heard since, the new one repeats its notes: an earlier lease after a later one.
            if attempt.made is not None and self._heard_s < attempt.began_s:
                self._drop()
                self._heard = attempt.made
                self._clients, self._others = self._others, self._clients
            self._others.close()
            self._attempt, self._heard_s = None, time.monotonic()

    def close(self) -> None:
        self._drop()
        self._clients.close()
        _close(self._others, self._attempt)

    def _drop(self) -> None:
        if self._heard is not None:
            self._heard.close()
            self._heard = None


def _close(clients: Clients, attempt: _Attempt[Any] | None) -> None:
    if attempt is None:
        clients.close()
    else:
        attempt.abandon()
