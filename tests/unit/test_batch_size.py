"""How much one batch of the Spark engine's intake reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from blackbox.core.intake import Taken
from blackbox.engine.spark.batch_size import LONG_S, SHORT_S, batch_ends, shared
from blackbox.engine.spark.read_costs import MOST_CHEAPER, ReadCosts, costs_in
from blackbox.engine.spark.shard_result import ShardResult
from blackbox.journal.readable_bounds import Offsets
from blackbox.records.request import Shard

MOST = 500_000
SMALL_S, LARGE_S = 1 / 50_000, 1 / 1000
"""What an offset costs: of records of usual size, and of 100 kB."""


def batch(*cost_s: float, waiting: tuple[int, ...], tasks: int = 2) -> tuple[list[int], float]:
    """The offsets of each partition in one batch, and the seconds that all of them cost."""
    start: Offsets = {("TB", number): 100 * number for number in range(len(waiting))}
    end = {at: start[at] + waiting[at[1]] for at in start}
    costs = dict(zip(start, cost_s, strict=True))
    ends = batch_ends(start, end, MOST, costs, tasks)
    counts = [ends[at] - start[at] for at in start]
    return counts, sum(count * each for count, each in zip(counts, cost_s, strict=True))


def test_a_batch_is_sized_for_5_s_if_all_backlogs_are_similar() -> None:
    counts, took_s = batch(SMALL_S, SMALL_S, waiting=(10_000_000, 9_000_000), tasks=1)

    assert counts[0] == counts[1]
    assert took_s == pytest.approx(LONG_S, rel=0.001)


def test_a_batch_is_sized_for_1_s_if_small_and_large_backlogs_exist() -> None:
    counts, took_s = batch(SMALL_S, SMALL_S, waiting=(10_000_000, 100), tasks=1)

    assert counts[1] == 100
    assert took_s == pytest.approx(SHORT_S, rel=0.001)


def test_a_batch_is_sized_for_1_s_if_records_wait_in_one_partition_only() -> None:
    # A request that comes to the other one waits for the end of such a batch.
    assert batch(SMALL_S, SMALL_S, waiting=(10_000_000, 0))[0] == [50_000, 0]


@pytest.mark.parametrize("cost_s", [n / 7e6 for n in range(1, 30)])
def test_a_backlog_that_fits_is_read_to_its_end(cost_s: float) -> None:
    assert batch(cost_s, cost_s, waiting=(999, 1000))[0] == [999, 1000]


def test_a_flood_of_large_records_takes_no_share_from_small_ones() -> None:
    counts, _ = batch(LARGE_S, SMALL_S, SMALL_S, waiting=(3000, 1000, 900))

    assert counts == [1000, 1000, 900]


def test_each_task_has_its_own_time_and_a_partition_that_of_one() -> None:
    counts, _ = batch(LARGE_S, LARGE_S, LARGE_S, SMALL_S, waiting=(10**6, 10**6, 10**6, 1))
    assert counts == [667, 667, 667, 1]

    counts, _ = batch(LARGE_S, SMALL_S, waiting=(10**6, 1))
    assert counts == [1000, 1]


def test_at_most_the_given_number_of_offsets_is_read() -> None:
    counts, _ = batch(1e-6, 1e-6, waiting=(10_000_000, 10_000_000))

    assert counts == [MOST // 2, MOST // 2]


def test_every_partition_advances_however_much_an_offset_costs() -> None:
    assert batch(60.0, 60.0, SMALL_S, waiting=(10, 20, 0))[0] == [1, 1, 0]


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


@pytest.fixture
def costs(tmp_path: Path) -> ReadCosts:
    return ReadCosts(tmp_path / "costs.json")


def stored(offsets: int, seconds: float, problem: str | None = None) -> ShardResult:
    taken = Taken(offsets, 0, 0, 0, None)
    return ShardResult(Shard("TB", 3), taken, offsets, problem, offsets=offsets, seconds=seconds)


def known(costs: ReadCosts) -> float | None:
    return costs_in(costs.path).get(("TB", 3))


def test_what_a_task_measured_is_known_to_the_next_plan(costs: ReadCosts) -> None:
    assert known(costs) is None
    costs.note([stored(1000, 2.0)])
    assert known(costs) == pytest.approx(0.002)
    costs.note([stored(1000, 1.0)])
    assert known(costs) == pytest.approx(0.001)


def test_a_short_and_quick_range_says_nothing_of_the_cost(costs: ReadCosts) -> None:
    costs.note([stored(1000, 1.0)])
    costs.note([stored(12, 0.1), stored(0, 0.7)])
    assert known(costs) == pytest.approx(0.001)


def test_a_shard_that_was_slow_once_does_not_stay_expensive(costs: ReadCosts) -> None:
    costs.note([stored(1, 0.6)])  # a failover of Redis, for example
    before_s = known(costs) or 0
    costs.note([stored(2, 0.05)])
    assert known(costs) == pytest.approx(before_s / MOST_CHEAPER)
    for _ in range(5):
        costs.note([stored(2, 0.05)])
    assert known(costs) == pytest.approx(0.025)


def test_a_few_records_that_take_long_are_expensive(costs: ReadCosts) -> None:
    costs.note([stored(3, 0.9)])
    assert known(costs) == pytest.approx(0.3)


def test_a_shard_that_was_held_up_is_not_expensive(costs: ReadCosts) -> None:
    costs.note([stored(1000, 1.0)])
    costs.note([stored(10, 5.0, "Redis has no room")])
    assert known(costs) == pytest.approx(0.001)


def test_a_cost_falls_to_a_quarter_at_most_at_once(costs: ReadCosts) -> None:
    # Large records may follow the small ones, and all other partitions wait for the end of a batch.
    costs.note([stored(1000, 1.0)])
    costs.note([stored(1000, 0.001)])
    assert known(costs) == pytest.approx(0.001 / MOST_CHEAPER)
