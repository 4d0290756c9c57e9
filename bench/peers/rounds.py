"""Alternating rounds of the contestants that are processes of their own."""

from __future__ import annotations

import subprocess
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import redis

from bench.peers import apscheduler, arq, asynq, bullmq, celery, dramatiq, huey, saq
from bench.peers.blackbox_service import BlackboxService
from bench.peers.contestant import Contestant, NotMeasured, Site
from bench.peers.etf1 import Etf1
from bench.peers.phases import Limits, Phases
from bench.peers.redis_peer import RedisPeer
from bench.peers.results import Round

SPECS = (bullmq.SPEC, asynq.SPEC, arq.SPEC, saq.SPEC, celery.SPEC, dramatiq.SPEC, huey.SPEC, apscheduler.SPEC)  # fmt: skip
FAILURES = (
    NotMeasured,
    psutil.Error,
    redis.RedisError,
    subprocess.SubprocessError,
    OSError,
    ValueError,
    # Of a wait that took too long.
    SystemExit,
)


@dataclass(slots=True)
class Entry:
    """The part of the report about one contestant."""

    one: Contestant
    version: str = ""
    count: int = 0
    rounds: list[Round] = field(default_factory=list)
    reason: str = ""


def contestants(site: Site, etf1: Path | None) -> list[Contestant]:
    services = [BlackboxService(site, engine) for engine in ("process", "spark")]
    return [*services, Etf1(site, etf1), *(RedisPeer(site, spec) for spec in SPECS)]


class Peers:
    """All contestants that were chosen. One that fails never stops the others."""

    def __init__(
        self, site: Site, chosen: list[Contestant], limits: Limits, say: Callable[[str], None]
    ) -> None:
        self._site, self._limits, self._say = site, limits, say
        self.entries = [Entry(one) for one in chosen]

    def install(self) -> None:
        for entry in self.entries:
            self._say(f"{entry.one.name}: installing")
            self._attempt(entry, self._install)

    def _install(self, entry: Entry) -> None:
        entry.version = entry.one.install()

    def run(self, *, kills: bool, measured: Callable[[], None]) -> None:
        """One round. Each contestant is calibrated in its first one; `measured` is called after each."""
        limits = replace(self._limits, kills=kills)
        for entry in self.entries:
            if not entry.reason:
                self._attempt(entry, lambda one: self._measure(one, limits))
                measured()

    def _measure(self, entry: Entry, limits: Limits) -> None:
        name = entry.one.name
        phases = Phases(self._site, entry.one, limits, lambda what: self._say(f"{name}: {what}"))
        if not entry.count:
            entry.count = phases.calibrate()
        found = Round(entry.count)
        entry.rounds.append(found)
        phases.run(found)

    def _attempt(self, entry: Entry, step: Callable[[Entry], None]) -> None:
        try:
            step(entry)
        except FAILURES as error:
            # Rounds that succeeded before stay in the report.
            entry.reason = str(error) or type(error).__name__
            if not isinstance(error, NotMeasured):
                traceback.print_exc()
            self._say(f"{entry.one.name}: not measured: {entry.reason}")
