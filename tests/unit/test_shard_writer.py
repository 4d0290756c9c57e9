from __future__ import annotations

from contextlib import closing

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from blackbox.journal import shard_writer as writer_module
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.shard_writer import ShardWriter
from blackbox.records.errors import JournalLost, Refused, TooEarly
from blackbox.records.outgoing import Outgoing, Refusal
from blackbox.records.receipt import Places, Receipt
from blackbox.records.request import Reason, Shard
from tests.servers.mock_cluster import PRODUCE, mock_cluster

NOWHERE = KafkaAccess("127.0.0.1:1", "unit", {"log_level": "0"})


@pytest.fixture
def writer() -> ShardWriter:
    return ShardWriter(Shard("TB", 0), NOWHERE, exactly_once=False)


def fail(writer: ShardWriter, offset: int, code: int) -> None:
    """Report to the writer that the broker refused a record, as the client does."""
    writer._report(offset, {}, KafkaError(code), Message(topic="orders", partition=0))


def test_a_record_that_is_too_large_is_a_suspect(writer: ShardWriter) -> None:
    fail(writer, 7, KafkaError.MSG_SIZE_TOO_LARGE)

    assert writer.flush()[7][0] == Reason.TOO_LARGE


def test_after_a_refusal_the_topics_whose_record_batches_were_too_large_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = ShardWriter(Shard("TB", 0), NOWHERE, exactly_once=True)
    monkeypatch.setattr(writer, "_flush_unless", lambda _: 0)
    monkeypatch.setattr(writer._transactions, "abort", lambda: None)
    fail(writer, 7, KafkaError.MSG_SIZE_TOO_LARGE)
    fail(writer, 8, KafkaError._PURGE_QUEUE)

    with pytest.raises(Refused):
        writer.flush()

    assert writer.crowded == {"orders"}


def test_at_least_once_an_abort_does_nothing(writer: ShardWriter) -> None:
    writer.begin()
    writer.abort()


def test_at_least_once_a_producer_failure_requires_recovery_despite_a_suspect(
    writer: ShardWriter,
) -> None:
    fail(writer, 7, KafkaError.MSG_SIZE_TOO_LARGE)
    fail(writer, 8, KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER)

    with pytest.raises(JournalLost, match="TB-0"):
        writer.flush()


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.UNKNOWN, KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT, KafkaError.INVALID_REQUEST,
        KafkaError.UNSUPPORTED_COMPRESSION_TYPE, 4711,
    ],
)  # fmt: skip
def test_an_unknown_broker_error_is_attributed_to_the_record(
    writer: ShardWriter, code: int
) -> None:
    fail(writer, 8, code)

    assert writer.flush()[8][0] == Reason.BROKER_ERROR


@pytest.mark.parametrize("exactly_once", [True, False])
@pytest.mark.parametrize("code", [KafkaError.UNKNOWN, KafkaError.INVALID_REQUEST, 4711])
def test_the_record_that_a_broker_refuses_for_an_unknown_reason_is_isolated(
    exactly_once: bool, code: int
) -> None:
    with mock_cluster() as cluster:
        access = KafkaAccess(cluster.bootstrap_servers, "unit", {"log_level": "0"})
        with closing(ShardWriter(Shard("TB", 0), access, exactly_once=exactly_once)) as writer:
            writer.open()
            writer.begin()
            writer.send(Outgoing(7, "TB", None, b"fine", []), {})
            assert writer.flush() == {}
            cluster.answer(PRODUCE, code)
            writer.send(Outgoing(8, "TB", None, b"odd", []), {})
            try:
                refused = writer.flush()
            except Refused as aborted:
                assert exactly_once
                refused = dict(aborted.suspects)

    assert {offset: reason for offset, (reason, _) in refused.items()} == {8: Reason.BROKER_ERROR}


@pytest.fixture
def transactional(monkeypatch: pytest.MonkeyPatch) -> ShardWriter:
    """A writer with a refused record, so that the client sends nothing more of the transaction."""
    writer = ShardWriter(Shard("TB", 0), NOWHERE, exactly_once=True)
    monkeypatch.setattr(writer._transactions, "flush", lambda within_s=None: 5)
    monkeypatch.setattr(writer._transactions, "abort", lambda: None)

    def produce(*_: object) -> None:
        raise KafkaException(KafkaError(KafkaError._STATE))

    monkeypatch.setattr(writer_module, "produce", produce)
    return writer


def test_a_flush_after_a_refusal_names_only_the_refused_record(
    transactional: ShardWriter,
) -> None:
    fail(transactional, 7, KafkaError.MSG_SIZE_TOO_LARGE)

    assert transactional.send(Outgoing(8, "orders", None, b"hello", []), {}) is None
    with pytest.raises(Refused) as refused:
        transactional.flush()
    assert refused.value.suspects.keys() == {7}


def test_a_record_that_stays_unsent_without_a_reason_requires_recovery(
    transactional: ShardWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactional._transactions, "flush", lambda within_s=None: 0)
    transactional.send(Outgoing(8, "orders", None, b"hello", []), {})

    with pytest.raises(JournalLost, match="the transaction has failed"):
        transactional.flush()


