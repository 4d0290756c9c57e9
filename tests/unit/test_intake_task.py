"""An intake task of Spark whose journals are fakes, on a Redis inside this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
import redis
from confluent_kafka import Message

from blackbox.config.settings import load
from blackbox.config.wiring import kafka
from blackbox.core.plan import Positions
from blackbox.core.settlement import Settlement
from blackbox.engine.spark import intake_task as module
from blackbox.engine.spark.intake_task import IntakeTask
from blackbox.engine.spark.shard_result import ShardResult
from blackbox.index import intake_changes
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.ranges import Chunk, Range
from blackbox.records import entry as entries
from blackbox.records.cancel import REPLACES
from blackbox.records.request import request_id
from tests.contract.held import NOW_MS, SHARD, held
from tests.support.fakes import FakeJournal
from tests.unit.opening import delivered


class Journal(FakeJournal):
    def close(self) -> None: ...


@pytest.fixture
def journal() -> Journal:
    return Journal()


def request(offset: int, countdown_s: int, *, replaces: int | None = None) -> Message:
    value = json.dumps({"topic": "orders", "message": "hi", "countdown": countdown_s}).encode()
    headers: list[tuple[str, bytes | str | None]] = []
    if replaces is not None:
        headers.append((REPLACES, request_id(SHARD, replaces).encode()))
    return Message(SHARD.topic, SHARD.partition, offset, None, value, headers, None, (1, NOW_MS))


Run = Callable[..., ShardResult]


@pytest.fixture
def run(
    connections: redis.ConnectionPool, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """Run a task for a range with this record; in a Python worker of its own, or in the one before."""
    started: list[module._Intakes] = []
    settings = load(kafka_bootstrap_servers="127.0.0.1:1", redis_url="redis://127.0.0.1:1/0")
    monkeypatch.setattr(intake_changes, "IN_FLIGHT_WAIT_S", 0.0)
    monkeypatch.setattr(module, "pool", lambda url: connections)
    monkeypatch.setattr(module, "ShardJournal", lambda *_, **__: journal)
    monkeypatch.setattr(module._Intakes, "_topic_id", lambda *_: None)
    monkeypatch.setattr(module._Intakes, "_observe", lambda _: None)

    def run_task(message: Message, *, in_the_same: bool = False) -> ShardResult:
        def read(_: Any, ranges: list[Range], *__: Any) -> Iterator[Chunk]:
            yield Chunk(ranges[0], ranges[0].start, ranges[0].end, [message])

        monkeypatch.setattr(module, "read_ranges", read)
        offset = message.offset() or 0
        planned = Range(*SHARD, offset, offset + 1)._asdict()
        if not in_the_same:
            started.append(module._Intakes(IntakeTask("run", settings, kafka(settings))))
        [stored] = started[-1].take_in(iter([pa.RecordBatch.from_pylist([planned])]))
        return stored

    yield run_task
    for intakes in started:
        intakes.close()


def test_a_request_that_was_delivered_before_redis_went_back_is_not_replaced(
    run: Run, index: ShardIndex, journal: Journal, client: Any
) -> None:
    """A worker that starts after the rollback cannot have seen the lost receipt in Redis."""
    assert run(request(0, 60)).problem is None
    position = journal.append(delivered(0))
    before = held(client)

    early = run(request(1, 90, replaces=0))

    assert (early.position, early.is_behind, early.taken.replaced) == (1, True, 0)
    assert "requests are read again from 1" in (early.problem or "")
    assert held(client) == before

    index.load()
    index.settle(Settlement({0: None}, position + 1))  # as recovery, with the receipt
    assert run(request(1, 90, replaces=0)).problem is None
    assert held(client).offsets() == [1]
    assert entries.decode(held(client).payloads[1]).reason == "too-late"


def test_a_worker_does_not_report_a_position_from_before_the_topic_was_recreated(
    run: Run, index: ShardIndex, client: Any
) -> None:
    run(request(0, 60))
    run(request(1, 60), in_the_same=True)
    client.flushall()
    index.load()
    index.begin(Positions(1, 0))

    late = run(request(0, 60), in_the_same=True)

    assert (late.problem, late.position) == (None, 1)
