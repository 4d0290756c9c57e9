"""The record at an offset of a partition, also where the client returns nothing.

The client takes a record whose key or value has a length below -1 for the end of what was fetched, and fetches it
again for ever. Brokers accept such a record: for them, any negative length stands for null. The only sign of it
is in the client's debug log.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.polled_messages import (
    OUT_OF_RANGE,
    is_elsewhere,
    is_of_no_record,
    offset_of,
    without_content,
)
from blackbox.records.errors import JournalSilent

LOOK_S = 0.005
# What librdkafka logs of a fetch, one after the other, and of one from which it could parse nothing. The
# version is that of the partition's assignment.
FETCH = re.compile(r"Fetch topic (\S+) \[(\d+)\] at offset (\d+) .*, v(\d+)\)")
NOT_PARSED = re.compile(r"(\S+) \[(\d+)\]: Fetch backoff .*: Local: Read underflow")
# It first doubles the size of its fetches, until they have a gigabyte, and logs it only then.
LARGEST_FETCH = 1_000_000_000
# However small this is, a broker returns a whole record batch.
ONE_BATCH = 1_000
WHY = "the client does not return it; the lengths in the record are wrong"

_log = logging.getLogger("blackbox.kafka")


class _Fetch(NamedTuple):
    offset: int = -1
    version: int = -1


class _FetchLog(logging.Handler):
    """The last fetch of each partition, and the last that could not be parsed, by a client's debug log.

    Passes on its warnings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[tuple[str, int], _Fetch] = {}
        self.not_parsed: dict[tuple[str, int], _Fetch] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if (found := FETCH.search(text)) is not None:
            self.last[found[1], int(found[2])] = _Fetch(int(found[3]), int(found[4]))
        elif (found := NOT_PARSED.search(text)) is not None:
            place = found[1], int(found[2])
            self.not_parsed[place] = self.last.get(place, _Fetch())
        if record.levelno >= logging.WARNING:
            _log.handle(record)


class OffsetLookup:
    """Looks up what is at an offset, with a consumer of its own, which is connected at the first use.

    Raises KafkaException, and JournalSilent when the client neither returns nor skips anything in `within_s`.
    Not safe for use from two threads at once.
    """

    def __init__(
        self, access: KafkaAccess, within_s: float, isolation: str = "read_committed"
    ) -> None:
        self._access = access
        self._within_s = within_s
        self._isolation = isolation
        self._consumer: Consumer | None = None

    def first_from(self, topic: str, partition: int, offset: int) -> Message:
        """The first result from this offset on: a message, or an error that belongs to an offset.

        A record that the client never returns is such an error, and so is the end of a partition. If the
        client still skips offsets after `within_s`, such as aborted records, the same error is returned with
        the offset reached.
        """
        place = topic, partition
        if (found := self._look(place, offset)) is None:
            reached = self._fetches.last[place].offset
            found = without_content(*place, reached, KafkaError(KafkaError._PARTITION_EOF))
        error = found.error()
        if error is not None and error.code() not in _WITH_OFFSET:
            self.close()
            raise KafkaException(error)
        return found

    def is_there(self, message: Message) -> bool:
        """Whether a message with this content is at the offset that it claims."""
        place = message.topic() or "", message.partition() or 0
        found = self._look(place, offset_of(message), only_there=True)
        return found is not None and found.error() is None and _content(found) == _content(message)

    def _look(
        self, place: tuple[str, int], offset: int, *, only_there: bool = False
    ) -> Message | None:
        """The first result, or None if the client has passed over the offset.

        With `only_there` as soon as it has, otherwise after `within_s`.
        """
        if self._consumer is None:
            self._consumer = self._connect()
        # The client may still log a fetch of the look-up before.
        version = self._fetches.last.get(place, _Fetch()).version
        self._consumer.assign([TopicPartition(*place, offset)])
        ends_s = time.monotonic() + self._within_s
        while (found := self._consumer.poll(LOOK_S)) is None or is_of_no_record(found, offset):
            if found is not None and is_elsewhere(found, offset):
                # This error may also have ended the fetches for this look-up.
                self._consumer.assign([TopicPartition(*place, offset)])
            # Nothing waits to be returned, so what was logged until now is complete.
            silent = self._fetches.not_parsed.get(place, _Fetch())
            if silent.version > version and silent.offset >= offset:
                found = without_content(*place, silent.offset, KafkaError(KafkaError._BAD_MSG, WHY))
                break
            last = self._fetches.last.get(place, _Fetch())
            has_passed = last.version > version and last.offset > offset
            if found is None and has_passed and only_there:
                break
            if time.monotonic() > ends_s:
                consumer, self._consumer = self._consumer, None
                consumer.close()  # what it logs later must not be taken for a later look-up
                if has_passed:
                    return None
                raise JournalSilent(
                    f"{place[0]}/{place[1]}: nothing read from {offset} on for {self._within_s:.1f} s"
                )
        self._consumer.unassign()
        return found

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _connect(self) -> Consumer:
        log = logging.Logger("blackbox.kafka.lookup")
        self._fetches = _FetchLog()
        log.addHandler(self._fetches)
        # The operator's settings must not change what is logged.
        ours = {"debug": "fetch", "log_level": "7", "fetch.error.backoff.ms": "100"}
        settings = {**self._access.settings, **ours, "check.crcs": "false"}
        return replace(self._access, settings=settings).consumer(
            **{
                "logger": log,
                "isolation.level": self._isolation,
                "enable.partition.eof": True,
                # At the end of a partition a fetch stays in flight this long, and the next look-up waits for it.
                "fetch.wait.max.ms": 2,
                "fetch.message.max.bytes": LARGEST_FETCH,
                "fetch.max.bytes": ONE_BATCH,
                # Lines of the log count, too.
                "queued.min.messages": 100,
                "fetch.queue.backoff.ms": 1,
            },
        )


def _content(message: Message) -> tuple[Any, ...]:
    # Not the headers: reading names that are not UTF-8 twice crashes Python.
    return message.offset(), message.timestamp(), message.key(), message.value()


_WITH_OFFSET = (
    KafkaError._PARTITION_EOF,
    KafkaError._BAD_COMPRESSION,
    KafkaError._BAD_MSG,
    *OUT_OF_RANGE,
)