class SilentBrokers:
    """Brokers that acknowledge nothing, for a transaction whose flushes take as long as they may."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.is_aborted = False

    def monotonic(self) -> float:
        return self.now_s

    def flush(self, within_s: float) -> int:
        self.now_s += within_s
        return 3

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> SilentBrokers:
    silent = SilentBrokers()
    monkeypatch.setattr(writer_module, "time", silent)
    return silent


def waiting_writer(
    silent: SilentBrokers, monkeypatch: pytest.MonkeyPatch, *, exactly_once: bool
) -> ShardWriter:
    writer = ShardWriter(Shard("TB", 0), NOWHERE, exactly_once=exactly_once)
    monkeypatch.setattr(writer._transactions, "flush", silent.flush)
    monkeypatch.setattr(writer._transactions, "abort", silent.abort)
    return writer


def test_a_transaction_ends_within_a_second_of_the_loss_of_a_target(
    silent: SilentBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = waiting_writer(silent, monkeypatch, exactly_once=True)
    lost_s = silent.now_s + 3
    gone: dict[int, Refusal] = {7: (Reason.UNKNOWN_TOPIC, "the topic does not exist")}

    with pytest.raises(Refused) as refused:
        writer.flush(lambda: gone if silent.now_s > lost_s else {})

    assert refused.value.suspects == gone
    assert silent.is_aborted
    assert silent.now_s - lost_s < writer_module.LOOK_S + 2 * writer_module.SPOILED_LOOK_S


def test_a_flush_looks_once_a_second_for_lost_targets(
    silent: SilentBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = waiting_writer(silent, monkeypatch, exactly_once=True)
    looks: list[float] = []

    def hopeless() -> dict[int, Refusal]:
        looks.append(silent.now_s)
        return {}

    with pytest.raises(JournalLost, match=r"3 records were not acknowledged within 20\.0 s"):
        writer.flush(hopeless)

    assert 17 <= len(looks) <= 20


def test_a_record_acknowledged_without_an_offset_requires_recovery(
    writer: ShardWriter,
) -> None:
    writer._report(7, {}, None, Message(topic="orders", partition=0))

    with pytest.raises(JournalLost, match="acknowledged without an offset"):
        writer.flush()


@pytest.mark.parametrize(
    ("is_told", "why"),
    [(True, "acknowledged without an offset"), (False, "was not acknowledged within")],
)
def test_a_receipt_without_an_offset_requires_recovery_with_a_reason(
    writer: ShardWriter, monkeypatch: pytest.MonkeyPatch, is_told: bool, why: str
) -> None:
    monkeypatch.setattr("blackbox.journal.transactions.SETTLE_S", 0.01)
    if is_told:
        writer._report(-1, {}, None, Message(topic="TB.receipts", partition=0))
    with pytest.raises(JournalLost, match=why):
        writer.commit(Receipt(at_ms=0))


def test_no_transaction_commits_without_the_offset_of_its_receipt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer, steps = ShardWriter(Shard("TB", 0), NOWHERE, exactly_once=True), list[str]()

    def acknowledged_without_an_offset() -> int:
        writer._report(-1, {}, None, Message(topic="TB.receipts", partition=0))
        return 0

    monkeypatch.setattr(writer, "_produce_receipt", lambda receipt, places: None)
    monkeypatch.setattr(writer._transactions, "flush", acknowledged_without_an_offset)
    monkeypatch.setattr(writer._transactions, "commit", steps.append)

    with pytest.raises(JournalLost, match="acknowledged without an offset"):
        writer.commit(Receipt(at_ms=0))

    assert steps == []


@pytest.mark.parametrize(
    ("stamped_ms", "due_ms", "is_early"),
    [(1000, 1000, False), (1000, 1010, False), (1000, 1011, True), (1000, 0, False), (None, 9000, False)],
)  # fmt: skip
def test_a_transaction_too_early_for_the_kafka_clock_is_aborted(
    monkeypatch: pytest.MonkeyPatch, stamped_ms: int | None, due_ms: int, is_early: bool
) -> None:
    writer, steps = ShardWriter(Shard("TB", 0), NOWHERE, exactly_once=True), list[str]()
    receipts = iter((7, 9))

    def produced(receipt: Receipt, places: Places) -> None:
        writer._receipt_ms = stamped_ms
        places["TB.receipts/0"] = [(-1, next(receipts))]

    monkeypatch.setattr(writer, "_produce_receipt", produced)
    monkeypatch.setattr(writer._transactions, "flush", lambda: 0)
    monkeypatch.setattr(writer._transactions, "commit", lambda needs: steps.append("commit"))
    monkeypatch.setattr(writer._transactions, "abort", lambda: steps.append("abort"))

    if is_early:
        with pytest.raises(TooEarly, match=f"is {due_ms - 1000} ms behind the due time"):
            writer.commit(Receipt(at_ms=0), due_ms)
    else:
        writer.commit(Receipt(at_ms=0), due_ms)
    writer.commit(Receipt(at_ms=0))

    assert steps == ["abort" if is_early else "commit", "commit"]


def test_all_owners_of_a_shard_have_the_same_transactional_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str | None] = []
    make = KafkaAccess.producer

    def producer(access: KafkaAccess, transactional_id: str | None, **more: int) -> Producer:
        asked.append(transactional_id)
        return make(access, transactional_id, **more)

    monkeypatch.setattr(KafkaAccess, "producer", producer)
    ShardWriter(Shard("TB", 3), NOWHERE, exactly_once=True).close()
    ShardWriter(Shard("TB", 3), NOWHERE, exactly_once=False).close()
    assert asked == ["unit/TB-3", None]


def test_closing_twice_is_harmless(writer: ShardWriter) -> None:
    writer.close()
    writer.close()
