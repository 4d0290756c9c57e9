"""What the verbs did, as Prometheus sees it, and the page that explains it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from blackbox.dispatch import Dispatched
from blackbox.intake import Taken
from blackbox.metrics import Metrics
from blackbox.plan import Labels
from blackbox.recovery import Recovered
from blackbox.request import Shard

SHARD = Shard("TB", 3)
NOW_MS = 1_700_000_000_000
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


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
    did = Dispatched(due_ms=[NOW_MS] * 3, dead={"too-large": 2, "empty": 1}, retried=4)
    metrics.dispatched(SHARD, did, NOW_MS)
    assert value(metrics, "blackbox_delivered_total", topic="TB") == 3
    assert value(metrics, "blackbox_dead_total", topic="TB", reason="too-large") == 2
    assert value(metrics, "blackbox_dead_total", topic="TB", reason="empty") == 1
    assert value(metrics, "blackbox_retried_total", topic="TB") == 4


def test_pending_is_what_the_tick_left(metrics: Metrics) -> None:
    metrics.dispatched(
        SHARD, Dispatched(due_ms=[NOW_MS] * 3, dead={"empty": 1}, pending=10), NOW_MS
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
    metrics.recovered(SHARD, Recovered(outcomes=100, void=2, gone=7))
    metrics.recovered(SHARD, Recovered(outcomes=0, void=0, gone=0))
    found = [
        value(metrics, f"blackbox_{n}_total", shard="TB-3") for n in ("recoveries", "void", "gone")
    ]
    assert found == [2, 2, 7]


def test_positions_are_the_two_labels(metrics: Metrics) -> None:
    metrics.positions(SHARD, Labels(requests=40, receipts=9))
    assert value(metrics, "blackbox_journal_position", shard="TB-3", journal="requests") == 40
    assert value(metrics, "blackbox_journal_position", shard="TB-3", journal="receipts") == 9


def test_a_shard_given_up_is_shown_no_more(metrics: Metrics) -> None:
    for shard in (SHARD, Shard("TB", 4)):
        metrics.dispatched(shard, Dispatched(pending=1), NOW_MS)
        metrics.positions(shard, Labels(1, 1))
        metrics.opened(shard, True)
    metrics.given_up(SHARD)
    shown = generate_latest(metrics.registry).decode()
    assert 'shard="TB-3"' not in shown
    assert value(metrics, "blackbox_shard_open", shard="TB-4") == 1


def test_two_processes_in_one_do_not_share_metrics(metrics: Metrics) -> None:
    Metrics().opened(SHARD, True)
    assert value(metrics, "blackbox_shard_open", shard="TB-3") is None


def used(metrics: Metrics) -> dict[str, set[str]]:
    """Every metric with its labels, after each was used once."""
    metrics.taken(SHARD, Taken(1, 1, 1, 1, None))
    metrics.dispatched(SHARD, Dispatched(due_ms=[NOW_MS], dead={"empty": 1}, retried=1), NOW_MS)
    metrics.recovered(SHARD, Recovered(1, 1, 1))
    metrics.positions(SHARD, Labels(1, 1))
    metrics.opened(SHARD, True)
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = labels
    return found


def test_the_page_for_operators_explains_every_metric_with_its_labels(metrics: Metrics) -> None:
    rows = re.findall(r"^\| `(blackbox_\w+)` \|([^|]*)\|", OPERATIONS.read_text(), re.MULTILINE)
    explained = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    assert explained == used(metrics)


def test_an_alert_uses_only_metrics_that_exist(metrics: Metrics) -> None:
    mentioned = set(re.findall(r"blackbox_\w+", OPERATIONS.read_text()))
    sampled = {re.sub(r"_(bucket|count|sum)$", "", name) for name in mentioned}
    assert sampled <= set(used(metrics))
