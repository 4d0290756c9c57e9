"""Reads both journals of one shard, read_committed, for recovery and look-ups."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

from confluent_kafka import Message

from blackbox.core.offset_set import OffsetSet
from blackbox.core.plan import Batch, Binding, Bounds
from blackbox.journal.claim_check import ClaimCheck
from blackbox.journal.kafka_access import REQUEST_TIMEOUT_S, KafkaAccess
from blackbox.journal.message_conversion import leader_epochs, read_headers, read_records
from blackbox.journal.partition_reader import (
    FETCHED_AHEAD,
    LEAST_S,
    STABLE_S,
    PartitionReader,
    is_gone,
    messages_at,
)
from blackbox.journal.polled_messages import offset_of
from blackbox.journal.receipt_parsing import read_receipts
from blackbox.journal.topics import receipts_topic
from blackbox.records import cancel, carried
from blackbox.records.errors import JournalLost
from blackbox.records.receipt import Checked, Claim, Receipt
from blackbox.records.request import Record, Shard

# A record whose last header is one of these may end another request.
NAME_ANOTHER = {carried.HEADER, cancel.HEADER, cancel.REPLACES}


class ShardJournal:
    """Reads the two journals of a shard; every method raises JournalLost when Kafka does not answer.

    `prefetched` is PartitionReader's; `may_have_caller_id` is that of the topic's format. Not safe
    for use from two threads at once.
    """

    def __init__(
        self,
        shard: Shard,
        access: KafkaAccess,
        *,
        isolation: str = "read_committed",
        prefetched: int = FETCHED_AHEAD,
        reader: PartitionReader | None = None,
        may_have_caller_id: Callable[[bytes | None], bool] = lambda value: True,
    ) -> None:
        self._shard = shard
        self._access = access
        self._reader = reader or PartitionReader(access, isolation=isolation, prefetched=prefetched)
        self._receipts_topic = receipts_topic(shard.topic)
        self._may_have_caller_id = may_have_caller_id

    def request_bounds(self) -> Bounds:
        return self._reader.bounds(*self._shard)

    def log_end(self) -> int:
        """The next request offset to be written, behind all open transactions."""
        return self._reader.log_end(*self._shard)

    def settled_bounds(self) -> Bounds:
        """The bounds once every transaction that is open now has ended.

        Raises JournalLost when that takes longer than 30 s.
        """
        return self._reader.stable_bounds(*self._shard, self.log_end() - 1)

    def receipt_bounds(self) -> Bounds:
        return self._reader.bounds(self._receipts_topic, self._shard.partition)

    def first_request_since(self, at_ms: int) -> int | None:
        """The offset of the first request record written at `at_ms` (epoch ms) or later, if there is one."""
        return self._reader.first_since(*self._shard, at_ms)

    def first_receipt_since(self, at_ms: int) -> int | None:
        """The offset of the first receipt written at `at_ms` (epoch ms) or later, if there is one."""
        return self._reader.first_since(self._receipts_topic, self._shard.partition, at_ms)

    def receipts(self, start: int, end: int) -> Iterator[tuple[int, Receipt]]:
        """The receipts at the offsets `start` to `end` - 1, with their offsets."""
        at = self._receipts_topic, self._shard.partition
        for messages, _ in self._reader.read(*at, start, end):
            yield from read_receipts(messages)

    def requests(self, start: int, end: int, ended: OffsetSet | None = None) -> Iterator[Batch]:
        """The request records at the offsets `start` to `end` - 1, as consecutive batches.

        Without records that have `ended` and cannot end another request.
        """
        position = start
        for messages, reached in self._reader.read(*self._shard, start, end):
            if ended is not None:
                messages = self._not_ended(ended, messages)
            # From `position`, not from the first record: gaps belong to the batch as well.
            yield Batch(position, reached, read_records(messages), leader_epochs(messages))
            position = reached

    def binding(self, group: str) -> Binding:
        """The current cluster, topic ids and group; a topic that is created again gets another id."""
        return self._reader.binding(self._shard.topic, self._receipts_topic, group)

    def committed(self) -> int:
        """The request offset that the group has committed; 0 if it never did, or Kafka has expired it."""
        return self._reader.committed(*self._shard)

    def written_ms(self, offset: int) -> int | None:
        """When the record at this offset was written, epoch ms; None if there is none."""
        record = self.records([offset]).get(offset)
        return None if record is None else record.timestamp_ms

    def uncommitted(self, start: int, end: int) -> Iterator[Batch]:
        """Like `requests`, including records of open and aborted transactions."""
        other = ShardJournal(self._shard, self._access, isolation="read_uncommitted")
        with closing(other):
            yield from other.requests(start, end)

    def records(self, offsets: Iterable[int]) -> dict[int, Record]:
        """The request records at these offsets, without those that Kafka no longer has."""
        found, _ = self.first_records(offsets, sys.maxsize)
        return found

    def first_records(
        self, offsets: Iterable[int], most_bytes: int
    ) -> tuple[dict[int, Record], set[int]]:
        """The first of the records at these offsets, of about so many bytes, and the offsets that are left."""
        wanted = set(offsets)
        found: dict[int, Record] = {}
        if not wanted:
            return found, wanted
        with closing(
            messages_at(self._reader, *self._shard, wanted, self.request_bounds())
        ) as read:
            for messages in read:
                asked_for = [message for message in messages if offset_of(message) in wanted]
                found |= {record.offset: record for record in read_records(asked_for)}
                most_bytes -= sum(map(len, asked_for))
                if most_bytes <= 0:
                    last = offset_of(messages[-1])
                    return found, {offset for offset in wanted if offset > last}
        return found, set()

    def record(self, offset: int, within_s: float = STABLE_S) -> Record | None:
        """The request record at this offset, if Kafka has it.

        Waits for the end of an open transaction that hides it; raises RecordHidden when that takes longer.
        """
        # Half of the time for one answer, so that a caller can still ask with a new client.
        ask_s = min(REQUEST_TIMEOUT_S, max(LEAST_S, within_s / 2))
        if self._reader.bounds(*self._shard, ask_s).end <= offset:
            self._reader.stable_bounds(*self._shard, offset, within_s)
        return self.records([offset]).get(offset)

    def record_at(self, topic: str, partition: int, offset: int) -> Record | None:
        """A record of any topic, such as a dead letter, if it still exists."""
        try:
            bounds = self._reader.bounds(topic, partition)
        except JournalLost as error:
            if is_gone(error):
                return None
            raise
        for messages in messages_at(self._reader, topic, partition, [offset], bounds):
            for record in read_records(messages):
                return record
        return None

    def check(self, claims: Iterable[Claim], patience_s: float) -> Checked:
        """Which messages and dead letters are not where these claims say, as `ClaimCheck` finds them."""
        return ClaimCheck(self._shard, self._access, self._reader).check(claims, patience_s)

    def close(self) -> None:
        """Close the consumer; the next use creates a new one."""
        self._reader.close()

    def _not_ended(self, ended: OffsetSet, messages: list[Message]) -> list[Message]:
        """The messages that have not ended, or that may end another request."""
        # A rebuild passes over all that has ended: it is checked without a parsed record for each.
        over = map(ended.__contains__, map(Message.offset, messages))
        may_have_id = map(self._may_have_caller_id, map(Message.value, messages))
        unnamed = [
            m for m, o, has in zip(messages, over, may_have_id, strict=True) if o and not has
        ]
        gone = {
            message.offset()
            for message, headers in zip(unnamed, read_headers(unnamed)[0], strict=True)
            if not headers or headers[-1][0] not in NAME_ANOTHER
        }
        if len(gone) == len(messages):
            return []
        return [message for message in messages if message.offset() not in gone]
