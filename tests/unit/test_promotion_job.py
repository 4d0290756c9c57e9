"""When a service promotes its shards: all regularly, new ones and those that failed within a minute."""

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
        self.passed_over = 0
        self.meanwhile: Callable[[], object] = lambda: None
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
        self.meanwhile()
        confirm()
        if shard in self.failing:
            raise self.failing[shard]
        return Promoted(shard, passed_over=self.passed_over)

    def run(self, after_s: float = 0) -> list[Shard]:
        """The shards that the job tries to promote when it runs after this time."""
        self.now_s += after_s
        self.promoted.clear()
        self.scheduler.get_job("promote").func()
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


def test_shards_are_promoted_every_hour(service: Service) -> None:
    assert service.run() == SHARDS
    assert service.run(after_s=60) == []
    assert service.run(after_s=3480) == []
    assert service.run(after_s=60) == SHARDS
    assert service.scheduler.get_job("promote").trigger.interval.total_seconds() == 60


def test_a_shard_that_failed_is_promoted_again_within_a_minute(service: Service) -> None:
    service.failing = {SHARDS[1]: JournalLost("a broker does not answer")}
    assert service.run() == SHARDS
    assert service.run(after_s=59) == []
    assert service.run(after_s=1) == [SHARDS[1]]
    assert (service.age_s(SHARDS[0]), service.age_s(SHARDS[1])) == (60, 60)

    service.failing.clear()
    assert service.run(after_s=120) == [SHARDS[1]]

    assert (service.age_s(SHARDS[0]), service.age_s(SHARDS[1])) == (180, 0)
    assert service.run(after_s=60) == []


def test_a_shard_that_goes_on_failing_is_tried_ever_more_seldom(service: Service) -> None:
    service.owned = {SHARDS[0]}
    service.failing = {SHARDS[0]: JournalLost("no permission to write")}
    service.run()

    tries = [minute for minute in range(1, 241) if service.run(after_s=60)]
    assert tries == [1, 3, 7, 15, 31, 63, 123, 183]

    service.failing.clear()
    assert service.run(after_s=3600) == [SHARDS[0]]
    service.failing = {SHARDS[0]: JournalLost("a broker does not answer")}
    assert service.run(after_s=3600) == [SHARDS[0]]
    assert service.run(after_s=60) == [SHARDS[0]]


def test_the_age_of_a_shard_is_shown_again_once_it_is_open_again(service: Service) -> None:
    service.run()
    service.metrics.given_up(SHARDS[1])
    assert service.age_s(SHARDS[1]) is None

    assert service.run(after_s=60) == []
    assert service.age_s(SHARDS[1]) == 60


def test_a_shard_that_was_closed_at_its_turn_is_promoted_when_it_is_open_again(
    service: Service,
) -> None:
    service.failing = {SHARDS[1]: JournalLost("a broker does not answer")}
    service.run()
    service.owned.remove(SHARDS[1])
    assert service.run(after_s=3600) == [SHARDS[0], SHARDS[2]]
    service.owned.add(SHARDS[1])

    assert service.run(after_s=60) == [SHARDS[1]]
    assert service.age_s(SHARDS[1]) == 3660, "it has not succeeded since"


def test_a_shard_that_is_new_is_promoted_within_a_minute(service: Service) -> None:
    service.owned.remove(SHARDS[1])
    service.run()
    service.owned.add(SHARDS[1])

    assert service.run(after_s=60) == [SHARDS[1]]


def test_a_shard_that_is_lost_while_others_are_promoted_shows_no_age(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.meanwhile = lambda: service.owned.discard(SHARDS[1])

    assert service.run() == [SHARDS[0], SHARDS[2]]

    assert [service.age_s(shard) for shard in SHARDS] == [0, None, 0]
    assert caplog.text == ""


def test_a_promotion_that_another_run_took_over_does_not_interrupt_it(service: Service) -> None:
    service.failing = {SHARDS[1]: Fenced("a newer producer has this transactional id")}
    service.run()

    assert service.run(after_s=599) == []
    assert service.run(after_s=1) == [SHARDS[1]]


def test_a_promotion_that_passed_over_requests_is_repeated_within_a_minute(
    service: Service,
) -> None:
    service.passed_over = 1
    assert service.run() == SHARDS

    assert service.run(after_s=60) == SHARDS
