"""Reads of ranges of partitions, without a broker."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as KafkaMessage
from confluent_kafka.admin import ListOffsetsResultInfo

from blackbox.journal import kafka_access
from blackbox.journal.kafka_access import FetchProgress, KafkaAccess
from blackbox.journal.partition_reader import PartitionReader
from blackbox.journal.topics import TopicIds, Topics
from blackbox.records.errors import JournalLost, JournalSilent
from tests.servers.mock_cluster import OFFSET_FETCH, mock_cluster


class Message:
    def error(self) -> None: ...

    def topic(self) -> str:
        return "TB.receipts"  # where a gap is not looked up

    def offset(self) -> int:
        return 99


class Client:
    """A consumer that only reports its position: a little further each time, then a message."""

    def __init__(self, positions: tuple[int, ...], fetched: Callable[[str], None]) -> None:
        self._positions = list(positions)
        self._fetched = fetched
        self.is_closed = False

    def assign(self, partitions: object) -> None: ...

    def poll(self, timeout: float) -> Message | None:
        if not self._positions:
            return Message()
        partitions = {"3": {"next_offset": self._positions.pop(0)}}
        self._fetched(json.dumps({"topics": {"TB": {"partitions": partitions}}}))
        return None

    def consume(self, count: int, timeout: float) -> list[Message]:
        return []

    def close(self) -> None:
        self.is_closed = True


class Access:
    group_id = "blackbox"

    def __init__(self, *positions: int) -> None:
        fetched = FetchProgress()
        self.client = Client(positions, fetched)
        self.fetching_consumer: Any = lambda **_: (self.client, fetched)


def read(access: Access, start: int, end: int) -> list[int]:
    """The offsets reached."""
    reader = PartitionReader(access, silence_s=0.0)  # type: ignore[arg-type]
    found = [reached for _, reached in reader.read_patiently("TB", 3, start, end)]
    assert access.client.is_closed
    return found


@pytest.mark.parametrize("positions", [(), (8,), (8, 50, 90)])
def test_a_read_waits_for_a_client_that_makes_progress(positions: tuple[int, ...]) -> None:
    assert read(Access(*positions), 7, 100)[-1] == 100


def test_a_read_does_not_wait_for_records_beyond_its_end() -> None:
    assert read(Access(50, 100, 150, 200), 7, 100)[-1] == 100


@pytest.mark.parametrize("positions", [(-1001,), (7,), (8, 8), (9, 8)])
def test_a_client_without_progress_counts_as_silent(positions: tuple[int, ...]) -> None:
    with pytest.raises(JournalSilent, match="TB/3: nothing read from 7 on"):
        read(Access(*positions), 7, 100)


class Ended:
    """A consumer of a partition that ends before what is wanted, and reports that again after each `assign`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._reports = False

    def assign(self, partitions: object) -> None:
        self._reports = True

    def unassign(self) -> None: ...

    def poll(self, timeout: float) -> KafkaMessage | None:
        if not self._reports:
            time.sleep(timeout)
            return None
        self._reports = False
        error = KafkaError(KafkaError._PARTITION_EOF)
        return KafkaMessage(topic="TB", partition=3, offset=50, error=error)

    def consume(self, count: int, timeout: float) -> list[KafkaMessage]:
        return []

    def close(self) -> None: ...


@pytest.mark.timeout(10)
def test_a_partition_that_ends_before_what_is_wanted_is_not_read_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kafka_access, "Consumer", Ended)
    monkeypatch.setattr(FetchProgress, "next_offset", lambda *_: 50)
    reader = PartitionReader(KafkaAccess("127.0.0.1:1", "unit"), silence_s=1.5)
    with pytest.raises(JournalSilent):
        assert [reached for _, reached in reader.read("TB", 3, 50, 100)]


class Admin:
    """A client whose broker does not answer in time: it returns an invalid end. It is falsy while idle."""

    fails: KafkaException | None = None

    def __len__(self) -> int:
        return 0

    def list_offsets(self, asked: dict[TopicPartition, Any], **_: object) -> dict[Any, Any]:
        answers: dict[Any, Any] = {}
        for at in asked:
            answers[at] = Future[Any]()
            if self.fails is not None:
                answers[at].set_exception(self.fails)
            else:
                answers[at].set_result(ListOffsetsResultInfo(OFFSET_INVALID, -1, -1))
        return answers


class OneAdmin:
    """Counts the clients that are asked for."""

    group_id = "blackbox"

    def __init__(self) -> None:
        self.made = 0

    def admin(self) -> Admin:
        self.made += 1
        return Admin()


def test_a_missing_answer_is_not_the_end_of_a_partition() -> None:
    reader = PartitionReader(OneAdmin())  # type: ignore[arg-type]
    with pytest.raises(
        JournalLost, match=r"TB/3: the broker did not return its end offset within 0\.5 s"
    ):
        reader.log_end("TB", 3, 0.5)
    assert Topics(Admin()).ends([("TB", 3)], committed=True) == {}  # type: ignore[arg-type]


def test_repeated_lookups_use_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blackbox.journal.topics.topic_ids", lambda admin, names: {})
    access = OneAdmin()
    ids = TopicIds(access)  # type: ignore[arg-type]
    for _ in range(3):
        ids.of(["TB"])
    assert access.made == 1

    reader = PartitionReader(access, silence_s=0.0)  # type: ignore[arg-type]
    for _ in range(3):
        with pytest.raises(JournalLost):
            reader.log_end("TB", 3)
    assert access.made == 2


def test_a_client_without_an_answer_is_freed_with_its_user() -> None:
    gc.collect()
    gc.disable()
    try:
        client = Admin()
        client.fails = KafkaException(KafkaError(KafkaError._TIMED_OUT))
        gone = weakref.ref(client)
        assert Topics(client).ends([("TB", 3)], committed=True) == {}  # type: ignore[arg-type]
        del client
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "error", [KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE]
)
def test_a_moved_coordinator_does_not_end_the_process(error: int) -> None:
    with mock_cluster() as cluster:
        access = KafkaAccess(cluster.bootstrap_servers, "blackbox")
        with closing(PartitionReader(access)) as reader:
            cluster.answer(OFFSET_FETCH, error)
            with pytest.raises(JournalLost, match="TB/0"):
                reader.committed("TB", 0)
            assert reader.committed("TB", 0) == 0
