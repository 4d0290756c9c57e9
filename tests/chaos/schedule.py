"""The content of a schedule, decided by its seed: the fault, the requests, their times, and the service's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

BURSTS = 8
LARGE = 20_000

Delivery = Literal["exactly-once", "at-least-once"]


class Ask(NamedTuple):
    """A record for the request topic. `at_s` is when it is sent."""

    at_s: float
    partition: int
    value: str


@dataclass(frozen=True, slots=True)
class Schedule:
    """One fault, and the requests during it. The same seed and number give the same schedule."""

    seed: int
    number: int
    fault: str

    @property
    def name(self) -> str:
        return f"--seed {self.seed} --schedule {self.number}"

    def dice(self, purpose: str) -> Random:
        """A random generator for one purpose. More draws for one purpose do not change the others."""
        return Random(f"{self.seed}/{self.number}/{purpose}")

    @property
    def setup(self) -> Setup:
        dice = self.dice("setup")
        once = dice.random() < 0.8
        return Setup(
            delivery="exactly-once" if once else "at-least-once",
            partitions=dice.choice([1, 2, 2, 3]),
            batch_limit=dice.choice([3, 7, 1000]) if once else dice.choice([3, 7]),
            poll_interval_ms=dice.choice([100, 300, 1000]),
            hot_horizon_s=dice.choice([0, 1]),
            retention_s=dice.choice([1, 1, 3]),
            renew_after_s=dice.choice([1, 2]),
        )

    def asks(self, setup: Setup, wave: int, within_s: float, topics: Sequence[str]) -> list[Ask]:
        """A wave of requests that are sent in the first half of `within_s` and due by its end."""
        dice = self.dice(f"wave {wave}")
        count = dice.randint(30, 60)
        asks: list[Ask] = []
        for number in range(count):
            at_s = (number * BURSTS // count) / BURSTS * within_s / 2
            body = f"{wave}-{number:04d}".ljust(_size(dice), ".")
            asks += _one(dice, body, at_s, dice.randrange(setup.partitions), within_s, topics)
        return sorted(asks)


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of the service of a schedule."""

    delivery: Delivery
    partitions: int
    batch_limit: int
    poll_interval_ms: int
    hot_horizon_s: int
    retention_s: int
    renew_after_s: int


def schedules(seed: int, counts: Mapping[str, int]) -> list[Schedule]:
    """The given number of schedules of each fault, mixed, so that parallel lanes differ."""
    faults = [fault for fault, count in counts.items() for _ in range(count)]
    Random(seed).shuffle(faults)
    return [Schedule(seed, number, fault) for number, fault in enumerate(faults)]


def _size(dice: Random) -> int:
    return LARGE if dice.random() < 0.02 else dice.choice([20, 100, 500])


def _one(
    dice: Random, body: str, at_s: float, partition: int, within_s: float, topics: Sequence[str]
) -> list[Ask]:
    """A request, and perhaps a second record that cancels or replaces it."""
    kind = dice.random()
    left_s = within_s - at_s
    request = {
        "topic": dice.choice(topics),
        "message": body,
        "countdown": round(dice.uniform(0, left_s), 3),
    }
    if kind < 0.05:
        request["countdown"] = "soon"
    elif kind < 0.25:
        request["id"] = f"id of {body[:6]}"
        request["countdown"] = round(dice.uniform(left_s / 2, left_s + 1), 3)
    asks = [Ask(at_s, partition, json.dumps(request))]
    if kind < 0.05 or kind >= 0.2:
        return asks
    later_s = dice.uniform(at_s, within_s / 2)
    ending = {"id": request["id"], "cancel": True}
    if kind < 0.1:
        countdown_s = round(dice.uniform(0, within_s - later_s), 3)
        ending = request | {"message": f"{body[:6]}-anew", "countdown": countdown_s}
    return [*asks, Ask(later_s, partition, json.dumps(ending))]
