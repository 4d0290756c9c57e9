"""A transactional producer, from fencing its predecessors to a commit with a known outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from blackbox.journal.kafka_access import KafkaAccess, journal_error, produce
from blackbox.records.errors import RecoveryRequired

OPEN_ATTEMPTS = 5
OPEN_ATTEMPT_S = 6.0
SETTLE_S = 20.0  # transaction.timeout.ms; the coordinator then aborts within 10 s


class Transactions:
    """One producer under one `transactional.id`; unusable after its first RecoveryRequired.

    Without an id it can only flush and be closed. `what` is the prefix of its error messages;
    `in_flight` is KafkaAccess.producer's. Not safe for use from two threads at once.
    """

    def __init__(
        self, access: KafkaAccess, transactional_id: str | None, what: str, *, in_flight: int = 1
    ) -> None:
        self._what = what
        self._needs = f"Write on transactional-id {transactional_id}"
        self.producer: Producer = access.producer(transactional_id, in_flight=in_flight)

    def open(self) -> None:
        """Fence every earlier producer of this id and settle its open transaction.

        Raises JournalLost when the brokers do not complete it in 5 attempts of 6 s.
        """
        for attempt in range(1, OPEN_ATTEMPTS + 1):
            try:
                self.producer.init_transactions(OPEN_ATTEMPT_S)
                return
            except KafkaException as error:
                if attempt == OPEN_ATTEMPTS or not error.args[0].retriable():
                    what = f"{self._what}: cannot open the transactional id"
                    raise journal_error(error, what, self._needs) from None

    def begin(self) -> None:
        try:
            self.producer.begin_transaction()
        except KafkaException as error:
            raise journal_error(error, f"{self._what}: cannot begin a transaction") from None

    def send(self, *record: Any, needs: str = "", **more: Any) -> None:
        """Queue a record, as `produce` does. Raises RecoveryRequired if the transaction has already failed."""
        try:
            produce(self.producer, *record, **more)
        except KafkaException as error:
            if error.args[0].code() == KafkaError._STATE:
                self.commit(needs)  # raises the cause
            raise

    def flush(self, within_s: float | None = None) -> int:
        """Wait until the brokers have every record, by default 20 s; returns how many they do not have."""
        try:
            return self.producer.flush(SETTLE_S if within_s is None else within_s)
        except (KafkaException, SystemError) as error:
            raise self._explained(error, "cannot flush") from None

    def send_offsets(self, at: TopicPartition, whose: Any, needs: str = "") -> None:
        """Add this offset of a consumer group to the transaction."""

        def send(left_s: float) -> None:
            try:
                self.producer.send_offsets_to_transaction([at], whose, left_s)
            except KafkaException as error:
                if error.args[0].code() != KafkaError._STATE:
                    raise
                self.producer.commit_transaction(left_s)  # it has failed; this raises the cause

        self._patiently(send, needs)

    def commit(self, needs: str = "") -> None:
        """Flush and commit. Retries for about 20 s; then the outcome is unknown: JournalLost.

        `needs` is the right that records need that were not flushed before.
        """
        self._patiently(self.producer.commit_transaction, needs)

    def abort(self) -> None:
        try:
            self.producer.abort_transaction(SETTLE_S)
        except KafkaException as error:
            raise journal_error(error, f"{self._what}: cannot abort") from None

    def close(self) -> None:
        """Drop queued records; an open transaction is settled by the next producer that opens the id."""
        self.producer.purge()
        with suppress(KafkaException, SystemError):  # a fenced producer raises again
            self.producer.flush(0)
        del self.producer  # its threads and sockets end with the last reference

    def _patiently(self, call: Callable[[float], object], needs: str = "") -> None:
        deadline = time.monotonic() + SETTLE_S
        while True:
            try:
                call(SETTLE_S / 4)
                return
            except (KafkaException, SystemError) as error:
                # A commit that timed out is repeated, not aborted: its outcome is unknown.
                is_passing = isinstance(error, KafkaException) and error.args[0].retriable()
                # Without KIP-890 in librdkafka, a producer that is used again after this could lose
                # or tear a later transaction.
                if not is_passing or time.monotonic() > deadline:
                    raise self._explained(error, "the commit's outcome is unknown", needs) from None

    def _explained(self, error: Exception, what: str, needs: str = "") -> RecoveryRequired:
        # A SystemError, raised while delivery reports are served, has the KafkaException as its
        # cause, or none: then the client has lost the error, and the next call repeats a fatal one.
        cause = error if isinstance(error, KafkaException) else error.__cause__
        if not isinstance(cause, KafkaException):
            cause = self._fatal() or KafkaException(KafkaError(KafkaError._FATAL))
        return journal_error(cause, f"{self._what}: {what}", needs)

    def _fatal(self) -> KafkaException | None:
        """The fatal error of this producer, if any."""
        try:
            self.producer.begin_transaction()
        except KafkaException as error:
            return error if error.args[0].fatal() else None
        return None
