"""Reads stretches of single partitions, read_committed by default, for look-ups in a journal."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

from blackbox.core.plan import Binding, Bounds, stretches
from blackbox.journal.careful_reading import read_carefully
from blackbox.journal.claimed_offsets import believed
from blackbox.journal.kafka_access import (
    REQUEST_TIMEOUT_S,
    KafkaAccess,
    journal_error,
    outcome,
    read_right,
)
from blackbox.journal.offset_lookup import OffsetLookup
from blackbox.journal.polled_messages import messages_below
from blackbox.journal.topics import MISSING, topic_ids
from blackbox.journal.unreadable_batches import readable
from blackbox.records.errors import JournalLost, JournalSilent, RecordHidden

READ_RECORDS = 4000
FETCHED_AHEAD = 20_000
MOST_FETCHED_BYTES = 16_000_000
SILENCE_S = 15.0
# Before a shard of which nothing is returned is read with care. The first client may have to connect.
FIRST_HESITATION_S = 2.0
HESITATION_S = 0.5
LOOK_UP_S = 2.0
STABLE_S = 30.0
STABLE_LOOK_S = 0.05
LEAST_S = 0.5  # of one request, however little time is left


@dataclass(eq=False, repr=False)
class PartitionReader:
    """Reads any partition between two offsets; every method raises JournalLost when Kafka does not answer.

    `prefetched` is how many records are fetched ahead: many for sequential reading, 1 for single look-ups.
    When two clients in turn read nothing, the second for `silence_s`, JournalSilent is raised.
    Reads one stretch at a time. Not safe for use from two threads at once.
    """

    access: KafkaAccess
    _: KW_ONLY
    isolation: str = "read_committed"
    prefetched: int = FETCHED_AHEAD
    at_once: int = READ_RECORDS
    silence_s: float = SILENCE_S
    _consumer: Consumer | None = None
    _admin: AdminClient | None = None

    def __post_init__(self) -> None:
        look_s = min(LOOK_UP_S, self.silence_s)
        self._lookup = OffsetLookup(self.access, look_s, self.isolation)

    def close(self) -> None:
        """Close the clients; the next use creates new ones."""
        self._admin = None
        self._lookup.close()
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def bounds(self, topic: str, partition: int, within_s: float = REQUEST_TIMEOUT_S) -> Bounds:
        """The first offset, and the offset up to which the partition can be read now."""
        at = TopicPartition(topic, partition)
        with self._asking(topic, f"{topic}/{partition}: cannot read its offsets"):
            try:
                # A read_committed consumer gets the last stable offset as the end.
                found = self._open().get_watermark_offsets(at, timeout=within_s)
            except KafkaException as error:
                if error.args[0].code() == KafkaError._UNKNOWN_PARTITION:
                    self.exists(topic, partition)  # raises if only the leader is missing
                raise
        if found is None:
            raise JournalLost(
                f"{topic}/{partition}: the broker did not return its offsets within {within_s:.1f} "
                "s"
            )
        return Bounds(*found)

    def exists(self, topic: str, partition: int) -> bool:
        """Whether the partition exists. Raises JournalLost when it has no leader."""
        with self._asking(topic, f"{topic}/{partition}: cannot look up its leader"):
            found = self._open().list_topics(topic, timeout=REQUEST_TIMEOUT_S).topics[topic]
            if found.error is not None and found.error.code() not in _GONE:
                raise KafkaException(found.error)
        there = found.partitions.get(partition)
        if there is not None and there.leader < 0:
            raise JournalLost(f"{topic}/{partition}: it has no leader")
        return there is not None

    def stable_bounds(
        self, topic: str, partition: int, place: int, within_s: float = STABLE_S
    ) -> Bounds:
        """The bounds once no open transaction hides the offset `place`, which need not exist. Raises RecordHidden."""
        deadline = time.monotonic() + within_s
        ask_s = min(REQUEST_TIMEOUT_S, max(LEAST_S, within_s))
        while True:
            bounds = self.bounds(topic, partition, ask_s)
            # If no transaction is open, the end is that of the log, and `place` is behind it.
            if bounds.end > place or bounds.end >= self.log_end(topic, partition, ask_s):
                return bounds
            if time.monotonic() > deadline:
                raise RecordHidden(
                    f"{topic}/{partition}: an open transaction of another producer hides offset "
                    f"{place} until it ends, at the latest after its transaction.timeout.ms"
                )
            time.sleep(STABLE_LOOK_S)

    def log_end(self, topic: str, partition: int, within_s: float = REQUEST_TIMEOUT_S) -> int:
        """The high watermark: the next offset to be written, behind all open transactions."""
        at = TopicPartition(topic, partition)
        # The consumer may be read_committed, and would return the last stable offset.
        asked = self._clients_admin().list_offsets(
            {at: OffsetSpec.latest()},  # type: ignore[no-untyped-call]
            isolation_level=IsolationLevel.READ_UNCOMMITTED,
            request_timeout=within_s,
        )
        with self._asking(topic, f"{topic}/{partition}: cannot read its end offset"):
            end = int(outcome(asked[at]).offset)
        if end < 0:  # the broker did not answer in time
            raise JournalLost(
                f"{topic}/{partition}: the broker did not return its end offset within "
                f"{within_s:.1f} s"
            )
        return end

    def binding(self, topic: str, receipts: str, group: str) -> Binding:
        """The cluster, topic ids and group that an index of this topic belongs to now."""
        with self._asking(topic, f"{topic}: cannot read its topic id"):
            cluster = self._open().list_topics(topic, timeout=REQUEST_TIMEOUT_S).cluster_id
        return Binding(cluster or "", self.topic_id(topic), self.topic_id(receipts), group)

    def committed(self, topic: str, partition: int) -> int:
        """The offset that the group has committed, 0 if there is none."""
        group = self.access.group_id
        with self._asking(
            topic, f"{topic}/{partition}: cannot read the offset committed by the group {group}"
        ):
            # Not by an admin client: while the group's coordinator moves, librdkafka dereferences
            # NULL there, and the process dies (its issue 5315, open).
            at = TopicPartition(topic, partition)
            [found] = self._open().committed([at], timeout=REQUEST_TIMEOUT_S)
            if found.error is not None:
                raise KafkaException(found.error)
        return max(0, found.offset)

    def topic_id(self, topic: str) -> str:
        with self._asking(topic, f"{topic}: cannot read its topic id"):
            return topic_ids(self._clients_admin(), [topic])[topic]

    def first_since(self, topic: str, partition: int, at_ms: int) -> int | None:
        """The first offset whose record has this timestamp (epoch ms) or a later one, if there is one."""
        at = TopicPartition(topic, partition, max(0, at_ms))
        with self._asking(topic, f"{topic}/{partition}: cannot look up the offset of a timestamp"):
            [found] = self._open().offsets_for_times([at], timeout=REQUEST_TIMEOUT_S)
            if found.error is not None:
                raise KafkaException(found.error)
        return found.offset if found.offset >= 0 else None

    def read(
        self, topic: str, partition: int, start: int, end: int
    ) -> Generator[tuple[list[Message], int]]:
        """Lists of messages from `start` on, each with the offset reached, until that is `end`."""
        if start >= end:
            return
        consumer, reached = self._open(), start
        hesitation_s = min(FIRST_HESITATION_S, self.silence_s)
        try:
            with self._asking(topic, f"{topic}/{partition}: cannot read from {start}"):
                consumer.assign([TopicPartition(topic, partition, start)])
                # `consume` alone returns only once it has all records, or its timeout has passed.
                while reached < end and (first := consumer.poll(hesitation_s)) is not None:
                    for found in self._found(consumer, first, reached, end):
                        reached = found[1]
                        yield found
        finally:
            consumer.unassign()
        if reached < end:
            yield from self.read_patiently(topic, partition, reached, end)

    def read_patiently(
        self, topic: str, partition: int, start: int, end: int
    ) -> Iterator[tuple[list[Message], int]]:
        """Like `read`, but tolerates gigabytes of aborted records, and records that clients never return.

        Raises JournalSilent when a client neither reads nor passes over anything for `silence_s`.
        """
        # A client for this read only: statistics of a client that is not polled pile up in memory.
        consumer, fetched = self.access.fetching_consumer(**self._settings())
        with (
            closing(consumer),
            self._asking(topic, f"{topic}/{partition}: cannot read from {start}"),
        ):
            consumer.assign([TopicPartition(topic, partition, start)])
            reached = position = start
            ends_s = time.monotonic() + self.silence_s
            while reached < end:
                first = consumer.poll(min(HESITATION_S, self.silence_s))
                before, position = max(position, reached), fetched.next_offset(topic, partition)
                some: Iterable[tuple[list[Message], int]] = [([], reached)]
                if first is not None:
                    some = self._found(consumer, first, reached, end)
                elif position >= end:  # nothing but aborted records up to the end
                    some = [([], end)]
                elif position <= before and time.monotonic() > ends_s:
                    raise JournalSilent(f"{topic}/{partition}: nothing read from {reached} on")
                elif 0 <= position <= before:
                    some = read_carefully(self._lookup, consumer, topic, partition, reached, end)
                at = reached
                try:
                    for found in some:
                        reached = found[1]
                        yield found
                    if reached > at or position > before:
                        ends_s = time.monotonic() + self.silence_s
                except JournalSilent:
                    if first is not None:
                        raise

    def _found(
        self, consumer: Consumer, first: Message, reached: int, end: int
    ) -> Iterator[tuple[list[Message], int]]:
        """The `first` message and those that are fetched, each list with the offset reached."""
        polled = [first, *consumer.consume(self.at_once, timeout=0)]
        trusted = believed(readable(polled), reached, self._lookup.is_there)
        messages, there = messages_below(trusted, end)
        reached = max(reached, there)
        yield messages, reached
        if len(trusted) < len(polled) and reached < end:
            place = first.topic() or "", first.partition() or 0
            yield from read_carefully(self._lookup, consumer, *place, reached, end)

    def _clients_admin(self) -> AdminClient:
        if self._admin is None:  # an idle client has length 0 and is falsy
            self._admin = self.access.admin()
        return self._admin

    def _open(self) -> Consumer:
        if self._consumer is None:
            self._consumer = self.access.consumer(**self._settings())
        return self._consumer

    def _settings(self) -> dict[str, Any]:
        return {
            "isolation.level": self.isolation,
            # Its event marks the last stable offset, also behind aborted records.
            "enable.partition.eof": True,
            # At the end of a partition, every read waits this long for records that do not come.
            "fetch.wait.max.ms": 20,
            "queued.min.messages": self.prefetched,
            "queued.max.messages.kbytes": MOST_FETCHED_BYTES // 1000,
            "fetch.queue.backoff.ms": 1,
        }

    @contextmanager
    def _asking(self, topic: str, what: str) -> Iterator[None]:
        """Turn a KafkaException into RecoveryRequired; `what` says what was tried."""
        try:
            yield
        except KafkaException as error:
            needs = read_right(error.args[0], topic, self.access.group_id)
            raise journal_error(error, what, needs) from error


def messages_at(
    reader: PartitionReader, topic: str, partition: int, offsets: Iterable[int], bounds: Bounds
) -> Generator[list[Message]]:
    """The messages at those of these offsets that Kafka still has, and some between them."""
    kept = sorted(offset for offset in offsets if bounds.start <= offset < bounds.end)
    for stretch in stretches(kept, READ_RECORDS):
        for messages, _ in reader.read(topic, partition, *stretch):
            yield messages


def is_gone(error: JournalLost) -> bool:
    """Whether the topic or the partition that was asked for does not exist."""
    cause = error.__cause__
    return isinstance(cause, KafkaException) and cause.args[0].code() in _GONE


_GONE = (*MISSING, KafkaError._UNKNOWN_PARTITION)
