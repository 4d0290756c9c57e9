"""Prometheus metrics of what the verbs did, fed from their return values, never from inside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from blackbox.core.dispatched import Dispatched
from blackbox.core.intake import Taken
from blackbox.core.plan import Positions
from blackbox.core.promotion import Promoted
from blackbox.core.recovery import Recovered
from blackbox.engine.lateness import Lateness
from blackbox.records.receipt import Mark
from blackbox.records.request import Shard

BATCH_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

COUNTERS = {
    "accepted": (
        "Requests stored in Redis, by request topic; a recovery that reads requests again counts them again", "topic",
    ),
    "invalid": (
        "Requests that cannot be parsed, or come too late to replace another; each becomes a dead letter", "topic",
    ),
    "cancelled": ("Pending requests cancelled by their caller", "topic"),
    "replaced": ("Pending requests replaced by a later one, under the same caller id or by id", "topic"),
    "delivered": ("Messages delivered, by request topic", "topic"),
    "delivered_by_target": ("Messages delivered, by target topic", "target"),
    "dead": ("Dead letters, by request topic and by the value of their header blackbox-reason", "topic", "reason"),
    "refused": (
        "Requests refused by the rules of their caller; each becomes a dead letter, forbidden or quota. Callers that "
        "the rules do not name are counted together, as (others)", "caller", "reason",
    ),
    "postponed": (
        "Requests postponed or parked in a batch, for any reason: the target, a broker, a rate limit, a backlog, or dead "
        "letters that are written in a later batch", "topic",
    ),
    "recoveries": (
        "How often the shard was opened: at the start, after a takeover, after each error that requires a recovery",
        "shard",
    ),
    "void": (
        "Outcomes that recoveries declared void (a torn transaction); their requests are delivered again", "shard",
    ),
    "gone": (
        "Requests lost: Kafka's retention removed them before they were read, or while some of them were pending",
        "shard",
    ),
    "oscillator_written": ("Seconds written to the oscillator topic by this process", "topic"),
    "batch_records": ("Spark engine: requests read by intake batches",),
}  # fmt: skip
"""By name: the help text, then the labels."""

GAUGES = {
    "pending": ("Requests in the index, due or not; without the cold tier", "shard"),
    "in_doubt": (
        "Pending requests that the last owner of the shard may have delivered: the place that its last receipt names "
        "cannot be read (no leader, no permission, another producer's open transaction). They wait, and blackbox show "
        "names the place; all others are delivered", "shard",
    ),
    "oldest_overdue_seconds": (
        "Age of the oldest overdue request while more requests are due than fit in one batch; otherwise 0", "shard",
    ),
    "journal_position": (
        "Next offset to be read, of the request topic (requests) and of its receipts (receipts)", "shard", "journal",
    ),
    "journal_low_water_age_seconds": (
        "Age of the oldest request that a rebuild would read; it grows until the next successful walk", "shard",
    ),
    "journal_low_water_position": (
        "Low-water mark: records below it are not needed for a rebuild", "shard", "journal",
    ),
    "cold_unpromotable": (
        "Requests of the cold tier that the last promotion could not write again: Kafka no longer has their record, and "
        "they become dead letters (removed), or does not accept it any more (refused)", "shard", "reason",
    ),
    "promotion_age_seconds": (
        "Time since the shard's last promotion that succeeded; before that, since the first that was tried", "shard",
    ),
    "rebuild_records": (
        "Requests that the current or last rebuild has read (read), and that it reads in all (total)", "shard", "state",
    ),
    "shard_open": ("1 while the shard is open here, 0 while it is being opened", "shard"),
    "hidden_records": (
        "Records of the request topic behind a caller's open transaction, which no consumer can read yet; checked "
        "every 10 s", "shard",
    ),
    "hidden_seconds": (
        "How long the records of blackbox_hidden_records have been hidden; 0 if the readable end has moved since the last check", "shard",
    ),
    "shard_unread": (
        "Spark engine: 1 while the shard's requests cannot be read; requests in the index are delivered", "shard",
    ),
    "oscillator_lag_seconds": (
        "Seconds that have begun and are not written yet; only the process that writes them reports it", "topic",
    ),
    "redis_clock_skew_seconds": ("Redis' clock minus this host's",),
    "kafka_clock_ahead_seconds": (
        "How far the broker's timestamp of the last request read is ahead of the clocks of Redis and this host; 0 if "
        "it is not, or if callers set timestamps",
    ),
    "kafka_clock_behind_seconds": (
        "How far the clock of the broker with the shard's receipts is behind the earlier of Redis' and this host's "
        "clocks; negative if it is ahead, 0 until a receipt shows it", "shard",
    ),
    "callers_file_valid": (
        "0 while the file with the callers' rules cannot be used, and the previous rules stay in effect; otherwise 1",
    ),
    "intake_paused": ("1 while Redis has no room and requests wait in Kafka",),
}  # fmt: skip

OF_DRIVER = ("hidden_records", "hidden_seconds", "cold_unpromotable", "promotion_age_seconds")
"""With Spark, the gauges of shards that the driver sets, not the task that owns the shard."""

Sample = tuple[str, tuple[str, ...], float]
"""name of the metric, values of its labels, its value"""


class Report(NamedTuple):
    """The counters and gauges of a process, for JSON. `lateness`: the counts of its buckets, then the sum in s."""

    counters: Sequence[Sample] = ()
    gauges: Sequence[Sample] = ()
    lateness: Sequence[float] = ()


class Metrics:
    """All metrics of a process."""

    def __init__(self) -> None:
        # Not the global registry: two services in one process would share their metrics.
        self.registry = CollectorRegistry()
        self.lateness = Lateness(self.registry)
        self._counters = {
            name: Counter(f"blackbox_{name}", text, labels, registry=self.registry)
            for name, (text, *labels) in COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"blackbox_{name}", text, labels, registry=self.registry)
            for name, (text, *labels) in GAUGES.items()
        }
        self.skew = self._gauges["redis_clock_skew_seconds"]
        self.rules_valid = self._gauges["callers_file_valid"]
        self.rules_valid.set(1)
        self.paused = self._gauges["intake_paused"]
        self._batches = Histogram(
            "blackbox_batch_seconds",
            "Spark engine: duration of an intake batch, from its start to the last position",
            buckets=BATCH_S,
            registry=self.registry,
        )
        self._hand_over = Histogram(
            "blackbox_window_handover_seconds",
            "Spark engine: time during which no task had a group of shards open, between one dispatch task "
            "and the next; messages due in this time are late by up to this time",
            buckets=BATCH_S,
            registry=self.registry,
        )

    def batch(self, records: int, took_s: float) -> None:
        self._batches.observe(took_s)
        self._counters["batch_records"].inc(records)

    def handed_over(self, took_ms: int) -> None:
        """The shards of a group passed from one window of Spark's dispatch to the next."""
        self._hand_over.observe(took_ms / 1000)

    def taken(self, shard: Shard, taken: Taken) -> None:
        for name in ("accepted", "invalid", "cancelled", "replaced"):
            self._counters[name].labels(shard.topic).inc(getattr(taken, name))
        if taken.kafka_ahead_ms is not None:
            self._gauges["kafka_clock_ahead_seconds"].set(taken.kafka_ahead_ms / 1000)
        for (reason, caller), count in taken.refused.items():
            self._counters["refused"].labels(caller, reason).inc(count)

    def dispatched(self, shard: Shard, did: Dispatched, at_ms: int) -> None:
        """Count a tick. `at_ms` is when it had ended, and its messages could be read."""
        if did.due_ms:
            self._counters["delivered"].labels(shard.topic).inc(len(did.due_ms))
            self.lateness.observe(did.due_ms, at_ms)
        for target, count in did.targets.items():
            self._counters["delivered_by_target"].labels(target).inc(count)
        for reason, count in did.dead.items():
            self._counters["dead"].labels(shard.topic, reason).inc(count)
        if did.postponed:
            self._counters["postponed"].labels(shard.topic).inc(did.postponed)
        overdue_ms = max(0, at_ms - did.oldest_ms) if did.is_full and did.oldest_ms else 0
        self.show(
            shard,
            # `did.pending` was counted before the tick removed these.
            pending=did.pending - len(did.due_ms) - sum(did.dead.values()),
            in_doubt=did.in_doubt,
            oldest_overdue_seconds=overdue_ms / 1000,
        )

    def show(self, shard: Shard, **values: float) -> None:
        for name, value in values.items():
            self._gauges[name].labels(str(shard)).set(value)

    def recovered(self, shard: Shard, recovered: Recovered) -> None:
        self._counters["recoveries"].labels(str(shard)).inc()
        self._counters["void"].labels(str(shard)).inc(recovered.missing)
        self._counters["gone"].labels(str(shard)).inc(recovered.gone)

    def positions(self, shard: Shard, positions: Positions) -> None:
        self._gauges["journal_position"].labels(str(shard), "requests").set(positions.requests)
        self._gauges["journal_position"].labels(str(shard), "receipts").set(positions.receipts)

    def low_water(self, shard: Shard, mark: Mark, written_ms: int) -> None:
        """Show the mark, and the age of its first request, written at `written_ms`."""
        # Calculated at each scrape: the age must grow while no walk succeeds.
        self._gauges["journal_low_water_age_seconds"].labels(str(shard)).set_function(
            lambda: max(0.0, time.time() - written_ms / 1000)
        )
        self._gauges["journal_low_water_position"].labels(str(shard), "requests").set(mark.requests)
        self._gauges["journal_low_water_position"].labels(str(shard), "receipts").set(mark.receipts)

    def rebuilding(self, shard: Shard, read: int, total: int) -> None:
        self._gauges["rebuild_records"].labels(str(shard), "read").set(read)
        self._gauges["rebuild_records"].labels(str(shard), "total").set(total)

    def promoted(self, shard: Shard, done: Promoted) -> None:
        for reason, count in (("removed", done.lost), ("refused", done.refused)):
            self._gauges["cold_unpromotable"].labels(str(shard), reason).set(count)

    def promotion_age(self, shard: Shard, age_s: Callable[[], float]) -> None:
        # Calculated at each scrape, as above.
        self._gauges["promotion_age_seconds"].labels(str(shard)).set_function(age_s)

    def gained(self, shard: Shard) -> None:
        # From the start: an alert sees no increase of a counter that begins with its first event.
        self.show(shard, shard_open=False)
        for name in ("void", "gone"):
            self._counters[name].labels(str(shard))

    def given_up(self, shard: Shard, only: Collection[str] = GAUGES) -> None:
        """Stop showing gauges of a shard that another process owns now."""
        for name in only:
            if "shard" in GAUGES[name][1:]:
                self._gauges[name].remove_by_labels({"shard": str(shard)})

    def oscillated(self, topic: str, seconds: int) -> None:
        self._counters["oscillator_written"].labels(topic).inc(seconds)

    def oscillator_lag(self, topic: str, lag_s: Callable[[], float] | None) -> None:
        """Show how far behind the topic is, by calling `lag_s` each time; None: another process writes it."""
        if lag_s is not None:
            self._gauges["oscillator_lag_seconds"].labels(topic).set_function(lag_s)
        else:
            self._gauges["oscillator_lag_seconds"].remove_by_labels({"topic": topic})

    def report(self) -> Report:
        """Everything counted and shown so far, for another process to `absorb`."""
        return Report(_samples(self._counters), _samples(self._gauges), self.lateness.totals())

    def absorb(self, report: Report, before: Report) -> None:
        """Add what another process counted since its report `before`, and show what it shows now."""
        counted = {(name, tuple(labels)): value for name, labels, value in before.counters}
        for name, labels, value in report.counters:
            # Less than before: the process has restarted from zero, so all of it is new.
            earlier = counted.get((name, tuple(labels)), 0.0)
            self._counters[name].labels(*labels).inc(value - earlier if value >= earlier else value)
        for name, labels, value in report.gauges:
            self._gauges[name].labels(*labels).set(value)
        # A shard that the other process gave up must not stay at its last values.
        shown = {(name, tuple(labels)) for name, labels, _ in report.gauges}
        for name, labels, _ in before.gauges:
            if (name, tuple(labels)) not in shown:
                self._gauges[name].remove(*labels)
        if report.lateness:
            since = before.lateness or [0.0] * len(report.lateness)
            more = [now - then for now, then in zip(report.lateness, since, strict=True)]
            self.lateness.add(more if min(more) >= 0 else report.lateness)


def _samples(metrics: Mapping[str, Counter] | Mapping[str, Gauge]) -> list[Sample]:
    """The values of all metrics with labels."""
    # Metrics without labels are the driver's own. prometheus_client adds a sample `_created`, a
    # time, to each counter: times must not be added up.
    return [
        (name, tuple(sample.labels.values()), sample.value)
        for name, metric in metrics.items()
        for family in metric.collect()
        for sample in family.samples
        if sample.labels and not sample.name.endswith("_created")
    ]
