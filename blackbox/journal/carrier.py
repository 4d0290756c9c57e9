"""What promotion writes: records of the cold tier once more, behind all others of their shard."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException, Message

from blackbox.doubt import JournalLost
from blackbox.journal.access import KafkaAccess, doubt
from blackbox.journal.transactions import Transactions
from blackbox.request import Headers, Record, Shard


class Carrier:
    """The producer of a shard's carried records, in transactions under an id of its own.

    Not safe for use from two threads at once.
    """

    def __init__(self, shard: Shard, access: KafkaAccess) -> None:
        self._shard = shard
        self._transactions = Transactions(
            access, f"{access.group_id}-{shard}-promotion", f"{shard}: promotion"
        )
        self._failed: KafkaError | None = None
        self._end = 0
        self.open = self._transactions.open
        self.begin = self._transactions.begin
        self.commit = self._transactions.commit
        self.abort = self._transactions.abort
        self.close = self._transactions.close

    def send(self, record: Record, headers: Headers, timestamp_ms: int) -> None:
        """Queue this record's key and value under these headers. Raises JournalLost when it cannot be sent."""
        while True:
            try:
                self._transactions.producer.produce(
                    self._shard.topic,
                    record.value,
                    record.key,
                    self._shard.partition,
                    self._report,
                    None,
                    timestamp_ms,
                    headers,  # type: ignore[arg-type]
                )
                return
            except BufferError:
                self._transactions.producer.poll(0.1)
            except KafkaException as error:
                at = self._shard.source(record.offset)
                raise doubt(error, f"{at}: cannot be carried on") from None

    def flush(self) -> int:
        """Wait until the broker has every record; returns the next offset behind the last one."""
        left = self._transactions.flush()
        if self._failed is not None:
            raise doubt(
                KafkaException(self._failed), f"{self._shard}: a record cannot be carried on"
            )
        if left:
            raise JournalLost(f"{self._shard}: {left} carried records unacknowledged")
        return self._end

    def _report(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failed = error
        else:
            self._end = max(self._end, (message.offset() or 0) + 1)
