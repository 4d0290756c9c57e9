"""Loads rows of files into a request topic, in transactions that also record the progress."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from tenacity import (
    retry,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_after_attempt,
)

from blackbox.journal.kafka_access import (
    REQUEST_TIMEOUT_S,
    KafkaAccess,
    explained,
    journal_error,
)
from blackbox.journal.transactions import SETTLE_S, Transactions
from blackbox.records.errors import Fenced, JournalLost, NotAllowed, RecoveryRequired
from blackbox.records.request import Headers

ASK_S = 0.2
ASKED_AT_ONCE = 16
COMMIT_TRIES = 3

# The version of how files are cut into pieces. In another layout, the same numbers mean other rows.
LAYOUT = "1"

# Upper bounds of what Kafka adds to a record in a batch of its own, and to each header.
RECORD_BYTES = 120
HEADER_BYTES = 12


class PieceProgress(NamedTuple):
    """How many rows of a piece are in the topic, and how many it has in total."""

    rows: int
    total: int


def piece_name(access: KafkaAccess, fingerprint: str, number: int) -> str:
    """The consumer group of one piece of one load; in its transactional id, a slash follows the group id."""
    return f"{access.group_id}.load.{fingerprint}.{number}"


def largest_record(access: KafkaAccess, topic_max_bytes: int | None) -> int:
    """The size of the largest record that client and topic accept; see `record_bytes`."""
    own = access.largest_message_bytes
    return min(own, topic_max_bytes or own)


def record_bytes(key: str | None, value: bytes, headers: Headers) -> int:
    """The approximate size of a record in a batch of its own, too large rather than too small."""
    # A character has four bytes in UTF-8 at most.
    names = sum(4 * len(name) + len(held or b"") + HEADER_BYTES for name, held in headers)
    return len(value) + 4 * len(key or "") + names + RECORD_BYTES


class PieceProgressReader:
    """The committed progress of pieces. May be used by several threads at once."""

    def __init__(self, access: KafkaAccess, topic: str) -> None:
        self._access = access
        self._at = TopicPartition(topic, 0)

    def of(
        self, names: Iterable[str], *, wait_for_commits: bool = False
    ) -> dict[str, PieceProgress]:
        """The marks of these pieces, without those that were never begun. Raises JournalLost.

        A commit that has just succeeded may not be visible yet. With `wait_for_commits`, waits for it, and for
        any open transaction, 20 s at most for each piece.
        """
        names = list(names)
        pool = ThreadPoolExecutor(ASKED_AT_ONCE)
        try:
            marks = pool.map(partial(self._ask, wait_for_commits=wait_for_commits), names)
            return {name: mark for name, mark in zip(names, marks, strict=True) if mark is not None}
        finally:
            pool.shutdown(cancel_futures=True)  # after a failure, the others need not be asked

    def _ask(self, name: str, *, wait_for_commits: bool) -> PieceProgress | None:
        deadline = time.monotonic() + SETTLE_S
        while True:
            is_last = time.monotonic() > deadline
            try:
                return _mark(name, self._committed(name, settled=wait_for_commits and not is_last))
            except KafkaException as error:
                cause = error.args[0]
                if cause.code() == KafkaError.GROUP_ID_NOT_FOUND:
                    return None
                if is_last or not (cause.retriable() or cause.code() in _PASSING):
                    needs = _right(cause, name, self._at.topic)
                    raise journal_error(error, f"{name}: cannot read its progress", needs) from None
            time.sleep(ASK_S)

    def _committed(self, name: str, *, settled: bool) -> TopicPartition:
        # A consumer for each group, not one admin client for all: while the coordinator of a group
        # moves, librdkafka dereferences NULL there, and the process dies (its issue 5315, open).
        isolation = "read_committed" if settled else "read_uncommitted"
        consumer = self._access.in_group(name).consumer(**{"isolation.level": isolation})
        try:
            return _committed(consumer, self._at, REQUEST_TIMEOUT_S)
        finally:
            consumer.close()


_PASSING = (
    KafkaError.UNSTABLE_OFFSET_COMMIT,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._WAIT_COORD,
)


def _right(error: KafkaError, name: str, topic: str) -> str:
    is_topic = error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    return f"Write on topic {topic}" if is_topic else f"Read on group {name}"


def _committed(consumer: Consumer, at: TopicPartition, within_s: float) -> TopicPartition:
    try:
        [found] = consumer.committed([at], timeout=within_s)
    except KafkaException:
        # Without the permission to find the coordinator, librdkafka times out. Only `poll` says why.
        why = consumer.poll(0)
        if why is not None and (error := why.error()) is not None:
            raise KafkaException(error) from None
        raise
    if found.error is not None:
        raise KafkaException(found.error)
    return found


def _mark(name: str, at: TopicPartition) -> PieceProgress | None:
    if at.offset < 0:
        return None
    layout, _, total = (at.metadata or "").partition("/")
    if layout != LAYOUT:
        raise JournalLost(
            f"{name} was started by a version of blackbox with another progress format "
            f"({at.metadata!r}); finish it with that version"
        )
    return PieceProgress(at.offset, int(total))


def commit_again(access: KafkaAccess, topic: str, progress: Mapping[str, PieceProgress]) -> None:
    """Commit the progress of these pieces again: Kafka forgets that of each some time after its own commit.

    Ends their open transactions, and fences their writers. Raises JournalLost when the brokers do
    not answer in three tries for a piece.
    """

    # Without pauses: a try itself waits for brokers that do not answer.
    @retry(
        retry=retry_if_exception_type(JournalLost) & retry_if_not_exception_type(NotAllowed),
        stop=stop_after_attempt(COMMIT_TRIES),
        reraise=True,
    )
    def commit(name: str) -> None:
        writer = PieceWriter(access, topic, name, progress[name].total)
        try:
            # Read again after the fence: another run may have sent rows, or the topic may be a new one.
            if rows_in := writer.open():
                writer.send([], rows_in)
        except Fenced:
            pass  # by another run, which has opened the piece and commits it
        finally:
            writer.close()

    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        list(pool.map(commit, progress))


class PieceWriter:
    """Writes the rows of one piece, each exactly once however often the piece is begun.

    Each transaction has some rows and the number of rows that are in after it.
    Unusable after its first RecoveryRequired. Not safe for use from two threads at once.
    """

    def __init__(self, access: KafkaAccess, topic: str, name: str, total: int) -> None:
        self._name = name
        self._topic = topic
        self._mark = f"{LAYOUT}/{total}"
        # Throughput counts here, not latency; the operator's settings still win.
        gathered = {"linger.ms": "20", "compression.type": "lz4"} | dict(access.settings)
        own = access.transactional_id(name.removeprefix(f"{access.group_id}."))
        self._transactions = Transactions(replace(access, settings=gathered), own, name)
        self._consumer: Consumer = access.in_group(name).consumer()
        self._failed: KafkaError | None = None

    def open(self) -> int:
        """Returns how many rows are in.

        Raises JournalLost when the brokers do not answer: up to 30 s for fencing earlier writers, then up
        to 20 s for reading the progress.
        """
        # Fence before the read: an offset in an earlier writer's open transaction cannot be read.
        self._transactions.open()
        try:
            at = _committed(self._consumer, TopicPartition(self._topic, 0), SETTLE_S)
        except KafkaException as error:
            needs = _right(error.args[0], self._name, self._topic)
            raise journal_error(error, f"{self._name}: cannot read its progress", needs) from None
        mark = _mark(self._name, at)
        return mark.rows if mark is not None else 0

    def send(self, rows: Iterable[tuple[str | None, bytes, Headers]], rows_in: int) -> None:
        """Write the next rows, after which `rows_in` are in. On RecoveryRequired, all or none were written."""
        at = TopicPartition(self._topic, 0, rows_in, metadata=self._mark)
        needs = f"Read and Write on topic {self._topic}"
        self._transactions.begin()
        try:
            for key, value, headers in rows:
                self._transactions.send(
                    self._topic, value, key, -1, self._report, headers or None, needs=needs
                )
            self._transactions.send_offsets(at, self._consumer.consumer_group_metadata(), needs)
            self._transactions.commit(needs)  # flushes first
        except KafkaException as error:
            raise journal_error(error, f"{self._name}: cannot write the rows") from None
        except RecoveryRequired as reason:
            if self._failed is None:
                raise
            why = explained(self._failed, f"Write on topic {self._topic}")
            raise type(reason)(f"{reason} ({why})") from None

    def close(self) -> None:
        """Drop queued records; an open transaction is settled by the next writer that opens the piece."""
        self._consumer.close()
        self._transactions.close()

    def _report(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failed = error
