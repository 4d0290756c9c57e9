"""Requests on their way to Kafka: what every caller's side is made of."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Self

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from blackbox.client.moving import Moved
from blackbox.client.request import cancel_value
from blackbox.journal.access import POLL_S, REQUEST_TIMEOUT_S, KafkaAccess, produce
from blackbox.journal.topics import Topics
from blackbox.records.cancel import HEADER as CANCEL_HEADER
from blackbox.records.errors import NotAllowed, RecoveryRequired
from blackbox.records.request import Shard, locate, request_id

ACKNOWLEDGED_WITHIN_S = 20.0
CLOSED_WITHIN_S = 5.0
COUNTED_FOR_S = 5.0
"""How long the number of partitions is taken for true: as often as the client itself asks for it."""

CALLER_HEADER = "CALLER_SERVICE"
GROUP_ID = "blackbox-client"
"""Of consumers that join no group, unless the caller names another one."""


class NotSent(Exception):
    """Kafka did not take a request; the text says why and what to do."""


class Asked:
    """A request on its way to Kafka."""

    __slots__ = ("_place", "_wait", "failure")

    def __init__(self, wait: Callable[[Asked], None]) -> None:
        self._wait = wait
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
        return self.place_by_now

    @property
    def place_by_now(self) -> tuple[Shard, int]:
        """Where the request was written. Raises NotSent when that is not known by now."""
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
        elif topic is None or partition is None or offset is None:
            self.failure = f"Kafka did not say where in {topic} the request is; it may not be there"
        else:
            self._place = Shard(topic, partition), offset


class Asker:
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
        settings = kafka_settings or {}
        group = settings.get("group.id", GROUP_ID)
        self.access = KafkaAccess(bootstrap_servers, group, settings)
        self._producer: Producer = self.access.producer(None)
        self._own_headers = [(CALLER_HEADER, caller.encode())] if caller is not None else []
        self.request_topic = request_topic
        self._refused = 0
        self._first_refusal = ""
        self._partitions = 0
        self._counted_s = -math.inf

    def reach(self) -> None:
        """Make sure that the request topic is there. Raises NotSent, after about 5 s without brokers."""
        servers = self.access.bootstrap_servers
        try:
            found = Topics(self.access.admin()).partitions([self.request_topic], to="Write")
        except NotAllowed as reason:
            raise NotSent(str(reason)) from None
        except RecoveryRequired as reason:
            raise NotSent(
                f"no Kafka broker answers at {servers} ({reason}); "
                "check the address and that Kafka is running"
            ) from None
        if self.request_topic not in found:
            raise NotSent(
                f"the request topic {self.request_topic!r} is not on {servers}; "
                "start blackbox once to have it created, or name another topic"
            )

    def ask(
        self,
        value: bytes | None,
        *,
        key: str | bytes | None = None,
        headers: Iterable[tuple[str, bytes | str | None]] = (),
        partition: int = -1,
    ) -> Asked:
        """Write a request of one's own making as it is; `headers` follow the caller's name.

        By its key, unless a partition is given.
        """
        asked = Asked(self._wait_for)
        self._produce(value, key, [*self._own_headers, *headers], partition, asked)
        self._producer.poll(0)
        return asked

    def ask_to_cancel(self, id: str) -> list[Asked]:
        """Write the cancel of the pending request of this id, or of all that were made under it.

        What was made under it before partitions were added is in another one than its key tells, so
        the cancel goes to every partition; the first of these records to that of the key.
        """
        try:
            shard, _ = locate(id, [self.request_topic])
        except ValueError:
            value, count = cancel_value(id), self.partitions()
            first = self.ask(value, key=id)
            others = range(count) if count > 1 else ()
            return [first, *(self.ask(value, key=id, partition=other) for other in others)]
        headers = [(CANCEL_HEADER, id.encode())]
        return [self.ask(None, headers=headers, partition=shard.partition)]

    def partitions(self) -> int:
        """Of the request topic, as of a moment ago; 0 while it is not there. Raises NotSent."""
        if time.monotonic() - self._counted_s > COUNTED_FOR_S:
            topic = self.request_topic
            try:
                found = self._producer.list_topics(topic, timeout=REQUEST_TIMEOUT_S).topics[topic]
            except KafkaException as error:
                raise NotSent(
                    f"cannot ask for the partitions of {topic}: {error.args[0].str()}; check the "
                    f"brokers at {self.access.bootstrap_servers}"
                ) from None
            self._partitions, self._counted_s = len(found.partitions), time.monotonic()
        return self._partitions

    def ask_to_move(self, shard: Shard, moved: Moved) -> Asked:
        """Write a request that takes the place of another; in this caller's name, without one in that of the other."""
        headers = [one for one in moved.headers if not self._own_headers or one[0] != CALLER_HEADER]
        return self.ask(moved.value, key=moved.key, headers=headers, partition=shard.partition)

    def poll(self) -> None:
        """Take what Kafka has acknowledged by now."""
        self._producer.poll(0)

    def wait_for(self, asked: Sequence[Asked]) -> None:
        """Wait until Kafka has acknowledged these. Raises NotSent when it has not, or refused one.

        What became of others that were asked for before, or meanwhile, changes nothing.
        """
        deadline = time.monotonic() + ACKNOWLEDGED_WITHIN_S
        for one in asked:
            self._poll_for(one, deadline)
        left = sum(not one.is_settled for one in asked)
        if left:
            raise self._unacknowledged(left, ACKNOWLEDGED_WITHIN_S)
        failures = [one.failure for one in asked if one.failure is not None]
        if failures:
            raise _refusal(len(failures), failures[0])

    def flush(self, timeout_s: float = ACKNOWLEDGED_WITHIN_S) -> None:
        """Wait until Kafka has acknowledged everything. Raises NotSent when it has not, or refused.

        Refused: anything since the last flush, whoever asked for it.
        """
        left = self._producer.flush(timeout_s)
        refused, self._refused = self._refused, 0
        if left:
            raise self._unacknowledged(left, timeout_s)
        if refused:
            raise _refusal(refused, self._first_refusal)

    def _unacknowledged(self, left: int, timeout_s: float) -> NotSent:
        return NotSent(
            f"{left} requests were not acknowledged within {timeout_s:g} s; they may still be "
            f"written later. Check the brokers at {self.access.bootstrap_servers}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.flush()
        else:
            self.close()

    def close(self) -> None:
        """Give what is on its way a moment, whatever becomes of it."""
        with suppress(KafkaException):  # such as for who may not write, and asked for nothing
            self._producer.flush(CLOSED_WITHIN_S)

    def _produce(
        self,
        value: bytes | None,
        key: str | bytes | None,
        headers: list[tuple[str, bytes | str | None]],
        partition: int,
        asked: Asked,
    ) -> None:
        def settle(error: KafkaError | None, message: Message) -> None:
            asked.settle(error, message)
            if asked.failure is not None:
                self._first_refusal = self._first_refusal if self._refused else asked.failure
                self._refused += 1

        try:
            produce(self._producer, self.request_topic, value, key, partition, settle, headers)
        except KafkaException as error:
            raise NotSent(f"the client refuses the request: {error.args[0].str()}") from None

    def _wait_for(self, asked: Asked) -> None:
        self._poll_for(asked, time.monotonic() + ACKNOWLEDGED_WITHIN_S)

    def _poll_for(self, asked: Asked, deadline: float) -> None:
        while not asked.is_settled and time.monotonic() < deadline:
            self._producer.poll(POLL_S)


def _refusal(count: int, first: str) -> NotSent:
    return NotSent(f"Kafka refused {count} of the requests; the first: {first}")
