"""Which shards the Spark engine's intake reads, without Spark, Kafka or Redis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import generate_latest
from pyspark.sql import DataFrame, SparkSession

from blackbox.config.settings import load
from blackbox.engine.metrics import Metrics
from blackbox.engine.spark import intake_stream
from blackbox.engine.spark.intake_stream import IntakeStream
from blackbox.engine.spark.read_costs import ReadCosts
from blackbox.engine.spark.read_plan import ReadPlan, read_plan_from
from blackbox.engine.spark.shard_result import NOTHING_TAKEN, ShardResult
from blackbox.engine.spark.start_positions import Position
from blackbox.engine.spark.unread_shards import UnreadShards
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.readable_bounds import Offsets
from blackbox.records.errors import IndexLost
from blackbox.records.request import Shard

FIRST, SECOND = Shard("TB", 0), Shard("TB", 1)


class FakePositions:
    """Positions in Redis; `meanwhile` happens before they are used."""

    def __init__(self, at: dict[Shard, int]) -> None:
        self.at = at
        self.meanwhile: Callable[[], None] = lambda: None

    def of_each(self, shards: frozenset[Shard]) -> dict[Shard, int]:
        return {shard: self.at[shard] for shard in shards}

    def readable(self, found: Mapping[Shard, Position]) -> dict[Shard, int]:
        self.meanwhile()
        return {shard: at for shard, at in found.items() if isinstance(at, int)}


class Intake:
    """An intake stream and what its query would read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def all_reachable(_: object, starts: Offsets) -> tuple[Offsets, dict[Any, str]]:
            return starts, {}

        monkeypatch.setattr(intake_stream, "reachable", all_reachable)
        self.positions = FakePositions({FIRST: 100, SECOND: 100})
        self.read_plan = ReadPlan(folder / "read-plan.json", tasks=2)
        self.costs = ReadCosts(folder / "costs.json")
        self.has_room = Event()
        self.has_room.set()
        self.metrics = Metrics()
        source = SimpleNamespace(register=lambda _: None)
        self.stream = IntakeStream(
            cast(SparkSession, SimpleNamespace(dataSource=source)),
            load(kafka_bootstrap_servers="127.0.0.1:1"), KafkaAccess("127.0.0.1:9092", "blackbox"), self.metrics, "run",
            has_room=self.has_room, tasks=lambda: 2, pause_intake=print,
        )  # fmt: skip
        monkeypatch.setattr(self.stream, "_positions", self.positions)

    def look(self) -> None:
        self.stream._look(frozenset(self.positions.at), self.read_plan)

    def store(self, *done: ShardResult) -> None:
        self.stream._record_stored(list(done), self.read_plan)

    def run(self, batch: DataFrame) -> None:
        self.stream._run_batch(self.read_plan, self.costs, batch, 0)

    def warm_up(self) -> None:
        """Run a query's first batch, which has no shards."""
        self.run(batch(list))
        assert self.stream.is_warm

    def begun(self, shard: Shard) -> int | None:
        found = read_plan_from(self.read_plan.path).begun.get(shard)
        return None if found is None else found.start


@pytest.fixture
def intake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Intake:
    return Intake(tmp_path, monkeypatch)


def stored(shard: Shard, position: int) -> ShardResult:
    return ShardResult(shard, NOTHING_TAKEN, position)


def test_a_shard_begins_again_when_redis_is_behind_what_was_stored(intake: Intake) -> None:
    intake.look()
    assert (intake.begun(FIRST), intake.begun(SECOND)) == (100, 100)
    intake.store(stored(FIRST, 200), stored(SECOND, 200))
    intake.positions.at = {FIRST: 200, SECOND: 150}

    intake.look()

    assert (intake.begun(FIRST), intake.begun(SECOND)) == (100, 150)


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_shard_that_a_batch_leaves_out_is_not_begun_at_the_same_time(
    intake: Intake, is_silent: bool
) -> None:
    failed = stored(FIRST, 100)._replace(problem="no answer", is_silent=is_silent, is_behind=True)
    intake.positions.meanwhile = lambda: intake.store(failed)

    intake.look()

    assert intake.begun(FIRST) is None
    assert intake.begun(SECOND) == 100


def batch(collect: Callable[[], object]) -> DataFrame:
    return cast(DataFrame, SimpleNamespace(collect=collect))


def fails() -> None:
    pytest.fail("Redis is written to")


@pytest.mark.timeout(60)
def test_a_batch_that_waits_for_room_ends_when_all_of_its_shards_are_lost(intake: Intake) -> None:
    intake.warm_up()
    intake.has_room.clear()
    intake.look()
    running = Thread(target=intake.run, args=(batch(fails),))
    running.start()

    intake.read_plan.end([FIRST])
    running.join(0.5)
    assert running.is_alive()
    intake.read_plan.end([SECOND])
    running.join()


def test_a_batch_whose_shards_were_lost_is_not_tried_again(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def lose() -> object:
        tried.append(1)
        intake.read_plan.end([FIRST, SECOND])
        return []

    failed = stored(FIRST, 100)._replace(problem="no room", is_full=True)
    monkeypatch.setattr(intake_stream, "reports", lambda _: [failed])
    intake.look()
    intake.run(batch(lose))
    assert tried == [1]


def test_no_batch_begins_after_a_stop(intake: Intake) -> None:
    intake.look()
    intake.stream._stopping.set()
    intake.run(batch(fails))
    intake.has_room.clear()
    intake.run(batch(fails))


def test_a_lost_shard_is_no_longer_shown_as_unread(intake: Intake) -> None:
    unread: UnreadShards = intake.stream._unread
    unread.looked_at([FIRST], {FIRST: "has no leader"})
    unread.show(frozenset([FIRST, SECOND]))
    assert 'blackbox_shard_unread{shard="TB-0"} 1.0' in shown(intake)

    unread.retain_only([SECOND])
    unread.show(frozenset([SECOND]))

    assert 'blackbox_shard_unread{shard="TB-0"}' not in shown(intake)
    assert 'blackbox_shard_unread{shard="TB-1"} 0.0' in shown(intake)


def test_a_shard_stays_unreachable_while_redis_does_not_answer(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_stream, "reachable", lambda *_: ({}, {FIRST: "has no leader"}))
    intake.positions.at = {FIRST: 100}
    intake.look()
    assert intake.stream.why_not_read() == {FIRST: "has no leader"}

    monkeypatch.setattr(intake.positions, "of_each", lambda _: {FIRST: IndexLost("no answer")})
    intake.look()

    assert intake.stream.why_not_read() == {FIRST: "has no leader"}


def shown(intake: Intake) -> str:
    return generate_latest(intake.metrics.registry).decode()
