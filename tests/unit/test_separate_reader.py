"""A shard that is read apart, without a broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from confluent_kafka import KafkaError, KafkaException, Message

from blackbox.core.plan import Batch, Bounds
from blackbox.journal import request_reader, separate_reader
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.request_reader import RequestReader
from blackbox.journal.separate_reader import MOST_WITHOUT_CONTENT, SeparateReader
from blackbox.records.request import Shard
from tests.support.world import until

SHARD = Shard("TB", 3)
START, END = 10, 1_000_000
Found = Iterator[tuple[list[Message], int]]


def with_content(start: int) -> Found:
    """One message at each offset from `start` on."""
    for at in count(start):
        yield [Message(topic="TB", partition=3, offset=at, value=b"x", timestamp=(1, 5))], at + 1


def without_content(start: int) -> Found:
    """The same with an error in place of each message."""
    error = KafkaError(KafkaError._BAD_MSG)
    for at in count(start):
        yield [Message(topic="TB", partition=3, offset=at, error=error)], at + 1


def fails(start: int) -> Found:
    yield from ()
    raise KafkaException(KafkaError(KafkaError._TRANSPORT))


class Reader:
    """A partition without an end, of which a test says what is read."""

    reads: Callable[[int], Found] = staticmethod(with_content)
    is_closed = False

    def __init__(self, access: KafkaAccess, *, silence_s: float) -> None:
        Reader.is_closed = False

    def bounds(self, topic: str, partition: int) -> Bounds:
        return Bounds(0, END)

    def read_patiently(self, topic: str, partition: int, start: int, end: int) -> Found:
        return Reader.reads(start)

    def close(self) -> None:
        Reader.is_closed = True


@pytest.fixture(autouse=True)
def reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separate_reader, "PartitionReader", Reader)
    monkeypatch.setattr(separate_reader, "FAILED_S", 0)
    monkeypatch.setattr(Reader, "reads", with_content)


def started(longest_s: float = 60.0) -> SeparateReader:
    return SeparateReader(
        KafkaAccess("127.0.0.1:9092", "blackbox"), SHARD, START, longest_s=longest_s
    )


def taken(one: SeparateReader) -> Batch:
    return until("something is read", one.take)


def test_batches_follow_one_another_and_the_position_is_behind_the_last_taken() -> None:
    one = started()
    batches = [taken(one) for _ in range(5)]
    assert [(batch.start, batch.end) for batch in batches] == [(n, n + 1) for n in range(10, 15)]
    assert one.position == 15
    one.close()


def test_a_stopped_one_ends_although_nobody_takes_what_it_has_read() -> None:
    one = started()
    until("its queue is full", one._found.full)
    one.stop()
    until("it has ended", lambda: not one.is_alive)
    assert Reader.is_closed
    assert one.position == START


def test_it_ends_after_its_time_and_is_over_once_all_is_taken() -> None:
    one = started(longest_s=0)
    until("it has ended", lambda: not one.is_alive)
    assert not one.is_over
    assert taken(one).end == START + 1
    assert one.is_over
    assert one.position == START + 1


def test_records_without_content_come_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "reads", without_content)
    one = started()
    assert len(taken(one).records) == MOST_WITHOUT_CONTENT
    assert taken(one).start == START + MOST_WITHOUT_CONTENT
    one.close()


def test_one_that_cannot_read_is_over_at_its_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "reads", fails)
    one = started()
    until("it is over", lambda: one.is_over)
    assert one.position == START
    assert Reader.is_closed


class Together:
    """The consumer of all shards, which returns nothing; it finds this shard starved."""

    def __init__(self, access: KafkaAccess) -> None:
        self.positions: dict[Shard, int] = {}
        self.paused = False

    @property
    def starved(self) -> set[Shard]:
        return {SHARD} & self.positions.keys()

    def start(self, shard: Shard, offset: int) -> None:
        self.positions[shard] = offset

    def stop(self, shard: Shard) -> None:
        self.positions.pop(shard, None)

    def pause(self, paused: bool) -> None:
        self.paused = paused

    def read(self, most: int, wait_s: float, gather_s: float) -> list[Message]:
        return []

    def close(self) -> None: ...


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[RequestReader]:
    """A reader whose shard is read apart, and of which two batches were taken."""
    monkeypatch.setattr(request_reader, "RequestClient", Together)
    reader = RequestReader(
        KafkaAccess("127.0.0.1:9092", "blackbox"), most_records=100, gather_s=0.005
    )
    reader.start(SHARD, START)
    read = [until("a batch is read", lambda: reader.read()[0].get(SHARD)) for _ in range(2)]
    assert [batch.end for batch in read] == [START + 1, START + 2]
    yield reader
    reader.close()


def test_a_pause_ends_it_and_the_shard_is_read_from_its_position_afterwards(
    reading: RequestReader,
) -> None:
    reading.pause()
    assert [reading.read()[0] for _ in range(3)] == [{}, {}, {}]
    reading.resume()
    assert until("it is read", lambda: reading.read()[0].get(SHARD)).start == START + 2


def test_a_stopped_shard_is_not_read_any_more(reading: RequestReader) -> None:
    reading.stop(SHARD)
    assert [reading.read()[0] for _ in range(3)] == [{}, {}, {}]


def test_a_shard_that_is_started_elsewhere_is_read_from_there(reading: RequestReader) -> None:
    reading.start(SHARD, 500)
    assert until("it is read", lambda: reading.read()[0].get(SHARD)).start == 500
