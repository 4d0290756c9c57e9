"""Look-ups of offsets, and which messages need one, without a broker."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from blackbox.journal import kafka_access
from blackbox.journal.claimed_offsets import believed
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.offset_lookup import OffsetLookup
from blackbox.records.errors import JournalSilent

FETCH = "127.0.0.1:9092/1: Fetch topic TB [3] at offset {} (leader epoch -1, current leader epoch 0, v{})"
NOT_PARSED = "127.0.0.1:9092/1: TB [3]: Fetch backoff for 500ms: Local: Read underflow"


class Client:
    """A consumer that logs what it is told to at its next poll, and returns nothing, or an error."""

    logs: Sequence[str] = ()
    returns: Message | None = None

    def __init__(self, settings: dict[str, Any]) -> None:
        self._log: logging.Logger = settings["logger"]
        self.is_closed = False

    def assign(self, partitions: list[TopicPartition]) -> None: ...

    def unassign(self) -> None: ...

    def poll(self, timeout: float) -> Message | None:
        lines, Client.logs = Client.logs, ()
        for line in lines:
            self._log.debug(line)
        return Client.returns

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def lookup(monkeypatch: pytest.MonkeyPatch) -> OffsetLookup:
    monkeypatch.setattr(kafka_access, "Consumer", Client)
    monkeypatch.setattr(Client, "returns", None)
    return OffsetLookup(KafkaAccess("127.0.0.1:9092", "blackbox"), within_s=0.02)


def look_up(lookup: OffsetLookup, offset: int, *logs: str) -> tuple[int | None, KafkaError | None]:
    Client.logs = logs
    found = lookup.first_from("TB", 3, offset)
    return found.offset(), found.error()


def test_a_fetch_that_cannot_be_parsed_stands_for_the_record_at_its_offset(
    lookup: OffsetLookup,
) -> None:
    offset, error = look_up(lookup, 7, FETCH.format(7, 2), FETCH.format(9, 2), NOT_PARSED)
    assert offset == 9
    assert error is not None
    assert error.code() == KafkaError._BAD_MSG


@pytest.mark.parametrize("logs", [(), (FETCH.format(7, 2),)])
def test_a_client_that_returns_nothing_is_no_sign_of_such_a_record(
    lookup: OffsetLookup, logs: Sequence[str]
) -> None:
    with pytest.raises(JournalSilent, match="TB/3: nothing read from 7 on"):
        look_up(lookup, 7, *logs)


def test_a_look_up_does_not_take_what_the_one_before_fetched_last_for_its_own(
    lookup: OffsetLookup,
) -> None:
    look_up(lookup, 7, FETCH.format(7, 2), NOT_PARSED)
    with pytest.raises(JournalSilent):
        look_up(lookup, 5, FETCH.format(8, 2), NOT_PARSED, FETCH.format(5, 4))


def test_after_a_look_up_without_an_answer_a_new_client_is_used(lookup: OffsetLookup) -> None:
    with pytest.raises(JournalSilent):
        look_up(lookup, 7)
    assert lookup._consumer is None
    look_up(lookup, 7, FETCH.format(7, 2), NOT_PARSED)
    client: Consumer | None = lookup._consumer
    assert client is not None


def out_of_range(offset: int) -> Message:
    error = KafkaError(KafkaError._AUTO_OFFSET_RESET)
    return Message(topic="TB", partition=3, offset=offset, error=error)


def usual(offset: int) -> Message:
    return Message(topic="TB", partition=3, offset=offset, value=b"{}")


def test_an_error_of_where_an_earlier_record_claimed_to_be_is_no_answer(
    lookup: OffsetLookup,
) -> None:
    Client.returns = out_of_range(10_000_000)
    with pytest.raises(JournalSilent):
        look_up(lookup, 7)
    Client.returns = out_of_range(7)
    assert look_up(lookup, 7)[0] == 7


@pytest.mark.parametrize(("at", "is_doubted"), [(8, False), (10_000_000, True)])
@pytest.mark.parametrize("before", [[], [usual(7)]])
def test_an_out_of_range_error_is_believed_only_at_the_next_offset(
    before: list[Message], at: int, is_doubted: bool
) -> None:
    polled = [*before, out_of_range(at)]
    trusted = believed(polled, 8 - len(before), lambda _: True)
    assert trusted == (before if is_doubted else polled)
