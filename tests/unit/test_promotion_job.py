"""When a service promotes its shards, and when again those that failed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from blackbox.core.promotion import Promoted
from blackbox.engine import promoter
from blackbox.engine.metrics import Metrics
from blackbox.engine.promoter import PromotionJob
from blackbox.engine.steady_scheduler import SteadyScheduler
from blackbox.records.clock import Clock
from blackbox.records.errors import Fenced, JournalLost
from blackbox.records.request import Shard

SHARDS = [Shard("TB", partition) for partition in range(3)]


class Service:
    """The work of a service that owns three shards, on a clock that the test sets.

    `failing` are the shards whose promotion fails, `promoted` those that were tried.
    """

    def __init__(self) -> None:
        self.owned = set(SHARDS)
        self.failing: dict[Shard, Exception] = {}
        self.promoted: list[Shard] = []
        self.now_s = 1000.0
        self.metrics = Metrics()
        self.scheduler = SteadyScheduler()

    def start(self) -> None:
        settings: Any = SimpleNamespace(hot_horizon_s=86_400, renew_after_ms=86_400_000)
        access: Any = None
        job = PromotionJob(settings, access, self.metrics, Clock(), shards=lambda: self.owned)
        job.add_to(self.scheduler)

    def promote(self, shard: Shard, now_ms: int, confirm: Callable[[], None]) -> Promoted:
        self.promoted.append(shard)
        if shard in self.failing:
            raise self.failing[shard]
        return Promoted(shard)

    def run(self, job: str) -> list[Shard]:
        """The shards that this job tries to promote."""
        self.promoted.clear()
        self.scheduler.get_job(job).func()
        return list(self.promoted)

    def age_s(self, shard: Shard) -> float | None:
        labels = {"shard": str(shard)}
        return self.metrics.registry.get_sample_value("blackbox_promotion_age_seconds", labels)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service()
    monkeypatch.setattr(promoter, "Promoter", lambda settings, access: service)
    monkeypatch.setattr(promoter, "time", SimpleNamespace(monotonic=lambda: service.now_s))
    service.start()
    return service


def test_a_shard_that_failed_is_promoted_again_within_a_minute(service: Service) -> None:
    service.failing = {SHARDS[1]: JournalLost("a broker does not answer")}
    assert service.run("promote") == SHARDS
    service.now_s += 60
    assert service.run("promote-again") == [SHARDS[1]]
    assert (service.age_s(SHARDS[0]), service.age_s(SHARDS[1])) == (60, 60)

    service.failing.clear()
    assert service.run("promote-again") == [SHARDS[1]]

    assert (service.age_s(SHARDS[0]), service.age_s(SHARDS[1])) == (60, 0)
    assert service.run("promote-again") == []
    assert service.scheduler.get_job("promote-again").trigger.interval.total_seconds() == 60


def test_a_shard_that_failed_and_was_given_up_is_not_promoted_again(service: Service) -> None:
    service.failing = {SHARDS[1]: JournalLost("a broker does not answer")}
    service.run("promote")
    service.owned.remove(SHARDS[1])
    assert service.run("promote-again") == []
    service.run("promote")
    service.owned.add(SHARDS[1])

    assert service.run("promote-again") == []


def test_a_promotion_that_another_run_took_over_does_not_interrupt_it(service: Service) -> None:
    service.failing = {SHARDS[1]: Fenced("a newer producer has this transactional id")}
    service.run("promote")

    assert service.run("promote-again") == []
    assert service.run("promote") == SHARDS
