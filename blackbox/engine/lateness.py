"""The histogram of lateness, for Prometheus; a collector of its own, because it records whole batches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from threading import Lock

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

LATENESS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 600.0, 3600.0)  # fmt: skip


class Lateness(Collector):
    """A histogram of how long after its due time a message could be read."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = Lock()
        self._counts = [0] * (len(LATENESS_S) + 1)
        self._sum_s = 0.0
        registry.register(self)

    def observe(self, due_ms: Sequence[int], at_ms: int) -> None:
        """Count messages that were due at `due_ms` and delivered together at `at_ms`."""
        late_s = sorted(max(0, at_ms - due) / 1000 for due in due_ms)
        with self._lock:
            self._sum_s += sum(late_s)
            below = 0
            for place, bound in enumerate(LATENESS_S):
                # Prometheus' buckets include their bound (`le`).
                upto = bisect_left(late_s, bound + 1e-9)
                self._counts[place] += upto - below
                below = upto
            self._counts[-1] += len(late_s) - below

    def totals(self) -> list[float]:
        """The count of each bucket, then the sum of all in seconds."""
        with self._lock:
            return [*self._counts, self._sum_s]

    def add(self, totals: Sequence[float]) -> None:
        """Count what another process observed, in the form of `totals`."""
        with self._lock:
            self._counts = [
                own + int(more) for own, more in zip(self._counts, totals[:-1], strict=True)
            ]
            self._sum_s += totals[-1]

    def collect(self) -> Iterable[Metric]:
        *counts, sum_s = self.totals()
        buckets = list(zip([*map(str, LATENESS_S), "+Inf"], accumulate(counts), strict=True))
        family = HistogramMetricFamily(
            "blackbox_lateness_seconds", "Time from due time to delivery"
        )
        family.add_metric([], buckets, sum_s)
        yield family
