"""Rates of the verbs beside the same work without them, and beside a simple loop: one shard, one thread each."""

from __future__ import annotations

import gc
import statistics
from collections import defaultdict
from collections.abc import Callable

from bench import ground, naive, raw, verbs
from blackbox.embedded import EmbeddedStack

BATCH = 1000
# The naive loop gets a 40th of the requests, because all of them would take it minutes.
NAIVE_SHARE = 40
COLUMNS = ("intake /s", "drain /s")
RATIOS = (("blackbox", "raw"), ("blackbox", "naive"), ("blackbox", "blackbox, at least once"))

Run = Callable[[], tuple[float, float]]
Rates = dict[str, list[tuple[float, float]]]
"""For each contestant the rates of each round, per second: intake and drain."""


class Verbs:
    """Contestants that run in this process."""

    def __init__(self, stack: EmbeddedStack, requests: int) -> None:
        field = self._field = ground.prepare(stack, requests)
        few = field.count // NAIVE_SHARE
        self._runs: dict[str, tuple[int, Run]] = {
            "raw": (field.count, lambda: raw.run(field, BATCH, exactly_once=True)),
            "blackbox": (field.count, lambda: verbs.run(field, BATCH, exactly_once=True)),
            "blackbox, at least once": (
                field.count,
                lambda: verbs.run(field, BATCH, exactly_once=False),
            ),
            "naive": (few, lambda: naive.run(field, few)),
        }
        self.rates: Rates = defaultdict(list)

    def run(self, say: Callable[[str], None]) -> None:
        """One round of all contestants."""
        for name, (count, run) in self._runs.items():
            say(name)
            # The garbage of one contestant must not slow down the next one.
            gc.collect()
            intake_s, drain_s = run()
            self.rates[name].append((count / intake_s, count / drain_s))
        self._field.empty_redis()


def rows(rates: Rates) -> list[list[str]]:
    """Medians, with the lowest and the highest rate."""
    return [
        [name, *(spread(each) for each in zip(*found, strict=True))]
        for name, found in rates.items()
    ]


def ratio_rows(rates: Rates) -> list[list[str]]:
    return [[f"{one} : {other}", *_ratios(rates[one], rates[other])] for one, other in RATIOS]


def _ratios(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> list[str]:
    # Ratios within a round: its contestants ran one after the other on a machine in the same state.
    pairs = list(zip(ours, theirs, strict=True))
    return [f"{statistics.median(a[at] / b[at] for a, b in pairs):.2f}" for at in (0, 1)]


def spread(values: tuple[float, ...] | list[float]) -> str:
    """The median, and the range if it has one."""
    middle = f"{statistics.median(values):,.0f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.0f} to {max(values):,.0f})"
