from __future__ import annotations

import pytest

from blackbox.records.outgoing import Outgoing
from blackbox.records.request import Reason
from blackbox.records.topic_limits import Limits, batch_bytes

HEADERS: list[tuple[str, bytes | str | None]] = [("trace", b"1" * 70), ("ä", "ö"), ("none", None)]


def message(size: int | None = 10, key: bytes | None = None) -> Outgoing:
    return Outgoing(7, "orders", key, None if size is None else b"x" * size, HEADERS)


def test_a_compacted_topic_refuses_a_message_without_a_key() -> None:
    limits = Limits(needs_key=True, most_bytes=None)
    assert limits.refusal(message(key=b"")) is None
    refusal = limits.refusal(message())
    assert refusal is not None
    assert refusal[0] == Reason.REFUSED
    assert "orders: the topic is compacted and does not accept messages without a key" in refusal[1]


@pytest.mark.parametrize("size", [None, 0, 10, 1000, 100_000])
def test_a_message_of_the_maximum_size_is_accepted_and_one_byte_more_is_not(
    size: int | None,
) -> None:
    most = batch_bytes(message(size))
    assert Limits(needs_key=False, most_bytes=most).refusal(message(size)) is None
    refusal = Limits(needs_key=False, most_bytes=most - 1).refusal(message(size))
    assert refusal == (
        Reason.TOO_LARGE,
        f"orders: {most} bytes with its headers, more than max.message.bytes={most - 1}",
    )
