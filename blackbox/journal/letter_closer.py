"""Marks dead letters as replayed or discarded, and writes the replayed records."""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka import KafkaError, KafkaException, Message

from blackbox.journal.dead_letter_topic import HEADER, ReplayRecord
from blackbox.journal.kafka_access import KafkaAccess, journal_error
from blackbox.journal.transactions import Transactions
from blackbox.records.errors import JournalLost
from blackbox.records.request import Headers, placed


class LetterCloser:
    """Closes letters of one topic, in transactions under its own transactional id.

    Of two concurrent ones, only the one that was opened last can write: letters that it reads as open
    behind `open`, and behind all transactions that are open then, are closed by nobody else. Unusable
    after its first RecoveryRequired. Not safe for use from two threads at once.
    """

    def __init__(self, access: KafkaAccess, topic: str) -> None:
        self._topic = topic
        name = access.transactional_id("letters")
        self._transactions = Transactions(access, name, f"{topic}: letters")

    def open(self) -> None:
        """Fence every earlier closer: the marks that it was writing are now readable, or aborted."""
        self._transactions.open()

    def write(self, letters: Mapping[str, ReplayRecord | None]) -> None:
        """Mark the letters at these places as replayed or, without a record, as discarded; write the records.

        In one transaction. Raises RecoveryRequired when nothing was written, or the outcome is unknown.
        """
        self._transactions.begin()
        self._produce(letters)
        self._transactions.commit(f"Write on topic {self._topic}")

    def close(self) -> None:
        self._transactions.close()

    def _produce(self, letters: Mapping[str, ReplayRecord | None]) -> None:
        failed: list[tuple[str | None, KafkaError]] = []

        def report(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failed.append((message.topic(), error))

        try:
            for place, replay in letters.items():
                if replay is not None:
                    there, partition = replay.shard
                    self._transactions.send(
                        there, replay.value, replay.key, partition, report, replay.headers
                    )
                closing = "discarded" if replay is None else "replayed"
                letter_place = placed(place)
                assert letter_place is not None
                assert letter_place[0].topic == self._topic
                mark: Headers = [(HEADER, f"{closing} {place}".encode())]
                self._transactions.send(
                    self._topic, None, None, letter_place[0].partition, report, mark
                )
        except KafkaException as error:
            self._transactions.abort()
            raise JournalLost(f"nothing was written: {error}") from None
        left = self._transactions.flush()
        if failed:
            where, cause = failed[0]
            self._transactions.abort()
            raise journal_error(
                KafkaException(cause), "nothing was written", f"Write on topic {where}"
            )
        if left:
            raise JournalLost(f"{left} records were not acknowledged; nothing was written")
