"""The description of a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.chaos.scene import Scene

Servers = Literal[
    "shared",
    "own redis",
    "own kafka and redis",
    "sentinels",
    "redis cluster",
    "frail kafka",
    "three brokers",
    "spark",
]
"""The servers that a fault breaks. A broken broker affects a group of schedules at once."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`count` is the number of its schedules in a full run. `story` repairs everything at its end.

    `exactly_once`: the fault affects only transactions.
    `may_revive`: a cancel may be read too late, because requests are read late. Requests that are due
    by then are delivered before later records are read.
    """

    name: str
    story: Callable[[Scene], None]
    count: int
    servers: Servers = "shared"
    exactly_once: bool = False
    may_revive: bool = False
    needs_faketime: bool = False
