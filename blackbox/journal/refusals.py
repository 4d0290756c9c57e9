"""Errors of a producer: which of them refuse one record, and which concern the whole batch."""

from __future__ import annotations

from confluent_kafka import KafkaError

from blackbox.records.request import Reason

# Errors that concern one record or its topic.
REASONS_BY_ERROR = {
    KafkaError.MSG_SIZE_TOO_LARGE: Reason.TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE: Reason.TOO_LARGE,
    KafkaError.TOPIC_AUTHORIZATION_FAILED: Reason.NOT_AUTHORIZED,
    KafkaError._UNKNOWN_TOPIC: Reason.UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION: Reason.UNKNOWN_TOPIC,
    KafkaError.UNKNOWN_TOPIC_OR_PART: Reason.UNKNOWN_TOPIC,
    KafkaError._MSG_TIMED_OUT: Reason.UNREACHABLE,
    KafkaError.INVALID_RECORD: Reason.REFUSED,
    KafkaError.INVALID_TIMESTAMP: Reason.REFUSED,
    KafkaError.INVALID_MSG: Reason.REFUSED,
    KafkaError.POLICY_VIOLATION: Reason.REFUSED,
    KafkaError._INCONSISTENT: Reason.REFUSED,
}

# Broker errors that concern the producer, and so the whole batch.
ERRORS_OF_THE_PRODUCER = {
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
    KafkaError.DUPLICATE_SEQUENCE_NUMBER,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_TXN_STATE,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.CONCURRENT_TRANSACTIONS,
    KafkaError.TRANSACTION_COORDINATOR_FENCED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.UNKNOWN_PRODUCER_ID,
    KafkaError.PRODUCER_FENCED,
}


def reason_of(error: KafkaError) -> Reason | None:
    """Why this record was refused; None for an error that concerns the batch."""
    code = error.code()
    # UNKNOWN is -1; librdkafka's own errors are below it.
    is_an_answer = code == KafkaError.UNKNOWN or code > KafkaError.NO_ERROR
    # A broker error that is in neither table counts against the record: if it counted against the
    # batch, one caller's record that the broker never accepts would stop the shard.
    if is_an_answer and code not in ERRORS_OF_THE_PRODUCER and not error.fatal():
        return REASONS_BY_ERROR.get(code, Reason.BROKER_ERROR)
    return REASONS_BY_ERROR.get(code)
