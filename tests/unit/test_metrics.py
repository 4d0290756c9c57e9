"""The metrics of the verbs, and the pages that use them."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import orjson
import pytest
from prometheus_client import generate_latest

from blackbox.core.dispatched import Dispatched
from blackbox.core.intake import Taken
from blackbox.core.plan import Positions
from blackbox.core.promotion import Promoted
from blackbox.core.recovery import Recovered
from blackbox.engine.metrics import OF_DRIVER, Metrics, Report
from blackbox.records.receipt import Mark
from blackbox.records.request import Shard

SHARD = Shard("TB", 3)
NOW_MS = 1_700_000_000_000
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_intake_is_counted_by_topic(metrics: Metrics) -> None:
    for _ in range(2):
        taken = Taken(accepted=5, invalid=2, cancelled=1, replaced=3, first_due_ms=None)
        metrics.taken(SHARD, taken)
    names = ("accepted", "invalid", "cancelled", "replaced")
    found = [value(metrics, f"blackbox_{name}_total", topic="TB") for name in names]
    assert found == [10, 4, 2, 6]


def test_deliveries_dead_letters_and_retries_are_counted(metrics: Metrics) -> None:
    did = Dispatched(
        due_ms=[NOW_MS] * 3,
        targets=Counter(orders=2, bills=1),
        dead=Counter({"too-large": 2, "empty": 1}),
        postponed=4,
    )
    metrics.dispatched(SHARD, did, NOW_MS)
    assert value(metrics, "blackbox_delivered_total", topic="TB") == 3
    assert value(metrics, "blackbox_delivered_by_target_total", target="orders") == 2
    assert value(metrics, "blackbox_delivered_by_target_total", target="bills") == 1
    assert value(metrics, "blackbox_dead_total", topic="TB", reason="too-large") == 2
    assert value(metrics, "blackbox_dead_total", topic="TB", reason="empty") == 1
    assert value(metrics, "blackbox_postponed_total", topic="TB") == 4


def test_the_metric_pending_is_what_the_tick_left(metrics: Metrics) -> None:
    metrics.dispatched(
        SHARD, Dispatched(due_ms=[NOW_MS] * 3, dead=Counter(empty=1), pending=10), NOW_MS
    )
    assert value(metrics, "blackbox_pending", shard="TB-3") == 6


def test_lateness_counts_each_message_in_its_bucket(metrics: Metrics) -> None:
    metrics.lateness.observe([NOW_MS - 5, NOW_MS - 6, NOW_MS - 4_000_000], NOW_MS)
    bucket = "blackbox_lateness_seconds_bucket"
    assert value(metrics, bucket, le="0.005") == 1
    assert value(metrics, bucket, le="0.01") == 2
    assert value(metrics, bucket, le="3600.0") == 2
    assert value(metrics, bucket, le="+Inf") == 3
    assert value(metrics, "blackbox_lateness_seconds_count") == 3
    assert value(metrics, "blackbox_lateness_seconds_sum") == pytest.approx(4000.011)


def test_lateness_is_never_negative(metrics: Metrics) -> None:
    metrics.lateness.observe([NOW_MS + 3], NOW_MS)
    assert value(metrics, "blackbox_lateness_seconds_sum") == 0
    assert value(metrics, "blackbox_lateness_seconds_bucket", le="0.005") == 1


def test_a_shard_that_fell_behind_shows_the_age_of_its_oldest_request(metrics: Metrics) -> None:
    metrics.dispatched(SHARD, Dispatched(is_full=True, oldest_ms=NOW_MS - 90_000), NOW_MS)
    assert value(metrics, "blackbox_oldest_overdue_seconds", shard="TB-3") == 90
    metrics.dispatched(SHARD, Dispatched(oldest_ms=NOW_MS + 1), NOW_MS)
    assert value(metrics, "blackbox_oldest_overdue_seconds", shard="TB-3") == 0


def test_recoveries_are_counted_with_what_they_found(metrics: Metrics) -> None:
    metrics.recovered(SHARD, Recovered(outcomes=100, missing=2, gone=7))
    metrics.recovered(SHARD, Recovered(outcomes=0, missing=0, gone=0))
    found = [
        value(metrics, f"blackbox_{n}_total", shard="TB-3") for n in ("recoveries", "void", "gone")
    ]
    assert found == [2, 2, 7]


def test_a_shard_shows_that_it_is_not_open_and_that_nothing_was_lost_from_the_start(
    metrics: Metrics,
) -> None:
    metrics.gained(SHARD)
    assert value(metrics, "blackbox_shard_open", shard="TB-3") == 0
    assert value(metrics, "blackbox_gone_total", shard="TB-3") == 0
    assert value(metrics, "blackbox_void_total", shard="TB-3") == 0


def test_each_position_has_its_own_label(metrics: Metrics) -> None:
    metrics.positions(SHARD, Positions(requests=40, receipts=9))
    assert value(metrics, "blackbox_journal_position", shard="TB-3", journal="requests") == 40
    assert value(metrics, "blackbox_journal_position", shard="TB-3", journal="receipts") == 9


def test_a_released_shard_has_no_metrics(metrics: Metrics) -> None:
    for shard in (SHARD, Shard("TB", 4)):
        metrics.dispatched(shard, Dispatched(pending=1), NOW_MS)
        metrics.positions(shard, Positions(1, 1))
        metrics.show(shard, shard_open=True)
    metrics.given_up(SHARD)
    shown = generate_latest(metrics.registry).decode()
    assert 'shard="TB-3"' not in shown
    assert value(metrics, "blackbox_shard_open", shard="TB-4") == 1


def test_a_driver_that_lost_a_shard_keeps_what_the_task_of_the_shard_shows(
    metrics: Metrics,
) -> None:
    metrics.promoted(SHARD, Promoted(SHARD, cold=3, lost=1))
    metrics.promotion_age(SHARD, lambda: 5.0)
    metrics.show(SHARD, hidden_records=2, hidden_seconds=9, pending=4)
    metrics.given_up(SHARD, OF_DRIVER)
    shown = generate_latest(metrics.registry).decode()
    assert re.findall(r'blackbox_(\w+)\{.*shard="TB-3"', shown) == ["pending"]


def test_two_metrics_objects_share_no_registry(metrics: Metrics) -> None:
    Metrics().show(SHARD, shard_open=True)
    assert value(metrics, "blackbox_shard_open", shard="TB-3") is None


def task(*shards: Shard, delivered: int = 1) -> Metrics:
    """A process that has done everything once with each of these shards."""
    metrics = Metrics()
    for shard in shards:
        metrics.taken(shard, Taken(5, 2, 1, 3, None))
        did = Dispatched(
            due_ms=[NOW_MS - 7] * delivered,
            targets=Counter(orders=delivered),
            dead=Counter(empty=1),
            postponed=4,
            pending=10,
        )
        metrics.dispatched(shard, did, NOW_MS)
        metrics.recovered(shard, Recovered(outcomes=100, missing=2, gone=7))
        metrics.positions(shard, Positions(requests=40, receipts=9))
        metrics.show(shard, shard_open=True)
    return metrics


def told(metrics: Metrics) -> Report:
    """A report as another process reads it."""
    return Report(*orjson.loads(orjson.dumps(list(metrics.report()))))


def shown(metrics: Metrics) -> dict[str, float]:
    """Every sample of a registry except the creation times of counters."""
    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_the_driver_shows_the_metrics_that_a_task_reports(metrics: Metrics) -> None:
    metrics.absorb(told(task(SHARD, Shard("TB", 4))), Report())
    assert shown(metrics) == shown(task(SHARD, Shard("TB", 4)))


def test_an_empty_report_changes_no_metric(metrics: Metrics) -> None:
    before = shown(metrics)
    metrics.absorb(told(Metrics()), Report())
    metrics.absorb(Report(), told(Metrics()))
    assert shown(metrics) == before


def test_only_what_was_counted_since_the_last_report_is_added(metrics: Metrics) -> None:
    there, before = task(SHARD), Report()
    for _ in range(3):
        there.dispatched(SHARD, Dispatched(due_ms=[NOW_MS - 300], pending=3), NOW_MS)
        report = told(there)
        metrics.absorb(report, before)
        metrics.absorb(report, report)
        before = report
    assert shown(metrics) == shown(there)
    assert value(metrics, "blackbox_delivered_total", topic="TB") == 4
    assert value(metrics, "blackbox_lateness_seconds_bucket", le="0.01") == 1
    assert value(metrics, "blackbox_lateness_seconds_count") == 4


def test_the_reports_of_two_tasks_add_up(metrics: Metrics) -> None:
    one, two = task(SHARD, delivered=3), task(Shard("TB", 4), delivered=4)
    metrics.absorb(told(one), Report())
    metrics.absorb(told(two), Report())
    assert value(metrics, "blackbox_delivered_total", topic="TB") == 7
    assert value(metrics, "blackbox_dead_total", topic="TB", reason="empty") == 2
    assert value(metrics, "blackbox_lateness_seconds_bucket", le="0.01") == 7
    assert value(metrics, "blackbox_lateness_seconds_sum") == pytest.approx(0.049)
    assert value(metrics, "blackbox_recoveries_total", shard="TB-3") == 1
    assert value(metrics, "blackbox_recoveries_total", shard="TB-4") == 1
    assert value(metrics, "blackbox_pending", shard="TB-3") == 6
    assert value(metrics, "blackbox_pending", shard="TB-4") == 5


def test_a_report_adds_to_what_the_driver_counted(metrics: Metrics) -> None:
    metrics.taken(SHARD, Taken(100, 0, 0, 0, None))
    metrics.lateness.observe([NOW_MS], NOW_MS)
    metrics.absorb(told(task(SHARD)), Report())
    assert value(metrics, "blackbox_accepted_total", topic="TB") == 105
    assert value(metrics, "blackbox_lateness_seconds_count") == 2


def test_a_gauge_that_a_task_no_longer_shows_disappears(metrics: Metrics) -> None:
    other = Shard("TB", 4)
    there = task(SHARD, other)
    before = told(there)
    metrics.absorb(before, Report())
    there.given_up(SHARD)
    metrics.absorb(told(there), before)
    page = generate_latest(metrics.registry).decode()
    assert not re.search(r'blackbox_(pending|shard_open|journal_position)\{.*shard="TB-3"', page)
    assert value(metrics, "blackbox_shard_open", shard="TB-4") == 1
    assert value(metrics, "blackbox_recoveries_total", shard="TB-3") == 1


def test_an_ended_task_keeps_its_counts_and_loses_its_gauges(metrics: Metrics) -> None:
    last = told(task(SHARD))
    metrics.absorb(last, Report())
    metrics.absorb(last._replace(gauges=()), last)
    assert value(metrics, "blackbox_shard_open", shard="TB-3") is None
    assert value(metrics, "blackbox_delivered_total", topic="TB") == 1
    metrics.absorb(last._replace(gauges=()), last)  # removing gauges again is harmless
    assert value(metrics, "blackbox_delivered_total", topic="TB") == 1


def test_a_restarted_task_is_counted_from_zero(metrics: Metrics) -> None:
    before = told(task(SHARD, delivered=10))
    metrics.absorb(before, Report())
    metrics.absorb(told(task(SHARD, delivered=2)), before)
    assert value(metrics, "blackbox_delivered_total", topic="TB") == 12
    assert value(metrics, "blackbox_lateness_seconds_count") == 12
    assert value(metrics, "blackbox_lateness_seconds_sum") == pytest.approx(0.084)


def test_a_report_does_not_change_gauges_of_the_driver(metrics: Metrics) -> None:
    metrics.paused.set(1)
    metrics.skew.set(0.5)
    metrics.batch(100, 0.2)
    metrics.absorb(told(task(SHARD)), told(metrics))
    assert told(metrics).gauges
    assert value(metrics, "blackbox_intake_paused") == 1
    assert value(metrics, "blackbox_batch_records_total") == 100


def test_batches_and_window_handovers_are_measured(metrics: Metrics) -> None:
    metrics.batch(100, 0.2)
    metrics.batch(50, 3.0)
    metrics.handed_over(40)
    assert value(metrics, "blackbox_batch_records_total") == 150
    assert value(metrics, "blackbox_batch_seconds_sum") == pytest.approx(3.2)
    assert value(metrics, "blackbox_batch_seconds_bucket", le="0.2") == 1
    assert value(metrics, "blackbox_window_handover_seconds_bucket", le="0.05") == 1


def test_only_the_writer_of_the_oscillator_shows_its_lag(metrics: Metrics) -> None:
    lag_s = 3.0
    metrics.oscillator_lag("seconds", lambda: lag_s)
    assert value(metrics, "blackbox_oscillator_lag_seconds", topic="seconds") == 3
    lag_s = 4.0
    assert value(metrics, "blackbox_oscillator_lag_seconds", topic="seconds") == 4
    for _ in range(2):
        metrics.oscillator_lag("seconds", None)
        assert value(metrics, "blackbox_oscillator_lag_seconds", topic="seconds") is None


def test_the_low_water_mark_ages_while_no_walk_succeeds(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics.low_water(SHARD, Mark(7, 3), NOW_MS - 5000)
    for later_s in (0, 3600):
        monkeypatch.setattr(time, "time", lambda later_s=later_s: NOW_MS / 1000 + later_s)
        age = value(metrics, "blackbox_journal_low_water_age_seconds", shard=str(SHARD))
        assert age == 5 + later_s


@pytest.mark.parametrize("page", ["monitoring", "operations"])
def test_a_page_names_only_metrics_that_exist(metrics: Metrics, page: str) -> None:
    mentioned = set(re.findall(r"blackbox_\w+", (DOCS / f"{page}.md").read_text()))
    sampled = {re.sub(r"_(bucket|count|sum)$", "", name) for name in mentioned}
    assert sampled
    assert sampled <= {
        family.name + ("_total" if family.type == "counter" else "")
        for family in metrics.registry.collect()
    }
