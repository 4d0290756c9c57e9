"""What both journals of one shard hold, read_committed, for recovery and for look-ups."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

from blackbox.doubt import Doubt, JournalLost
from blackbox.journal.access import REQUEST_TIMEOUT_S, KafkaAccess, doubt, read_right
from blackbox.journal.records import read_records
from blackbox.journal.topics import receipts_topic
from blackbox.plan import Batch
from blackbox.receipt import Places, Receipt, decode
from blackbox.request import Record, Shard

READ_RECORDS = 4000
FETCHED_AHEAD = 20_000
SILENCE_S = 15.0
STABLE_S = 30.0
STABLE_LOOK_S = 0.05


class Bounds(NamedTuple):
    """First offset kept, and the next offset to be committed."""

    start: int
    end: int


class ShardJournal:
    """Reads the two journals of a shard; every method raises JournalLost when Kafka does not answer.

    `ahead` is how many records are fetched before they are asked for: many to read on and on, few
    for a look here and there. Holds one consumer while it is in use; not safe for use from two
    threads at once.
    """

    def __init__(
        self,
        shard: Shard,
        access: KafkaAccess,
        *,
        isolation: str = "read_committed",
        ahead: int = FETCHED_AHEAD,
    ) -> None:
        self._shard = shard
        self._isolation = isolation
        self._ahead = ahead
        self._access = access
        self._receipts_topic = receipts_topic(shard.topic)
        self._consumer: Consumer | None = None
        self._admin: AdminClient | None = None

    def request_bounds(self) -> Bounds:
        return self._bounds(self._shard.topic, self._shard.partition)

    def settled_bounds(self) -> Bounds:
        """The bounds once every transaction that is open now has ended.

        Raises JournalLost when that takes longer than 30 s.
        """
        topic, partition = self._shard.topic, self._shard.partition
        return self._stable_bounds(topic, partition, self._log_end(topic, partition) - 1)

    def receipt_bounds(self) -> Bounds:
        return self._bounds(self._receipts_topic, self._shard.partition)

    def receipts(self, start: int, end: int) -> Iterator[tuple[int, Receipt]]:
        """The receipts at the offsets `start` to `end` - 1, with their offsets."""
        for messages, _ in self._read(self._receipts_topic, self._shard.partition, start, end):
            for message in messages:
                yield _offset(message), decode(message.value())

    def requests(self, start: int, end: int) -> Iterator[Batch]:
        """The request records at the offsets `start` to `end` - 1, as consecutive batches."""
        position = start
        for messages, reached in self._read(self._shard.topic, self._shard.partition, start, end):
            yield Batch(position, reached, read_records(messages))
            position = reached

    def uncommitted(self, start: int, end: int) -> Iterator[Batch]:
        """Like `requests`, with those of transactions that have not ended, or that were aborted."""
        other = ShardJournal(self._shard, self._access, isolation="read_uncommitted")
        try:
            yield from other.requests(start, end)
        finally:
            other.close()

    def records(self, offsets: Iterable[int]) -> dict[int, Record]:
        """The request records at these offsets, without those that Kafka does not have any more."""
        wanted = set(offsets)
        if not wanted:
            return {}
        bounds = self.request_bounds()
        found: dict[int, Record] = {}
        topic, partition = self._shard.topic, self._shard.partition
        for first, last in _runs(sorted(o for o in wanted if o >= bounds.start)):
            for messages, _ in self._read(topic, partition, first, min(last + 1, bounds.end)):
                asked_for = [message for message in messages if _offset(message) in wanted]
                found |= {record.offset: record for record in read_records(asked_for)}
        return found

    def missing(self, receipts: Sequence[Receipt]) -> list[int]:
        """The requests whose message or dead letter is not where these receipts say it is.

        A place that retention removed since, or whose topic is gone, counts as filled. A place
        behind another producer's open transaction cannot be read yet: waits for its end, and
        raises JournalLost when that takes longer than 30 s.
        """
        places: Places = {}
        for receipt in receipts:
            for part in (receipt.delivered, receipt.letters):
                for at, pairs in part.items():
                    places.setdefault(at, []).extend(pairs)
        return sorted(
            offset for at, pairs in places.items() for offset in self._unfilled(at, pairs)
        )

    def close(self) -> None:
        """Give the consumer up; the next use makes a new one."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
        self._admin = None

    def _unfilled(self, at: str, pairs: Sequence[tuple[int, int]]) -> Iterator[int]:
        topic, _, partition = at.rpartition("/")
        try:
            bounds = self._stable_bounds(topic, int(partition), max(pairs, key=itemgetter(1))[1])
        except JournalLost as error:
            if isinstance(error.__cause__, KafkaException) and _is_gone(error.__cause__):
                return
            raise
        wanted = {there: offset for offset, there in pairs if there >= bounds.start}
        seen: set[int] = set()
        for first, last in _runs(sorted(there for there in wanted if there < bounds.end)):
            for messages, _ in self._read(topic, int(partition), first, min(last + 1, bounds.end)):
                seen |= {_offset(m) for m in messages if self._is_ours(m, wanted)}
        yield from (offset for there, offset in wanted.items() if there not in seen)

    def _is_ours(self, message: Message, wanted: dict[int, int]) -> bool:
        there = _offset(message)
        if there not in wanted:
            return False
        source = self._shard.source(wanted[there]).encode()
        return ("blackbox-source", source) in (message.headers() or [])

    def _open(self) -> Consumer:
        if self._consumer is None:
            self._consumer = self._access.consumer(
                **{
                    "isolation.level": self._isolation,
                    "enable.partition.eof": True,
                    "fetch.wait.max.ms": 20,
                    "queued.min.messages": self._ahead,
                    "fetch.queue.backoff.ms": 1,
                }
            )
        return self._consumer

    def _bounds(self, topic: str, partition: int) -> Bounds:
        at = TopicPartition(topic, partition)
        try:
            found = self._open().get_watermark_offsets(at, timeout=REQUEST_TIMEOUT_S)
        except KafkaException as error:
            raise self._doubt(
                error, topic, f"{topic}/{partition}: cannot ask for its offsets"
            ) from error
        if found is None:
            raise JournalLost(f"{topic}/{partition}: no offsets within {REQUEST_TIMEOUT_S} s")
        return Bounds(*found)

    def _stable_bounds(self, topic: str, partition: int, place: int) -> Bounds:
        """The bounds once no open transaction hides `place`, which may also not exist at all."""
        deadline = time.monotonic() + STABLE_S
        while True:
            bounds = self._bounds(topic, partition)
            if bounds.end > place or bounds.end >= self._log_end(topic, partition):
                return bounds
            if time.monotonic() > deadline:
                raise JournalLost(
                    f"{topic}/{partition}: an open transaction of another producer hides offset "
                    f"{place}, so what is there is not known yet; looking again"
                )
            time.sleep(STABLE_LOOK_S)

    def _log_end(self, topic: str, partition: int) -> int:
        at = TopicPartition(topic, partition)
        self._admin = self._admin or self._access.admin()
        asked = self._admin.list_offsets(
            {at: OffsetSpec.latest()},  # type: ignore[no-untyped-call]
            isolation_level=IsolationLevel.READ_UNCOMMITTED,
            request_timeout=REQUEST_TIMEOUT_S,
        )
        try:
            return int(asked[at].result().offset)
        except KafkaException as error:
            raise self._doubt(
                error, topic, f"{topic}/{partition}: cannot ask for its end"
            ) from error

    def _read(
        self, topic: str, partition: int, start: int, end: int
    ) -> Iterator[tuple[list[Message], int]]:
        """Messages from `start` on, each time with the offset reached, until that is `end`."""
        if start >= end:
            return
        consumer = self._open()
        try:
            consumer.assign([TopicPartition(topic, partition, start)])
            reached = start
            while reached < end:
                first = consumer.poll(SILENCE_S)
                if first is None:
                    raise JournalLost(f"{topic}/{partition}: nothing read for {SILENCE_S} s")
                polled = [first, *consumer.consume(READ_RECORDS, timeout=0)]
                messages, reached = _sorted_out(polled, end)
                yield messages, reached
        except KafkaException as error:
            raise self._doubt(
                error, topic, f"{topic}/{partition}: cannot read from {start}"
            ) from error
        finally:
            consumer.unassign()

    def _doubt(self, error: KafkaException, topic: str, what: str) -> Doubt:
        return doubt(error, what, read_right(error.args[0], topic, self._access.group_id))


def _sorted_out(polled: list[Message], end: int) -> tuple[list[Message], int]:
    """The messages below `end`, and the offset that they and the ends of the partition reach."""
    ends = [message for message in polled if message.error() is not None]
    for message in ends:
        if message.error().code() != KafkaError._PARTITION_EOF:  # type: ignore[union-attr]
            raise KafkaException(message.error())
    messages = [m for m in polled if m.error() is None] if ends else polled
    reached = max(_offset(message) for message in ends) if ends else 0
    if messages:
        reached = max(reached, _offset(messages[-1]) + 1)
    if reached > end:
        messages = [message for message in messages if _offset(message) < end]
    return messages, min(reached, end)


def _offset(message: Message) -> int:
    offset = message.offset()
    assert offset is not None
    return offset


def _is_gone(error: KafkaException) -> bool:
    return error.args[0].code() in (
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    )


def _runs(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Group sorted offsets into (first, last) runs that are worth one read each."""
    first = last = -1
    for offset in offsets:
        if first >= 0 and offset - last <= READ_RECORDS:
            last = offset
            continue
        if first >= 0:
            yield first, last
        first = last = offset
    if first >= 0:
        yield first, last
