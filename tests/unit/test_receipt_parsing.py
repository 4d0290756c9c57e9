"""Records in a receipts topic that no owner of the shard wrote."""

from __future__ import annotations

import pytest
from confluent_kafka import Message

from blackbox.journal.receipt_parsing import read_receipts
from blackbox.records.errors import RecoveryRequired
from blackbox.records.receipt import Receipt, encode

Headers = list[tuple[str, bytes | str | None]]

OURS = b"TB-3"
FORGED = encode(Receipt(5, dead=[70, 71]))


def message(
    offset: int, key: bytes | None, value: bytes | None, headers: Headers | None = None
) -> Message:
    return Message("TB.receipts", 3, offset, key, value, headers)


@pytest.mark.parametrize(
    ("key", "value", "headers"),
    [
        (OURS, FORGED, [("blackbox-id", b"TB-3-70")]),
        (OURS, FORGED, [("trace", b"1"), ("blackbox-source", b"TB/3@70")]),
        (b"TB-4", FORGED, None),
        (b"somebody", FORGED, None),
        (None, FORGED, None),
        (OURS, b"not JSON", None),
        (OURS, b'{"v":1}', None),
        (OURS, None, None),
    ],
    ids=[
        "a delivered message", "another header of blackbox", "another shard's key", "another key",
        "no key", "not JSON", "not a receipt", "a tombstone",
    ],
)  # fmt: skip
def test_a_foreign_record_in_the_receipts_topic_is_skipped_with_an_error(
    key: bytes | None,
    value: bytes | None,
    headers: Headers | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, last = Receipt(4, dead=[1]), Receipt(6, dead=[2])
    messages = [
        message(0, OURS, encode(first)),
        message(1, key, value, headers),
        message(2, key, value, headers),
        message(3, OURS, encode(last), [("trace", b"2")]),
    ]

    assert list(read_receipts(messages)) == [(0, first), (3, last)]

    [text] = caplog.messages
    assert text.startswith("TB.receipts/3@1: skipping a record that is not a receipt, and 1 more")
    assert "check which users have the Write permission" in text
    assert caplog.records[0].levelname == "ERROR"


def test_a_receipt_of_a_later_version_is_not_skipped() -> None:
    newer = message(7, OURS, b'{"v":2,"at_ms":5}')
    with pytest.raises(RecoveryRequired, match=r"TB\.receipts/3@7: .*version 2"):
        list(read_receipts([newer]))
