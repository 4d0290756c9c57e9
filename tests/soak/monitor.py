"""The memory and file descriptors of each process over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from threading import Event
from types import TracebackType
from typing import NamedTuple

import psutil

EVERY_S = 5.0
WARM_UP_S = 600.0
ROUND_S = 360.0
"""Six kinds of faults, one per minute."""


class Sample(NamedTuple):
    """A process with all its children, `at_s` after the monitor started."""

    at_s: float
    memory_mb: float
    descriptors: int


@dataclass(slots=True)
class Life:
    """One process from its start to its end."""

    role: str
    pid: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def warm(self) -> list[Sample]:
        """The samples after the warm-up; none if it did not live for two rounds of faults after that."""
        first_s = self.samples[0].at_s + WARM_UP_S
        is_long = self.samples[-1].at_s - first_s >= 2 * ROUND_S
        return [one for one in self.samples if one.at_s >= first_s] if is_long else []

    def drift(self, of: Callable[[Sample], float]) -> float:
        """The relative change from the first round of faults after the warm-up to the last; medians."""
        warm = self.warm
        first = [of(one) for one in warm if one.at_s < warm[0].at_s + ROUND_S]
        last = [of(one) for one in warm if one.at_s > warm[-1].at_s - ROUND_S]
        return median(last) / median(first) - 1


class Monitor:
    """Samples processes from time to time; `pids` returns the running ones, by role.

    An error while sampling is raised when the monitor ends.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]], every_s: float = EVERY_S) -> None:
        self._pids = pids
        self._every_s = every_s
        self._lives: dict[tuple[str, int], Life] = {}
        self._began = time.monotonic()
        self._over = Event()
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Monitor:
        self._looking = self._thread.submit(self._sample_all)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.shutdown()
        if error is None:
            self._looking.result()

    def lives(self) -> list[Life]:
        return [life for life in self._lives.values() if life.samples]

    def _sample_all(self) -> None:
        while not self._over.wait(self._every_s):
            for role, pid in self._pids().items():
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    life = self._lives.setdefault((role, pid), Life(role, pid))
                    life.samples.append(self._sample(pid))

    def _sample(self, pid: int) -> Sample:
        own = psutil.Process(pid)
        family = [own, *own.children(recursive=True)]
        at_s = time.monotonic() - self._began
        return Sample(at_s, _memory_mb(family), sum(one.num_fds() for one in family))


def _memory_mb(family: Iterable[psutil.Process]) -> float:
    """Memory that several of them share counts once."""
    return sum(one.memory_full_info().pss for one in family) / 1e6
