"""What a fault is to those who play schedules of it."""

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
"""Whose servers it harms: a broker's harm is that of a company of schedules, all at once."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`count` is how many schedules a full run has of it. `story` ends with everything mended.

    `exactly_once`: there is nothing to go wrong without transactions.
    `may_revive`: a cancel may be read too late, because requests are read late. What is due by then
    goes out before what was written meanwhile is read.
    """

    name: str
    story: Callable[[Scene], None]
    count: int
    servers: Servers = "shared"
    exactly_once: bool = False
    may_revive: bool = False
    needs_faketime: bool = False
