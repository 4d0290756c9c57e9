"""Parsing of receipts from a receipts topic, to which others may have written as well."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from confluent_kafka import Message

from blackbox.journal.message_conversion import read_headers
from blackbox.journal.polled_messages import offset_of
from blackbox.journal.topics import RECEIPTS_SUFFIX
from blackbox.records.errors import RecoveryRequired
from blackbox.records.receipt import NotAReceipt, Receipt, decode
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.journal")

# Every message and dead letter has such headers, and a receipt has none: no caller can forge a
# receipt by requesting a message to the topic.
OUR_HEADERS = "blackbox-"


def read_receipts(messages: Iterable[Message]) -> Iterator[tuple[int, Receipt]]:
    """The receipts of one partition, with their offsets; records that its owners did not write are skipped.

    Raises RecoveryRequired for a receipt of another version.
    """
    foreign: list[Message] = []
    for message in messages:
        try:
            yield offset_of(message), _receipt(message)
        except NotAReceipt:
            foreign.append(message)
        except ValueError as error:  # another version, which this one must not ignore
            raise RecoveryRequired(f"{_place(message)}: {error}") from None
    if foreign:
        logger.error(
            "%s: skipping a record that is not a receipt, and %d more after it; only blackbox may "
            "write to this topic: check which users have the Write permission", _place(foreign[0]), len(foreign) - 1,
        )  # fmt: skip


def _receipt(message: Message) -> Receipt:
    topic, partition = message.topic() or "", message.partition()
    shard = Shard(topic.removesuffix(RECEIPTS_SUFFIX), -1 if partition is None else partition)
    if message.key() != str(shard).encode():
        raise NotAReceipt(f"its key is {message.key()!r}")
    [headers], unreadable = read_headers([message])
    if unreadable or any(header[0].startswith(OUR_HEADERS) for header in headers):
        raise NotAReceipt("it is a delivered message")
    return decode(message.value())


def _place(message: Message) -> str:
    return f"{message.topic()}/{message.partition()}@{message.offset()}"
