"""Records written one after the other, without a transaction; all of them acknowledged, or an error."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException, Message

from blackbox.doubt import JournalLost, NotAllowed
from blackbox.journal.access import KafkaAccess, doubt, produce
from blackbox.request import Headers

FLUSH_S = 30.0


class Bulk:
    """Not safe for use from two threads at once."""

    def __init__(self, access: KafkaAccess) -> None:
        self._producer = access.producer(None)
        self._failed: KafkaError | None = None
        self._needs = ""

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: Headers,
        partition: int = -1,
    ) -> None:
        """Queue a record; by its key unless a partition is given. Raises a Doubt when the client does not take it."""
        self._needs = f"Write on topic {topic}"
        try:
            produce(self._producer, topic, value, key, partition, self._report, headers)
        except KafkaException as error:
            if error.args[0].code() == KafkaError._FATAL:
                self.flush()  # says why
            raise doubt(error, f"cannot write to {topic}", self._needs) from None

    def flush(self) -> None:
        """Wait until Kafka has all of them. Raises a Doubt when it has not, or that is not known."""
        try:
            left = self._producer.flush(FLUSH_S)
        except (KafkaException, SystemError) as error:
            # a fatal error that comes while reports are served has the other as its cause
            cause = error if isinstance(error, KafkaException) else error.__cause__
            if not isinstance(cause, KafkaException):
                raise
            self._failed, left = cause.args[0], 0
        if self._failed is not None:
            what = "not all records were written"
            if self._failed.code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED:  # to write at all
                raise NotAllowed(f"{what}: {self._failed.str()}; grant {self._needs}")
            raise doubt(KafkaException(self._failed), what, self._needs)
        if left:
            raise JournalLost(f"{left} records were not acknowledged within {FLUSH_S:g} s")

    def close(self) -> None:
        self._producer.purge()

    def _report(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failed = error
        elif message.offset() is None:
            self._failed = KafkaError(KafkaError._MSG_TIMED_OUT, "acknowledged without an offset")
