"""Write requests to Kafka: the producer that every kind of client is built on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Self

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from blackbox.client.pending_write import (
    ACKNOWLEDGED_WITHIN_S,
    Failures,
    MaybeSent,
    NotSent,
    PendingWrite,
)
from blackbox.client.request_value import cancel_value
from blackbox.client.rescheduling import ReplacementRecord
from blackbox.journal.kafka_access import POLL_S, REQUEST_TIMEOUT_S, KafkaAccess, produce
from blackbox.journal.topics import Topics
from blackbox.records.cancel import HEADER as CANCEL_HEADER
from blackbox.records.errors import NotAllowed, RecoveryRequired
from blackbox.records.request import Shard, locate

CLOSED_WITHIN_S = 5.0
# As long as the Kafka client keeps its own metadata.
COUNTED_FOR_S = 5.0

CALLER_HEADER = "CALLER_SERVICE"
# librdkafka wants one from every consumer; look-ups assign partitions, and join no group.
GROUP_ID = "blackbox-client"


class RequestWriter:
    """Writes requests to a request topic on behalf of `caller`. Use it from one thread only.

    Leaving the context waits until Kafka has acknowledged all requests.
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
        self._failures = Failures()
        self._partitions = 0
        self._counted_s = -math.inf

    def check_topic(self) -> None:
        """Check that the request topic exists. Raises NotSent, after about 5 s when no broker answers."""
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
                f"the request topic {self.request_topic!r} does not exist on {servers}; start "
                "blackbox once to create it, or name another topic"
            )

    def write(
        self,
        value: bytes | None,
        *,
        key: str | bytes | None = None,
        headers: Iterable[tuple[str, bytes | str | None]] = (),
        partition: int = -1,
    ) -> PendingWrite:
        """Write a ready-made request value unchanged; `headers` follow the caller header.

        The key chooses the partition, unless `partition` is given.
        """
        pending = PendingWrite(self._wait_for)

        def settle(error: KafkaError | None, message: Message) -> None:
            pending.settle(error, message)
            if pending.failure is not None:
                self._failures.add(pending)

        all_headers = [*self._own_headers, *headers]
        try:
            produce(self._producer, self.request_topic, value, key, partition, settle, all_headers)
        except KafkaException as error:
            raise NotSent(f"the client rejected the request: {error.args[0].str()}") from None
        # librdkafka serves delivery reports only in poll(); unserved ones fill its queue.
        self.poll()
        return pending

    def write_cancel(self, id: str) -> list[PendingWrite]:
        """Write a cancel of the pending request with this id, or of all pending ones under this caller id.

        A cancel by caller id goes to every partition; the first record returned is the one
        partitioned by the key.
        """
        try:
            shard, _ = locate(id, [self.request_topic])
        except ValueError:
            # After partitions were added, earlier requests may be elsewhere than the key maps to.
            value, count = cancel_value(id), self.partitions()
            first = self.write(value, key=id)
            others = range(count) if count > 1 else ()
            return [first, *(self.write(value, key=id, partition=other) for other in others)]
        headers = [(CANCEL_HEADER, id.encode())]
        return [self.write(None, headers=headers, partition=shard.partition)]

    def partitions(self) -> int:
        """How many the request topic has, up to `COUNTED_FOR_S` ago; 0 if it does not exist. Raises NotSent."""
        if time.monotonic() - self._counted_s > COUNTED_FOR_S:
            topic = self.request_topic
            try:
                found = self._producer.list_topics(topic, timeout=REQUEST_TIMEOUT_S).topics[topic]
            except KafkaException as error:
                raise NotSent(
                    f"cannot list the partitions of {topic}: {error.args[0].str()}; check the "
                    f"brokers at {self.access.bootstrap_servers}"
                ) from None
            self._partitions, self._counted_s = len(found.partitions), time.monotonic()
        return self._partitions

    def write_replacement(self, shard: Shard, record: ReplacementRecord) -> PendingWrite:
        """Write a request that replaces another one."""
        # The caller is this one, or that of the replaced request if this one has no name.
        headers = [
            one for one in record.headers if not self._own_headers or one[0] != CALLER_HEADER
        ]
        return self.write(record.value, key=record.key, headers=headers, partition=shard.partition)

    def poll(self) -> None:
        """Process the acknowledgements that have arrived, without waiting."""
        self._producer.poll(0)

    def wait_for(self, writes: Sequence[PendingWrite]) -> None:
        """Wait until Kafka has acknowledged these only. Raises what `check` raises."""
        deadline = time.monotonic() + ACKNOWLEDGED_WITHIN_S
        for one in writes:
            self._poll_for(one, deadline)
        self.check(writes)

    def check(self, writes: Iterable[PendingWrite]) -> None:
        """Raise NotSent if one of these was rejected, MaybeSent if one is not known to be written or rejected."""
        failures = Failures()
        for one in writes:
            if not one.is_settled or one.failure is not None:
                failures.add(one)
        failures.check()

    def flush(self, timeout_s: float = ACKNOWLEDGED_WITHIN_S) -> None:
        """Wait until Kafka has acknowledged everything.

        Raises MaybeSent on a timeout, and what `check` raises for all requests since the last flush.
        """
        left = self._producer.flush(timeout_s)
        failures, self._failures = self._failures, Failures()
        if left:
            raise MaybeSent(
                f"{left} requests were not acknowledged within {timeout_s:g} s; they may still be "
                f"written later. Check the brokers at {self.access.bootstrap_servers}"
            )
        failures.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.flush()
        # Another exception is on its way already; NotSent must not replace it.
        else:
            self.close()

    def close(self) -> None:
        """Flush for up to `CLOSED_WITHIN_S`; failures are ignored."""
        # A caller without write access that sent nothing gets an error here, too.
        with suppress(KafkaException):
            self._producer.flush(CLOSED_WITHIN_S)

    def _wait_for(self, pending: PendingWrite) -> None:
        self._poll_for(pending, time.monotonic() + ACKNOWLEDGED_WITHIN_S)

    def _poll_for(self, pending: PendingWrite, deadline: float) -> None:
        while not pending.is_settled and time.monotonic() < deadline:
            self._producer.poll(POLL_S)
