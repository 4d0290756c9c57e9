"""The check of whether messages are where receipts say, without a broker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
from confluent_kafka import Message

from blackbox.core.plan import Bounds
from blackbox.journal import claim_check as module
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.partition_reader import PartitionReader
from blackbox.journal.shard_journal import ShardJournal
from blackbox.records.receipt import Claim
from blackbox.records.request import Shard

SHARD = Shard("TB", 3)
PLACE, END = 40, 50


def message(offset: int, request: int) -> Message:
    headers: list[tuple[str, bytes | str | None]] = [
        ("blackbox-source", SHARD.source(request).encode())
    ]
    return Message("newest", 0, offset, b"k", b"x", headers)


class Partition:
    """A reader of a target's partition that has these messages."""

    def __init__(self, *messages: Message) -> None:
        self._messages = messages

    def exists(self, topic: str, partition: int) -> bool:
        return True

    def topic_id(self, topic: str) -> str:
        return "id"

    def stable_bounds(self, topic: str, partition: int, last: int, within_s: float) -> Bounds:
        return Bounds(0, END)

    def read(
        self, topic: str, partition: int, start: int, end: int
    ) -> Iterator[tuple[Sequence[Message], int]]:
        yield [one for one in self._messages if start <= (one.offset() or 0) < end], end

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("committed", "uncommitted", "is_missing"),
    [
        ([message(PLACE, 7)], [message(PLACE, 7)], False),
        ([], [], False),
        ([], [message(PLACE, 7)], True),
        ([message(PLACE, 8)], [message(PLACE, 8)], True),
    ],
    ids=["there", "compacted away", "aborted", "another request's"],
)
def test_a_message_that_compaction_removed_counts_as_delivered(
    monkeypatch: pytest.MonkeyPatch,
    committed: list[Message],
    uncommitted: list[Message],
    is_missing: bool,
) -> None:
    def reader(access: KafkaAccess, *, isolation: str, prefetched: int) -> Any:
        assert isolation == "read_uncommitted"
        return Partition(message(PLACE - 1, 6), *uncommitted)

    monkeypatch.setattr(module, "PartitionReader", reader)
    there = cast(PartitionReader, Partition(message(PLACE - 1, 6), *committed))
    journal = ShardJournal(SHARD, KafkaAccess("127.0.0.1:1", "unit"), reader=there)
    claim = Claim(7, "delivered", "newest/0", PLACE, "id")

    checked = journal.check([claim], 0)

    assert checked.missing == ([claim] if is_missing else [])
    assert checked.unread == {}


def test_a_place_beyond_the_end_of_a_compacted_target_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PartitionReader", lambda *_, **__: Partition())
    there = cast(PartitionReader, Partition())
    journal = ShardJournal(SHARD, KafkaAccess("127.0.0.1:1", "unit"), reader=there)
    beyond = Claim(7, "delivered", "newest/0", END, "id")

    assert journal.check([beyond], 0).missing == [beyond]
