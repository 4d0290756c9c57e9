"""Targets that an operator has paused get nothing until they are resumed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Protocol

from blackbox.doubt import Doubt
from blackbox.limits import Limits
from blackbox.outgoing import Refusal
from blackbox.request import Reason

logger = logging.getLogger("blackbox.rules")

KNOWN_FOR_S = 1.0


class Targets(Protocol):
    """Which of the topics asked for cannot take messages now, and what some of them refuse."""

    def unavailable(self, topics: Iterable[str]) -> Mapping[str, Refusal]: ...
    def limits(self, topics: Iterable[str]) -> Mapping[str, Limits]: ...


class Paused(Protocol):
    """Which targets are paused, since when."""

    def paused(self) -> Mapping[str, int]: ...


class OpenTargets:
    """The same targets; those that are paused count as unreachable, for as long as it takes. Safe from any thread."""

    def __init__(self, targets: Targets, paused: Paused) -> None:
        self._targets = targets
        self._paused = paused
        self._known: Mapping[str, int] = {}
        self._looked_s = float("-inf")
        self._asking = Lock()

    def unavailable(self, topics: Iterable[str]) -> dict[str, Refusal]:
        wanted = set(topics)
        closed = wanted & self._closed().keys()
        refused: Refusal = (
            Reason.UNREACHABLE,
            "the target is paused; blackbox resume TOPIC lets it go on",
        )
        return {**self._targets.unavailable(wanted - closed), **dict.fromkeys(closed, refused)}

    def limits(self, topics: Iterable[str]) -> Mapping[str, Limits]:
        return self._targets.limits(topics)

    def _closed(self) -> Mapping[str, int]:
        """As it was up to a second ago, or when Redis last told. Raises a Doubt until it has told once."""
        with self._asking:
            now = time.monotonic()
            if now - self._looked_s > KNOWN_FOR_S:
                try:
                    self._known = self._paused.paused()
                except Doubt as silent:
                    if self._looked_s < 0:
                        raise
                    logger.warning("which targets are paused is not known: %s", silent)
                self._looked_s = now
        return self._known
