"""How long Kafka remembers the progress of a load: each piece's offset expires by itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from blackbox.config.settings import load as read_settings
from blackbox.jobs.load import load as loads
from blackbox.jobs.load import tasks
from blackbox.jobs.load.load import Load, LoadFile
from blackbox.jobs.load.pieces import Piece, split
from blackbox.jobs.load.tasks import PieceToSend, SendRate, SendTask, Sent
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.piece_writer import PieceProgress

DAY_S = 86_400
KEPT_S = 7 * DAY_S
PIECES = 10
ROWS = 3 * DAY_S
RATE = 3  # so that each piece takes a day


class Broker:
    """The offsets of groups, each of which expires 7 days after its own commit."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sent: dict[str, int] = {}
        self._kept: dict[str, tuple[PieceProgress, float]] = {}

    def commit(self, name: str, rows: int) -> None:
        self._kept[name] = PieceProgress(rows, ROWS), self.now_s

    def of(self, names: Iterable[str], **_: object) -> dict[str, PieceProgress]:
        there = {n: self._kept[n] for n in names if n in self._kept}
        return {n: mark for n, (mark, at_s) in there.items() if self.now_s - at_s < KEPT_S}

    def commit_again(self, _: object, topic: str, progress: Mapping[str, PieceProgress]) -> None:
        for name, mark in self.of(progress).items():
            self.commit(name, mark.rows)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    broker = Broker()
    monkeypatch.setattr(loads, "PieceProgressReader", lambda access, topic: broker)
    monkeypatch.setattr(loads, "commit_again", broker.commit_again)
    monkeypatch.setattr(time, "time", lambda: broker.now_s)
    return broker


class SlowLoad(Load):
    """A load whose tasks send `RATE` rows per second to the broker above, and that is killed at `killed_at_s`."""

    broker: Broker
    killed_at_s = float("inf")

    def _send(
        self, session: Any, names: Sequence[str], rows: Any, rate: Any, until_s: float
    ) -> list[Sent]:
        for name in names:
            begun = self.broker.of([name])
            rows_in = begun[name].rows if begun else 0
            while rows_in < ROWS and self.broker.now_s < until_s:
                if self.broker.now_s >= self.killed_at_s:
                    raise KeyboardInterrupt
                self.broker.now_s += 3600
                rows_in += 3600 * RATE
                self.broker.sent[name] = self.broker.sent.get(name, 0) + 3600 * RATE
                self.broker.commit(name, rows_in)
        return []


def slow_load(broker: Broker) -> SlowLoad:
    pieces = [Piece("f", "parquet", 1, 1, n * ROWS, (n + 1) * ROWS) for n in range(PIECES)]
    settings = read_settings(kafka_bootstrap_servers="127.0.0.1:1")
    access = KafkaAccess("127.0.0.1:1", "blackbox")
    SlowLoad.broker = broker
    return SlowLoad(settings, access, "TB", None, [LoadFile("f", "parquet", 1, "abc", pieces)])


def send(load: SlowLoad, killed_at_s: float = float("inf")) -> None:
    load.killed_at_s = killed_at_s
    load.send(None, dict.fromkeys(load._of, ROWS), RATE)  # type: ignore[arg-type]


def test_a_load_that_takes_longer_than_kafka_keeps_offsets_sends_each_row_once(
    broker: Broker,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        send(slow_load(broker), killed_at_s=9.5 * DAY_S)

    send(slow_load(broker))

    assert list(broker.sent.values()) == [ROWS] * PIECES


def test_runs_at_most_six_days_apart_send_each_row_once(broker: Broker) -> None:
    for run in range(3):
        broker.now_s += 6 * DAY_S - 1
        with pytest.raises(KeyboardInterrupt):
            send(slow_load(broker), killed_at_s=broker.now_s + (run + 0.5) * DAY_S)

    broker.now_s += 6 * DAY_S - 1
    send(slow_load(broker))

    assert list(broker.sent.values()) == [ROWS] * PIECES


def test_a_task_of_a_load_ends_between_transactions_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    committed: list[tuple[str, int]] = []

    class Writer:
        def __init__(self, access: object, topic: str, name: str, total: int) -> None:
            self.name = name

        def open(self) -> int:
            return 0

        def send(self, rows: Sequence[object], rows_in: int) -> None:
            nonlocal now_s
            now_s += 1
            committed.append((self.name, rows_in))

        def close(self) -> None:
            pass

    path = tmp_path / "a.jsonl"
    path.write_text('{"topic": "o"}\n' * 5)
    [piece] = split(str(path), "jsonl").pieces
    lane = tuple(PieceToSend(name, piece, 5) for name in ("first", "second"))
    monkeypatch.setattr(tasks, "PieceWriter", Writer)
    monkeypatch.setattr(time, "time", lambda: now_s)
    task = SendTask(KafkaAccess("", "blackbox"), "TB", None, (lane,), None, until_s=102.0)
    send_rate = SendRate(None)
    send_rate.rows = 1

    assert [task.send(part, send_rate) for part in lane] == [Sent(), Sent()]
    assert committed == [("first", 1), ("first", 2)]
