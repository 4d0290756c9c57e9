"""Writes a shard's messages and the receipt that says where they went, in one transaction."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError, KafkaException, Message

from blackbox.journal.kafka_access import (
    KafkaAccess,
    explained,
    is_not_allowed,
    journal_error,
    produce,
)
from blackbox.journal.refusals import REASONS_BY_ERROR, reason_of
from blackbox.journal.topics import receipts_topic
from blackbox.journal.transactions import SETTLE_S, Transactions
from blackbox.records.errors import JournalLost, NotInTime, RecoveryRequired, Refused, TooEarly
from blackbox.records.outgoing import Outgoing, Refusal
from blackbox.records.receipt import Places, Receipt, encode
from blackbox.records.request import Reason, Shard

_RECEIPT = -1  # stands for the receipt itself in place of a request's offset

# How far a receipt's timestamp may precede a due time: messages are readable only after the commit.
TIMESTAMP_TOLERANCE_MS = 10

LOOK_S, SPOILED_LOOK_S = 1.0, 0.05
# The most that idempotence allows. More than 1 is safe: every report is checked for its offset.
IN_FLIGHT = 5


class ShardWriter:
    """The one producer of a shard's owner; unusable after its first RecoveryRequired.

    With `exactly_once`, `begin` to `commit` is one Kafka transaction under the shard's own
    `transactional.id`: opening it fences every earlier owner. Without, the writer waits for the
    messages, then for the receipt. `on_timestamp` is called with each receipt's broker timestamp (epoch
    ms; None: the broker sets none) and the monotonic time at which it was sent (s). Not safe for use
    from two threads at once.
    """

    def __init__(
        self,
        shard: Shard,
        access: KafkaAccess,
        *,
        exactly_once: bool,
        on_timestamp: Callable[[int | None, float], None] = lambda at_ms, sent_s: None,
    ) -> None:
        self._shard = shard
        self._on_timestamp = on_timestamp
        self._receipt_ms: int | None = None
        self._exactly_once = exactly_once
        self._receipts = receipts_topic(shard.topic)
        transactional_id = access.transactional_id(str(shard)) if exactly_once else None
        self._transactions = Transactions(access, transactional_id, str(shard), in_flight=IN_FLIGHT)
        self._failed: dict[int, KafkaError] = {}
        self._lacks: dict[int, str] = {}
        self.crowded: set[str] = set()
        """The topics in which a record batch was too large, since `begin`."""
        self._unplaced = 0
        self._is_cut_short = False
        self._last = -1
        self._is_closed = False

    @property
    def exactly_once(self) -> bool:
        return self._exactly_once

    def open(self) -> None:
        """Fence every earlier owner and settle its open transaction, as `Transactions.open` does."""
        if self._exactly_once:
            self._transactions.open()

    def begin(self) -> None:
        self._failed, self._lacks, self.crowded = {}, {}, set()
        self._unplaced, self._is_cut_short = 0, False
        if self._exactly_once:
            self._transactions.begin()

    def send(self, outgoing: Outgoing, places: Places) -> Refusal | None:
        """Queue a record; `places` gets its location once the broker has it.

        Returns the reason if the client refuses it at once; it is then not in the transaction.
        """
        offset, topic, key, value, headers, partition = outgoing
        report = partial(self._report, offset, places)
        try:
            produce(self._transactions.producer, topic, value, key, partition, report, headers)
        except KafkaException as error:
            cause = error.args[0]
            if self._exactly_once and cause.code() == KafkaError._STATE and not cause.fatal():
                self._is_cut_short = True
                return None  # an earlier record was refused; `flush` reports it
            # The client refuses some records itself, such as too large ones: the rest can commit.
            if cause.fatal() or cause.code() not in REASONS_BY_ERROR:
                raise journal_error(error, f"{self._shard}: cannot produce") from None
            return REASONS_BY_ERROR[cause.code()], f"{topic}: {cause.str()}"
        return None

    def flush(self, hopeless: Callable[[], dict[int, Refusal]] = dict) -> dict[int, Refusal]:
        """Wait until the brokers have every record; returns those that they refused.

        With `exactly_once` a refusal aborts the transaction and raises Refused instead. So does a
        non-empty result of `hopeless`, which is called every second.
        """
        left = self._flush_unless(hopeless)
        if left and not self._is_spoiled:
            raise NotInTime(
                f"{self._shard}: {left} records were not acknowledged within {SETTLE_S} s"
            )
        self._check_places()
        if not self._failed and not self._is_cut_short:
            return {}
        suspects: dict[int, Refusal] = {
            offset: (reason, explained(error, self._lacks.get(offset, "")))
            for offset, error in self._failed.items()
            if (reason := reason_of(error)) is not None
        }
        others = [error for error in self._failed.values() if reason_of(error) is None]
        if not self._failed:
            raise JournalLost(f"{self._shard}: cannot produce: the transaction has failed")
        # In a transaction, a refusal fails the records behind it; else each error is its own.
        if others and (not suspects or not self._exactly_once):
            is_purged = KafkaError._PURGE_QUEUE in {error.code() for error in others}
            if is_purged and self._exactly_once:  # commit raises the cause
                self._transactions.commit(" or ".join(sorted(set(self._lacks.values()))))
            raise journal_error(KafkaException(others[0]), f"{self._shard}: cannot produce")
        if self._exactly_once:
            self._transactions.abort()
            codes = {error.code() for error in self._failed.values()}
            raise Refused(suspects, is_timeout=KafkaError._MSG_TIMED_OUT in codes)
        return suspects

    @property
    def _is_spoiled(self) -> bool:
        """Whether the transaction can only be aborted."""
        refused = (reason_of(error) is not None for error in self._failed.values())
        return self._exactly_once and any(refused)

    def _flush_unless(self, hopeless: Callable[[], dict[int, Refusal]]) -> int:
        """Returns how many records the brokers lack."""
        began = asked_s = time.monotonic()
        while left := self._transactions.flush(SPOILED_LOOK_S):
            now = time.monotonic()
            # After a refusal the client sends no more of the transaction, and waits for 15 s.
            if self._is_spoiled or now > began + SETTLE_S:
                break
            # The client itself gives a record up only after 15 s (message.timeout.ms).
            if self._exactly_once and now - asked_s >= LOOK_S:
                asked_s = now
                if given_up := hopeless():
                    self._transactions.abort()
                    raise Refused(given_up)
        return left

    def abort(self) -> None:
        """Abort what was sent since `begin`; does nothing without `exactly_once`."""
        if self._exactly_once:
            self._transactions.abort()

    def end(self) -> None:
        """Commit without a receipt, for a shard without a receipts partition; retries as `commit` does."""
        if self._exactly_once:
            self._transactions.commit()

    def commit(self, receipt: Receipt, not_before_ms: int = 0) -> int:
        """Write the receipt into the transaction of the messages, and commit both.

        Returns the receipts position, the offset of the receipt + 1.

        A commit that times out is retried for about 20 s; then its outcome is unknown: JournalLost.
        Raises RecoveryRequired when another writer has written receipts since this owner's last one.
        With `exactly_once`, aborts and raises TooEarly when the broker stamped the receipt earlier than
        `not_before_ms`.
        """
        places: Places = {}
        self._produce_receipt(receipt, places)
        needs = f"Write on topic {self._receipts}"
        # Flush first: the receipt's offset and timestamp are checked while an abort is possible.
        self._transactions.flush()
        if self._exactly_once:
            if not places:  # before the commit: without a receipt, the messages must be taken back
                self._check_places()
            elif (
                self._receipt_ms is not None
                and self._receipt_ms + TIMESTAMP_TOLERANCE_MS < not_before_ms
            ):
                [[(_, offset)]] = places.values()
                # The aborted receipt and its marker take offsets: the next receipt follows these.
                self._check_alone(offset, is_first=receipt.barrier)
                self._transactions.abort()
                raise TooEarly(
                    f"{self._shard}: Kafka's clock is {not_before_ms - self._receipt_ms} ms behind "
                    "the due time of the messages to deliver, possibly because it was set back; "
                    "waiting for it"
                )
            self._transactions.commit(needs)
        if not places:
            self._check_places()
            what = f"{self._shard}: the receipt was not acknowledged"
            if _RECEIPT not in self._failed:
                raise NotInTime(f"{what} within {SETTLE_S} s")
            raise journal_error(KafkaException(self._failed[_RECEIPT]), what, needs)
        [[(_, offset)]] = places.values()
        self._check_alone(offset, is_first=receipt.barrier)
        return offset + 1

    def close(self) -> None:
        """Drop queued records; an open transaction is settled by the next owner."""
        if not self._is_closed:
            self._is_closed = True
            self._transactions.close()

    def _produce_receipt(self, receipt: Receipt, places: Places) -> None:
        value, key, partition = encode(receipt), str(self._shard), self._shard.partition
        sent_s = time.monotonic()
        self._receipt_ms = None

        def report(error: KafkaError | None, message: Message) -> None:
            kind, at_ms = message.timestamp()
            if error is None and message.offset() is not None:
                self._receipt_ms = at_ms if kind == TIMESTAMP_LOG_APPEND_TIME else None
                self._on_timestamp(self._receipt_ms, sent_s)
            self._report(_RECEIPT, places, error, message)

        try:
            produce(self._transactions.producer, self._receipts, value, key, partition, report)
        except KafkaException as error:
            raise JournalLost(f"{self._shard}: cannot produce the receipt: {error}") from None

    def _check_alone(self, offset: int, *, is_first: bool) -> None:
        """Check that this receipt follows the owner's last one, a transaction marker apart."""
        # A transactional.id does not fence owners of another group. Recovery reads their receipts.
        before, self._last = self._last, offset
        apart = 2 if self._exactly_once else 1
        if before >= 0 and offset != before + apart and not is_first:
            raise RecoveryRequired(
                f"{self._shard}: the receipts {before + apart} to {offset - 1} are not of this "
                "owner; another group may be delivering from this topic"
            )

    def _check_places(self) -> None:
        if self._unplaced:
            raise JournalLost(
                f"{self._shard}: {self._unplaced} records were acknowledged without an offset and "
                "may not have been written"
            )

    def _report(
        self, offset: int, places: Places, error: KafkaError | None, message: Message
    ) -> None:
        if error is not None:
            known = self._failed.get(offset)
            if reason_of(error) is Reason.TOO_LARGE:
                self.crowded.add(message.topic() or "")
            if known is None or reason_of(known) is None:  # of several errors, the one at fault
                self._failed[offset] = error
            if is_not_allowed(error) or error.code() == KafkaError._PURGE_QUEUE:
                self._lacks[offset] = f"Write on topic {message.topic()}"
            return
        at = f"{message.topic()}/{message.partition()}"
        there = message.offset()
        if there is None:  # the broker may have refused it: see KafkaAccess.producer
            self._unplaced += 1
        elif at in places:
            places[at].append((offset, there))
        else:
            places[at] = [(offset, there)]
