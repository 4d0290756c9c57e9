"""The producer of promotion: writes records of the cold tier again, at the end of their partition."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message

from blackbox.journal.kafka_access import KafkaAccess, explained, journal_error, produce
from blackbox.journal.refusals import reason_of
from blackbox.journal.transactions import Transactions
from blackbox.records.errors import JournalLost
from blackbox.records.request import Headers, Record, Shard


@dataclass(eq=False, repr=False)
class ShardPromotionProducer:
    """Produces a shard's promoted records, in transactions under its own transactional id.

    Not safe for use from two threads at once.
    """

    shard: Shard
    access: KafkaAccess
    _open: Transactions | None = None
    _failed: dict[int, KafkaError] = field(default_factory=dict)
    _end: int = 0

    def open(self) -> None:
        """Fence every earlier producer and settle its open transaction; reopen this one after a refusal."""
        # A new client, also after an abort: late records of the aborted transaction could slip into
        # the next one of the same epoch.
        self.close()
        name = self.access.transactional_id(f"{self.shard}/promotion")
        self._open = Transactions(self.access, name, f"{self.shard}: promotion")
        self._open.open()

    def begin(self) -> None:
        self._failed = {}
        self._transactions.begin()

    def commit(self) -> None:
        self._transactions.commit()

    def abort(self) -> None:
        self._transactions.abort()

    def close(self) -> None:
        """Drop what is queued; safe to call twice."""
        if self._open is not None:
            self._open.close()
            self._open = None

    @property
    def _transactions(self) -> Transactions:
        assert self._open is not None, "open it first"
        return self._open

    def send(self, record: Record, headers: Headers, timestamp_ms: int) -> None:
        topic, partition = self.shard
        report = partial(self._report, record.offset)
        producer = self._transactions.producer
        try:
            produce(
                producer, topic, record.value, record.key, partition, report, headers, timestamp_ms
            )
        except KafkaException as error:
            self._failed[record.offset] = error.args[0]

    def flush(self) -> tuple[int, dict[int, str]]:
        """Wait until the broker has every record.

        Returns the offset after the last record, and by offset why records were refused. After a
        refusal, abort and open again.
        """
        left = self._transactions.flush()
        needs = f"Write on topic {self.shard.topic}"
        refused = {o: explained(e, needs) for o, e in self._failed.items() if reason_of(e)}
        if self._failed and not refused:
            error = next(iter(self._failed.values()))
            if error.code() == KafkaError._PURGE_QUEUE:  # commit raises the cause
                self._transactions.commit(needs)
            raise journal_error(
                KafkaException(error), f"{self.shard}: a record cannot be promoted or renewed"
            )
        if left:
            raise JournalLost(
                f"{self.shard}: {left} promoted or renewed records were not acknowledged"
            )
        return self._end, refused  # the other failures are their consequence

    def _report(self, offset: int, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failed[offset] = error
        else:
            self._end = max(self._end, (message.offset() or 0) + 1)
