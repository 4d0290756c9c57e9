"""Rates of targets: how many messages were sent in a second, as far as the process knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blackbox.records.errors import IndexFull, IndexLost
from blackbox.records.request import Second
from blackbox.rules import target_rates
from blackbox.rules.file import RulesFile
from blackbox.rules.target_rates import SILENT_FOR_S, TargetRates

NOW_MS = 1_800_000_000_500
BOTH = {"orders": 0, "bills": 0}


class Redis:
    """Counts as Redis keeps them, in memory; `failure` is its reply, `meanwhile` runs while it is asked."""

    def __init__(self) -> None:
        self.counts: dict[Second, int] = {}
        self.trips = 0
        self.failure: Exception | None = None
        self.meanwhile: Callable[[], object] = lambda: None

    def count(self, more: Mapping[Second, int]) -> dict[Second, int]:
        self.trips += 1
        self.meanwhile()
        if self.failure is not None:
            raise self.failure
        before = {second: self.counts.get(second, 0) for second in more}
        self.counts |= {second: before[second] + added for second, added in more.items()}
        return before

    def pending(self, caller: str, shards: object) -> int:
        raise AssertionError(caller)


@pytest.fixture
def counting() -> Redis:
    return Redis()


Make = Callable[[], TargetRates]


@pytest.fixture
def process(tmp_path: Path, counting: Redis) -> Make:
    """Makes the rates that a process knows: three messages per second for each of two targets."""
    path = tmp_path / "callers.toml"
    path.write_text("".join(f"[targets.{to}]\nmessages_per_second = 3\n" for to in BOTH))
    return lambda: TargetRates(RulesFile(path), counting)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(target_rates, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def test_a_rate_is_counted_for_each_second_of_each_topic_of_each_cluster(process: Make) -> None:
    rates = process()

    assert rates.limited() == {"orders": 3, "bills": 3}
    assert rates.count("cluster", {"orders": 5, "bills": 1}, NOW_MS) == BOTH
    assert rates.count("cluster", BOTH, NOW_MS) == {"orders": 5, "bills": 1}
    assert rates.count("cluster", {"orders": 1}, NOW_MS + 1000) == {"orders": 0}
    assert rates.count("another", {"orders": 1}, NOW_MS) == {"orders": 0}


def test_all_targets_are_counted_in_one_round_trip(process: Make, counting: Redis) -> None:
    process().count("cluster", BOTH, NOW_MS)
    assert counting.trips == 1


def test_redis_is_not_asked_about_a_second_that_is_used_up(process: Make, counting: Redis) -> None:
    rates, other = process(), process()
    rates.count("cluster", {"orders": 2}, NOW_MS)
    other.count("cluster", {"orders": 1}, NOW_MS)
    assert rates.count("cluster", {"orders": 0}, NOW_MS) == {"orders": 3}
    assert counting.trips == 3

    assert rates.count("cluster", {"orders": 0}, NOW_MS) == {"orders": 3}
    assert counting.trips == 3
    assert rates.count("cluster", {"orders": 0}, NOW_MS + 1000) == {"orders": 0}
    assert counting.trips == 4


@pytest.mark.parametrize("failure", [IndexFull("OOM"), IndexLost("no answer")])
def test_while_redis_cannot_count_a_process_keeps_to_the_rate_by_itself(
    process: Make, counting: Redis, failure: Exception
) -> None:
    rates = process()
    rates.count("cluster", {"orders": 1}, NOW_MS)
    counting.failure = failure

    assert rates.count("cluster", {"orders": 1, "bills": 2}, NOW_MS) == {"orders": 1, "bills": 0}
    assert rates.count("cluster", {"orders": 0, "bills": 2}, NOW_MS) == {"orders": 2, "bills": 2}
    assert rates.count("cluster", BOTH, NOW_MS + 1000) == BOTH


def test_a_redis_that_does_not_answer_is_asked_again_after_a_while_by_one_shard(
    process: Make, counting: Redis, clock: Any
) -> None:
    rates, counting.failure = process(), IndexLost("no answer")

    def ask() -> dict[str, int]:
        return rates.count("cluster", BOTH, NOW_MS)

    for _ in range(9):
        ask()
    assert counting.trips == 1
    clock.now_s += SILENT_FOR_S
    counting.meanwhile = ask  # another shard, while the first one waits
    ask()
    assert counting.trips == 2

    counting.failure, counting.meanwhile = None, lambda: None
    clock.now_s += SILENT_FOR_S
    for _ in range(2):
        ask()
    assert counting.trips == 4


def test_what_a_process_counted_by_itself_still_counts_when_redis_counts_again(
    process: Make, counting: Redis, clock: Any
) -> None:
    rates, counting.failure = process(), IndexFull("OOM")
    rates.count("cluster", {"orders": 2}, NOW_MS)
    counting.failure = None
    clock.now_s += SILENT_FOR_S

    assert rates.count("cluster", {"orders": 0}, NOW_MS) == {"orders": 2}


def test_counts_of_earlier_seconds_are_forgotten(
    process: Make, counting: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_rates, "MOST_KNOWN", 5)
    rates, counting.failure = process(), IndexFull("OOM")
    for later_s in range(9):
        rates.count("cluster", {"orders": 3}, NOW_MS + 1000 * later_s)

    assert rates.count("cluster", {"orders": 0}, NOW_MS + 8000) == {"orders": 3}
    assert rates.count("cluster", {"orders": 0}, NOW_MS) == {"orders": 0}
