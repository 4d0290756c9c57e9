"""The progress of a load, which Kafka keeps as offsets of consumer groups."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from confluent_kafka import KafkaError

from blackbox.journal import piece_writer
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.piece_writer import PieceProgress, PieceProgressReader, commit_again
from blackbox.records.errors import JournalLost, NotAllowed
from tests.servers.mock_cluster import OFFSET_FETCH, mock_cluster


@pytest.mark.parametrize(
    "error", [KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE]
)
def test_a_coordinator_that_moves_while_progress_is_read_ends_no_process(error: int) -> None:
    with mock_cluster() as cluster:
        cluster.answer(OFFSET_FETCH, error)
        progress = PieceProgressReader(KafkaAccess(cluster.bootstrap_servers, "blackbox"), "TB")

        assert progress.of(["blackbox.load.0123abcd.0", "blackbox.load.0123abcd.1"]) == {}


class Writers:
    """Writers of pieces of which 7 rows are in; each opening of a piece fails while `failures` has one for it."""

    def __init__(self) -> None:
        self.failures: dict[str, list[Exception]] = {}
        self.committed: list[tuple[str, int]] = []

    def __call__(self, access: object, topic: str, name: str, total: int) -> Writer:
        return Writer(self, name)


class Writer:
    def __init__(self, writers: Writers, name: str) -> None:
        self._writers = writers
        self._name = name

    def open(self) -> int:
        if failures := self._writers.failures.get(self._name):
            raise failures.pop()
        return 7

    def send(self, rows: Sequence[object], rows_in: int) -> None:
        self._writers.committed.append((self._name, rows_in))

    def close(self) -> None: ...


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> Writers:
    made = Writers()
    monkeypatch.setattr(piece_writer, "PieceWriter", made)
    return made


def commit_all_again() -> None:
    progress = dict.fromkeys(("first", "second"), PieceProgress(7, 9))
    commit_again(KafkaAccess("127.0.0.1:1", "blackbox"), "TB", progress)


def test_a_short_outage_does_not_end_a_load_that_commits_its_progress_again(
    writers: Writers,
) -> None:
    writers.failures["second"] = [JournalLost("no answer"), JournalLost("no answer")]

    commit_all_again()

    assert sorted(writers.committed) == [("first", 7), ("second", 7)]


@pytest.mark.parametrize(("failure", "tries"), [(JournalLost, 3), (NotAllowed, 1)])
def test_a_load_ends_if_its_progress_cannot_be_committed_again(
    writers: Writers, failure: type[JournalLost], tries: int
) -> None:
    writers.failures["second"] = [failure("no answer") for _ in range(9)]

    with pytest.raises(failure, match="no answer"):
        commit_all_again()

    assert len(writers.failures["second"]) == 9 - tries
