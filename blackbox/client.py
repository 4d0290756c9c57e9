"""Ask for messages to be delivered later, from any Python program.

with Client("localhost:9092", caller="orders") as client:
    client.send_later("payments", {"order": 17}, countdown_s=90)
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Self

import orjson
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from blackbox.doubt import Doubt, NotAllowed
from blackbox.journal.access import KafkaAccess
from blackbox.journal.topics import Topics
from blackbox.request import Shard, request_id

ACKNOWLEDGED_WITHIN_S = 20.0
FLUSHED_AFTER_AN_ERROR_WITHIN_S = 5.0
POLL_S = 0.1
CALLER_HEADER = "CALLER_SERVICE"


class NotSent(Exception):
    """Kafka did not take a request; the text says why and what to do."""


class Asked:
    """A request on its way to Kafka."""

    __slots__ = ("_on_acknowledged", "_place", "_wait", "failure")

    def __init__(
        self, wait: Callable[[Asked], None], on_acknowledged: Callable[[Asked], None] | None
    ) -> None:
        self._wait = wait
        self._on_acknowledged = on_acknowledged
        self._place: tuple[Shard, int] | None = None
        self.failure: str | None = None

    @property
    def is_settled(self) -> bool:
        """Whether Kafka has acknowledged or refused it."""
        return self._place is not None or self.failure is not None

    @property
    def place(self) -> tuple[Shard, int]:
        """Where the request was written; waits for that. Raises NotSent."""
        if not self.is_settled:
            self._wait(self)
        if self._place is None:
            raise NotSent(
                self.failure
                or f"Kafka has not acknowledged the request within {ACKNOWLEDGED_WITHIN_S:g} s; "
                "it may still be written later. Check the brokers"
            )
        return self._place

    @property
    def id(self) -> str:
        """The request's id; waits until Kafka has acknowledged it. Raises NotSent."""
        return request_id(*self.place)

    def settle(self, error: KafkaError | None, message: Message) -> None:
        """Take Kafka's delivery report."""
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if error is not None:
            self.failure = f"Kafka did not take the request into {topic}: {error.str()}"
        else:
            assert topic is not None
            assert partition is not None
            assert offset is not None
            self._place = Shard(topic, partition), offset
        if self._on_acknowledged is not None:
            self._on_acknowledged(self)


