"""The errors of a transactional producer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from blackbox.journal.transactions import Transactions
from blackbox.records.errors import Fenced, JournalLost, RecoveryRequired


def transactions(flush: Exception, begin: Exception | None = None) -> Transactions:
    """Transactions with a producer that answers like this."""

    def raises(error: Exception | None) -> Any:
        def call(*_: object) -> None:
            if error is not None:
                raise error

        return call

    producer = SimpleNamespace(flush=raises(flush), begin_transaction=raises(begin))
    access: Any = SimpleNamespace(producer=lambda id, in_flight: producer)
    return Transactions(access, "blackbox/TB-0", "TB-0")


LOST = SystemError(
    "<method 'flush' of 'cimpl.Producer' objects> returned NULL without setting an exception"
)


def test_a_fenced_producer_raises_fenced_even_if_the_client_lost_the_error() -> None:
    fenced = KafkaException(
        KafkaError(KafkaError._FENCED, "fenced by a newer instance", fatal=True)
    )

    with pytest.raises(Fenced, match="TB-0: cannot flush: fenced by a newer instance"):
        transactions(LOST, fenced).flush()


@pytest.mark.parametrize(
    "begin", [None, KafkaException(KafkaError(KafkaError._STATE, "in a transaction"))]
)
def test_an_unexplained_producer_error_requires_recovery(begin: Exception | None) -> None:
    with pytest.raises(JournalLost) as told:
        transactions(LOST, begin).flush()

    assert isinstance(told.value, RecoveryRequired)
    assert "in a transaction" not in str(told.value)
