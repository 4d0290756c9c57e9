"""A request on its way to Kafka, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from confluent_kafka import KafkaError, Message

from blackbox.records.request import Shard, request_id

ACKNOWLEDGED_WITHIN_S = 20.0

# After these, the leader may have the record: only its answer is missing, or too few replicas have it yet.
# Without the client's own settings it is always `_MSG_TIMED_OUT`, as it retries until then.
_UNCLEAR = (
    KafkaError._MSG_TIMED_OUT,
    KafkaError._TIMED_OUT,
    KafkaError._PURGE_INFLIGHT,
    KafkaError._TRANSPORT,
    KafkaError._FATAL,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
)


class NotSent(Exception):
    """Kafka did not accept a request; the text says why and what to do."""


class MaybeSent(NotSent):
    """Kafka has not acknowledged a request, which may have been written, or may still be written."""


@dataclass(eq=False, slots=True)
class PendingWrite:
    _wait: Callable[[PendingWrite], None]
    _place: tuple[Shard, int] | None = None
    failure: str | None = None
    is_unclear: bool = True
    """Whether it may have been written: until it is settled, and after some failures."""

    @property
    def is_settled(self) -> bool:
        """Whether Kafka has acknowledged or refused the request."""
        return self._place is not None or self.failure is not None

    @property
    def place(self) -> tuple[Shard, int]:
        """Where the request was written; waits for the acknowledgement. Raises NotSent."""
        if not self.is_settled:
            self._wait(self)
        return self.place_if_known

    @property
    def place_if_known(self) -> tuple[Shard, int]:
        """Where the request was written, without waiting. Raises MaybeSent when that is not known yet."""
        if self._place is None:
            raise (MaybeSent if self.is_unclear else NotSent)(self.why)
        return self._place

    @property
    def why(self) -> str:
        """Why there is no place."""
        return self.failure or (
            f"Kafka has not acknowledged the request within {ACKNOWLEDGED_WITHIN_S:g} s; "
            "it may still be written later. Check the brokers"
        )

    @property
    def id(self) -> str:
        """The request's id; waits until Kafka has acknowledged it. Raises NotSent."""
        return request_id(*self.place)

    def settle(self, error: KafkaError | None, message: Message) -> None:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        self.is_unclear = error is None or error.code() in _UNCLEAR
        if error is not None and self.is_unclear:
            self.failure = (
                f"Kafka has not acknowledged the request to {topic}: {error.str()}; it may have "
                "been written. Check the brokers"
            )
        elif error is not None:
            self.failure = f"Kafka rejected the request to {topic}: {error.str()}"
        # A report without an offset is not an acknowledgement: librdkafka reports a record that a
        # new leader has refused as delivered when it has acknowledged a later one.
        elif topic is None or partition is None or offset is None:
            self.failure = (
                f"Kafka returned no offset for the request to {topic}; it may have been written"
            )
        else:
            self._place, self.is_unclear = (Shard(topic, partition), offset), False


class Failures:
    """How many requests failed, and the first ones."""

    # Callers that send a great many keep no PendingWrite, so none is kept here.

    def __init__(self) -> None:
        self._rejected = self._unclear = 0
        self._first_rejected = self._first_unclear = ""

    def add(self, one: PendingWrite) -> None:
        if one.is_unclear:
            self._first_unclear = self._first_unclear or one.why
            self._unclear += 1
        else:
            self._first_rejected = self._first_rejected or one.why
            self._rejected += 1

    def check(self) -> None:
        """Raise NotSent if there are any, MaybeSent if one of them may have been written."""
        rejected = f"Kafka rejected {self._rejected} of the requests; the first: "
        rejected = rejected + self._first_rejected if self._rejected else ""
        if self._unclear:
            also = f". {rejected}" if rejected else ""
            raise MaybeSent(
                f"Kafka has not acknowledged {self._unclear} of the requests, which may have been "
                f"written; the first: {self._first_unclear}{also}"
            )
        if rejected:
            raise NotSent(rejected)