class Client:
    """Writes requests to a request topic on behalf of `caller`. Use it from one thread only.

    Requests are gathered into batches; leaving the context waits until Kafka has all of them.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        caller: str | None = None,
        request_topic: str = "TB",
        kafka_settings: Mapping[str, str] | None = None,
    ) -> None:
        self._access = KafkaAccess(bootstrap_servers, "blackbox-client", kafka_settings or {})
        self._producer: Producer = self._access.producer(None)
        self._own_headers = [(CALLER_HEADER, caller.encode())] if caller is not None else []
        self.request_topic = request_topic
        self._failures: list[str] = []

    def reach(self) -> None:
        """Make sure that the request topic is there. Raises NotSent, after about 5 s without brokers."""
        servers = self._access.bootstrap_servers
        try:
            found = Topics(self._access.admin()).partitions([self.request_topic], to="Write")
        except NotAllowed as reason:
            raise NotSent(str(reason)) from None
        except Doubt as reason:
            raise NotSent(
                f"no Kafka broker answers at {servers} ({reason}); "
                "check the address and that Kafka is running"
            ) from None
        if self.request_topic not in found:
            raise NotSent(
                f"the request topic {self.request_topic!r} is not on {servers}; "
                "start blackbox once to have it created, or name another topic"
            )

    def send_later(
        self,
        topic: str,
        message: Any,
        *,
        countdown_s: float | None = None,
        at: datetime | str | int | None = None,
        id: str | None = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        expires_after_s: float | None = None,
        on_acknowledged: Callable[[Asked], None] | None = None,
    ) -> Asked:
        """Ask for `message` on `topic`, in `countdown_s` seconds or at an instant.

        `message`: str and bytes are delivered as they are, None as a tombstone, anything else as
        JSON. `at`: an aware datetime, RFC 3339, or epoch ms. A later request under the same `id`
        replaces this one. Raises ValueError unless exactly one of the two times is given.
        """
        value = request_value(
            topic,
            message,
            countdown_s=countdown_s,
            at=at,
            id=id,
            key=key,
            headers=headers,
            expires_after_s=expires_after_s,
        )
        return self.ask(value, key=id, on_acknowledged=on_acknowledged)

    def cancel(self, id: str) -> Asked:
        """Ask that the pending request last made under the caller id `id` is not delivered."""
        return self.ask(orjson.dumps({"id": id, "cancel": True}), key=id)

    def ask(
        self,
        value: bytes | None,
        *,
        key: str | bytes | None = None,
        headers: Iterable[tuple[str, bytes | str | None]] = (),
        on_acknowledged: Callable[[Asked], None] | None = None,
    ) -> Asked:
        """Write a request of one's own making as it is; `headers` follow the caller's name."""
        asked = Asked(self._wait_for, on_acknowledged)
        self._produce(value, key, [*self._own_headers, *headers], asked)
        self._producer.poll(0)
        return asked

    def flush(self, timeout_s: float = ACKNOWLEDGED_WITHIN_S) -> None:
        """Wait until Kafka has acknowledged everything. Raises NotSent when it has not, or refused."""
        left = self._producer.flush(timeout_s)
        failures, self._failures = self._failures, []
        if left:
            raise NotSent(
                f"{left} requests were not acknowledged within {timeout_s:g} s; they may still be "
                f"written later. Check the brokers at {self._access.bootstrap_servers}"
            )
        if failures:
            raise NotSent(
                f"Kafka refused {len(failures)} of the requests; the first: {failures[0]}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.flush()
        else:
            self._producer.flush(FLUSHED_AFTER_AN_ERROR_WITHIN_S)

    def _produce(
        self,
        value: bytes | None,
        key: str | bytes | None,
        headers: list[tuple[str, bytes | str | None]],
        asked: Asked,
    ) -> None:
        def settle(error: KafkaError | None, message: Message) -> None:
            asked.settle(error, message)
            if asked.failure is not None:
                self._failures.append(asked.failure)

        while True:
            try:
                self._producer.produce(
                    self.request_topic, value, key, headers=headers, on_delivery=settle
                )
                return
            except BufferError:
                self._producer.poll(POLL_S)
            except KafkaException as error:
                raise NotSent(f"the client refuses the request: {error.args[0].str()}") from None

    def _wait_for(self, asked: Asked) -> None:
        deadline = time.monotonic() + ACKNOWLEDGED_WITHIN_S
        while not asked.is_settled and time.monotonic() < deadline:
            self._producer.poll(POLL_S)


def request_value(
    topic: str,
    message: Any,
    *,
    countdown_s: float | None = None,
    at: datetime | str | int | None = None,
    id: str | None = None,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    expires_after_s: float | None = None,
) -> bytes:
    """The record value of a request, in the format `countdown`; arguments as in `send_later`."""
    if (countdown_s is None) is (at is None):
        raise ValueError("give exactly one of countdown_s and at")
    optional = {
        "countdown": countdown_s,
        "at": _instant(at),
        "id": id,
        "key": key,
        "headers": dict(headers) if headers else None,
        "expires_after": expires_after_s,
    }
    asked: dict[str, Any] = {"topic": topic, "message": message}
    if isinstance(message, bytes):
        asked |= {"message": b64encode(message).decode(), "encoding": "base64"}
    return orjson.dumps(asked | {name: v for name, v in optional.items() if v is not None})


def _instant(at: datetime | str | int | None) -> str | int | None:
    if not isinstance(at, datetime):
        return at
    if at.tzinfo is None:
        raise ValueError(f"at is {at.isoformat()} without a time zone; give an aware datetime")
    return at.isoformat()
