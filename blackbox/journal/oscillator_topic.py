"""The oscillator topic: a record for each second that has begun, written by one producer at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import closing
from typing import NamedTuple

from confluent_kafka import KafkaException

from blackbox.journal.kafka_access import KafkaAccess, journal_error
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.transactions import Transactions
from blackbox.records.clock import CLOCKS_APART_MS
from blackbox.records.request import Record, Shard

PARTITION = 0
VALUE = b"1"
# Records at the end that are read first; ten times as many each time that none of them is a second.
TAIL = 100

_SECOND = re.compile(rb"[0-9]{1,12}")
# Of what has such a key, a second that is weeks ahead is a record of somebody else: no clock was so wrong.
_AHEAD_S = 30 * 86_400
# How far the last second may be before its record's timestamp: if brokers set it, by an outage.
_OLD_S = 30 * 86_400
# How far the last second may be before the second that was written before it.
_BACK_S = 86_400


class WrittenSecond(NamedTuple):
    """The last second; if it is lower than `lowest`, its record is wrong."""

    second: int
    offset: int
    lowest: int = 0


class OscillatorTopic:
    """Writes seconds in transactions under its own id; unusable after its first RecoveryRequired.

    Every method raises RecoveryRequired when Kafka does not answer or another writer has opened the
    topic. Not safe for use from two threads at once.
    """

    def __init__(self, access: KafkaAccess, topic: str) -> None:
        self._shard = Shard(topic, PARTITION)
        self._access = access
        self._needs = f"Write on topic {topic}"
        name = access.transactional_id("oscillator")
        self._transactions = Transactions(access, name, f"{topic}: seconds")

    def open(self, now_ms: int) -> WrittenSecond | None:
        """Fence every earlier writer, then read the last second written until now; None if there is none.

        Waits for transactions of others: seconds that an earlier writer committed may be behind them.
        """
        # In this order: an earlier writer that is not fenced could add seconds after the read.
        self._transactions.open()
        with closing(ShardJournal(self._shard, self._access, prefetched=1)) as journal:
            for stretch in journal.settled_bounds().from_the_end(TAIL):
                records = (r for batch in journal.requests(*stretch) for r in batch.records)
                if last := last_second(records, now_ms):
                    return last
            return None

    def write(self, seconds: Iterable[int]) -> None:
        """Write all of these seconds, in this order, or none; each record's timestamp is its second."""
        topic = self._shard.topic
        self._transactions.begin()
        try:
            for second in seconds:
                record, at_ms = (topic, VALUE, b"%d" % second, PARTITION), second * 1000
                self._transactions.send(*record, timestamp_ms=at_ms, needs=self._needs)
        except KafkaException as error:
            raise journal_error(error, f"{topic}: cannot produce") from None
        self._transactions.commit(self._needs)

    def close(self) -> None:
        """Drop queued records; an open transaction is settled by the next writer."""
        self._transactions.close()


def last_second(records: Iterable[Record], now_ms: int) -> WrittenSecond | None:
    """The last second in these records, which are in the order of the topic; None if there is none."""
    last, begun = None, 0
    for record in records:
        second = _second_of(record)
        if second is None or second > now_ms // 1000 + _AHEAD_S:
            continue
        lowest = max(begun - _BACK_S, record.timestamp_ms // 1000 - _OLD_S, 0)
        last = WrittenSecond(second, record.offset, lowest)
        # A correct second may follow one that is ahead.
        if second * 1000 <= now_ms + CLOCKS_APART_MS:
            begun = second
    return last


def _second_of(record: Record) -> int | None:
    is_second = record.value == VALUE and _SECOND.fullmatch(record.key or b"")
    return int(record.key or b"") if is_second else None
