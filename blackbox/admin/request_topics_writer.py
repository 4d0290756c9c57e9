"""Write to the request topics: requests, cancels and replacements."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

from blackbox.client.pending_write import ACKNOWLEDGED_WITHIN_S, NotSent
from blackbox.client.request_writer import RequestWriter
from blackbox.config.settings import Settings
from blackbox.config.wiring import formats, kafka, rules
from blackbox.records.request import Headers, Invalid, Reason, Record, Request
from blackbox.support.logs import NO_CLIENT_LOG

T = TypeVar("T")

WRITE_FORMAT = "countdown"
"""The format of the requests that HTTP and the command line write."""

# librdkafka's default of message.max.bytes.
CLIENTS_MOST_BYTES = 1_000_000
# For key, headers and Kafka's overhead, which count against the same limit.
HEADROOM_BYTES = 2_000


@dataclass(frozen=True, slots=True)
class RefusedValue:
    """Why a request is refused: its number among those given, from 0, the reason word, and the detail."""

    number: int
    reason: str
    detail: str


class RequestTopicsWriter:
    """Writes to every request topic, over one producer each. Safe to use from many threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._formats = formats(settings)
        self._rules = rules(settings)
        self._lock = Lock()
        self._writers: dict[str, RequestWriter] = {}
        own = settings.kafka_settings().get("message.max.bytes", str(CLIENTS_MOST_BYTES))
        self._most_bytes = int(own) - HEADROOM_BYTES

    def send(self, values: Sequence[bytes], caller: str | None) -> list[str] | list[RefusedValue]:
        """Write these requests, in the format `countdown`; returns their ids, or why none was written."""
        topic = self._topic()
        headers: Headers = [("CALLER_SERVICE", caller.encode())] if caller else []
        parsed = [self.check(topic, value, headers) for value in values]
        # Before the first is written: if one is refused, none may be.
        refused = [
            RefusedValue(number, one.reason, one.detail)
            for number, one in enumerate(parsed)
            if isinstance(one, Invalid)
        ]
        if refused:
            return refused
        keys = [one.caller_id for one in parsed if isinstance(one, Request)]

        def write(writer: RequestWriter) -> list[str]:
            pairs = zip(values, keys, strict=True)
            written = [writer.write(value, key=key, headers=headers) for value, key in pairs]
            writer.wait_for(written)
            return [one.id for one in written]

        return self.with_writer(topic, write)

    def check(self, topic: str, value: bytes, headers: Headers) -> Request | Invalid:
        """Parse and check a request as intake will, except for quotas."""
        if len(value) > self._most_bytes:
            return Invalid(
                Reason.TOO_LARGE,
                f"the request has {len(value)} bytes; at most {self._most_bytes} are allowed",
            )
        now_ms = time.time_ns() // 1_000_000
        parsed = self._formats[topic].parse(Record(0, now_ms, None, value, headers), now_ms)
        if isinstance(parsed, Invalid):
            return parsed
        if not isinstance(parsed, Request):
            return Invalid(
                Reason.BAD_CANCEL, "cancels are not accepted here; use DELETE /requests/{id}"
            )
        broken = None if self._rules is None else self._rules.rules().broken_by(parsed, now_ms)
        return parsed if broken is None else broken.refusal

    def with_writer(self, topic: str, write: Callable[[RequestWriter], T]) -> T:
        """The result of `write`. Raises NotSent."""
        # A producer is for one thread. While Kafka hangs, a write holds the lock this long at most.
        if not self._lock.acquire(timeout=ACKNOWLEDGED_WITHIN_S):
            raise NotSent(
                "nothing was written: Kafka has not acknowledged the previous records; try again"
            )
        try:
            if topic not in self._writers:
                access = kafka(self._settings, NO_CLIENT_LOG)
                self._writers[topic] = RequestWriter(
                    access.bootstrap_servers, request_topic=topic, kafka_settings=access.settings
                )
            return write(self._writers[topic])
        except NotSent:
            # A client that has failed for good, or has an old certificate, would fail again and again.
            self._writers.pop(topic, None)
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            for writer in self._writers.values():
                writer.close()

    def _topic(self) -> str:
        for topic, format_name in self._settings.topics.items():
            if format_name == WRITE_FORMAT:
                return topic
        raise NotSent(
            f"BLACKBOX_REQUEST_TOPICS={self._settings.request_topics}: none has the format "
            f"{WRITE_FORMAT}, the only one that can be written here"
        )
