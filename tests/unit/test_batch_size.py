"""How much one batch of the Spark engine's intake reads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from blackbox.engine.spark import batch_size
from blackbox.engine.spark.batch_size import LONG_S, SHORT_S, BatchSize, shared
from blackbox.journal.ends import Offsets

MOST = 500_000


@dataclass
class Batches:
    """Consecutive batches, with a cost for each record of a partition."""

    size: BatchSize
    now_s: float = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def run(self, *cost_s: float, waiting: tuple[int, ...]) -> tuple[list[int], float]:
        """Read one batch; returns the counts and the duration."""
        start: Offsets = {("TB", number): 0 for number in range(len(waiting))}
        end = {at: waiting[at[1]] for at in start}
        counts = list(self.size.plan(start, end, MOST).values())
        took_s = sum(count * each for count, each in zip(counts, cost_s, strict=True))
        self.now_s += took_s
        self.size.batch_done()
        return counts, took_s


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    batches = Batches(BatchSize())
    monkeypatch.setattr(batch_size, "time", batches)
    return batches


def test_a_batch_is_sized_for_5_s_if_all_backlogs_are_similar(batches: Batches) -> None:
    cost_s, waiting = (1 / 50_000, 1 / 50_000), (10_000_000, 9_000_000)

    took_s = [batches.run(*cost_s, waiting=waiting)[1] for _ in range(6)]

    assert took_s[0] < LONG_S
    assert took_s[-1] == pytest.approx(LONG_S, rel=0.01)


def test_a_batch_is_sized_for_1_s_if_small_and_large_backlogs_exist(
    batches: Batches,
) -> None:
    for _ in range(6):
        counts, took_s = batches.run(1 / 50_000, 1 / 50_000, waiting=(10_000_000, 100))

    assert counts[1] == 100
    assert took_s == pytest.approx(SHORT_S, rel=0.01)


@pytest.mark.parametrize("cost_s", [1 / 1000, 1 / 500])
def test_a_flood_of_large_records_delays_other_partitions_only_once(
    batches: Batches, cost_s: float
) -> None:
    took_s = [batches.run(cost_s, 1 / 50_000, waiting=(1_000_000, 10))[1] for _ in range(4)]

    assert took_s[0] <= 4.1
    assert took_s[1:] == pytest.approx([SHORT_S] * 3, rel=0.1)


def test_small_and_empty_batches_do_not_change_the_batch_size(
    batches: Batches,
) -> None:
    for _ in range(6):
        batches.run(1 / 50_000, waiting=(10_000_000,))
    for count in (0, 1, 10):
        batches.run(1 / 50, waiting=(count,))

    assert batches.run(1 / 50_000, waiting=(10_000_000,))[1] == pytest.approx(LONG_S, rel=0.01)


def test_the_batch_size_recovers_after_one_very_long_batch(batches: Batches) -> None:
    for _ in range(6):
        batches.run(1 / 50_000, waiting=(10_000_000,))
    batches.run(60.0, waiting=(1,))  # as while Redis was full

    counts = [batches.run(1 / 50_000, waiting=(10_000_000,))[0][0] for _ in range(7)]

    assert counts[0] == batch_size.LEAST_PER_S * LONG_S
    assert counts[-1] == pytest.approx(50_000 * LONG_S, rel=0.01)


def test_small_backlogs_are_read_completely_and_others_get_equal_shares() -> None:
    start = {("TB", 0): 100, ("TB", 1): 0, ("TB", 2): 5, ("TB", 3): 7}
    end = {("TB", 0): 1_000_100, ("TB", 1): 2_000_000, ("TB", 2): 25, ("TB", 3): 7}

    assert shared(start, end, 1020) == {
        ("TB", 0): 600,
        ("TB", 1): 500,
        ("TB", 2): 25,
        ("TB", 3): 7,
    }
    assert shared(start, end, 10_000_000) == end
    assert shared({}, {}, 10) == {}


def test_every_partition_advances_however_small_the_limit_is() -> None:
    start = {("TB", 0): 0, ("TB", 1): 0, ("TB", 2): 7}
    end = {("TB", 0): 1_000_000, ("TB", 1): 1, ("TB", 2): 7}

    assert shared(start, end, 1) == {("TB", 0): 1, ("TB", 1): 1, ("TB", 2): 7}
