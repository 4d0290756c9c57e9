"""The oscillator topic: a record for each second that has begun, written by one producer at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import closing

from confluent_kafka import KafkaException

from blackbox.journal.access import KafkaAccess, doubt
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.transactions import Transactions
from blackbox.records.request import Shard

PARTITION = 0
VALUE = b"1"
TAIL = 100
"""Records at the end that are looked at first; ten times as many while none of them is a second."""

_SECOND = re.compile(rb"[0-9]{1,12}")


class Seconds:
    """Writes seconds in transactions, under an id of its own; unusable after its first doubt.

    Every method raises RecoveryRequired when Kafka does not answer or another writer opened it. Not safe
    for use from two threads at once.
    """

    def __init__(self, access: KafkaAccess, topic: str) -> None:
        self._shard = Shard(topic, PARTITION)
        self._access = access
        self._needs = f"Write on topic {topic}"
        name = access.transactional_id("oscillator")
        self._transactions = Transactions(access, name, f"{topic}: seconds")

    def open(self) -> int | None:
        """Fence every earlier writer, then read the last second written; None in an empty topic."""
        self._transactions.open()
        with closing(ShardJournal(self._shard, self._access, ahead=1)) as journal:
            for stretch in journal.request_bounds().from_the_end(TAIL):
                records = (r for batch in journal.requests(*stretch) for r in batch.records)
                if found := [r.key for r in records if r.key and _SECOND.fullmatch(r.key)]:
                    return int(found[-1])
            return None

    def write(self, seconds: Iterable[int]) -> None:
        """All of them, in this order, or none; each with itself as its timestamp."""
        topic = self._shard.topic
        self._transactions.begin()
        try:
            for second in seconds:
                record, at_ms = (topic, VALUE, b"%d" % second, PARTITION), second * 1000
                self._transactions.send(*record, timestamp_ms=at_ms, needs=self._needs)
        except KafkaException as error:
            raise doubt(error, f"{topic}: cannot produce") from None
        self._transactions.commit(self._needs)

    def close(self) -> None:
        """Drop what is queued; an open transaction stays for the next writer to settle."""
        self._transactions.close()
